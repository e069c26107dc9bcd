"""Arguments between the steps of a pipeline, and the images in them."""

import numpy as np
import pytest
import torch
from PIL import Image

from memfeed.errors import SplitError
from memfeed.splitting.step_values import Value, as_field, have_same_others, largest_difference, to_tensor

PICTURE = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


def test_one_argument_several_and_keywords_pass_on_in_their_form():
    assert Value((3,), {}).after(lambda x: (x, x)).args == ((3, 3),)
    assert Value((3, 4), {}).after(lambda x, y: [y, x]).args == (4, 3)
    after = Value((), {"image": 3, "mask": 4}).after(lambda image, mask: {"image": mask, "mask": image})
    assert (after.args, after.kwargs) == ((), {"image": 4, "mask": 3})


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((3, 4), {}), ((), {"a": 3}), ((3,), {"a": 4})])
def test_a_result_of_another_form_is_not_passed_on(args, kwargs):
    with pytest.raises(SplitError, match="found 5; expected what the next step takes"):
        Value(args, kwargs).after(lambda *args, **kwargs: 5)


def test_a_step_writes_to_a_copy():
    value = Value((torch.zeros(3), np.zeros(3)), {})
    after = value.after(lambda x, y: (x.add_(1), np.add(y, 1, out=y)))
    assert [float(one.sum()) for one in after.args] == [3, 3]
    assert [float(one.sum()) for one in value.args] == [0, 0]


def test_images_are_those_of_one_scene():
    mask = np.zeros((4, 5), np.uint8)
    assert len(Value((PICTURE, {"mask": mask, "label": 3}), {}).images()) == 2
    assert Value((PICTURE, mask.T), {}).images() == []  # of another size
    assert Value((torch.zeros(5, 4, 4),), {}).images() == []  # of five channels
    assert Value((mask,), {}).images() == []  # no channels
    assert Value((3, "text"), {}).images() == []


def test_other_images_take_the_places_of_the_images():
    value = Value(({"label": 3, "image": torch.zeros(3, 4, 4)},), {"mask": torch.zeros(1, 4, 4)})
    changed = value.with_images(["image", "mask"])
    assert changed.args == ({"label": 3, "image": "image"},)
    assert changed.kwargs == {"mask": "mask"}
    assert value.others() == [3]


def test_others_are_compared_without_the_images():
    def make(number, label):
        return Value((torch.full((3, 4, 4), number), label), {})

    assert have_same_others(make(1, 5), make(2, 5))
    assert not have_same_others(make(1, 5), make(1, 6))
    assert not have_same_others(make(1, 5), make(1, 5.0))
    assert not have_same_others(make(1, 5), Value((torch.ones(3, 4, 4), 5, 5), {}))


@pytest.mark.parametrize("leaf", [PICTURE, Image.fromarray(PICTURE), torch.from_numpy(PICTURE).permute(2, 0, 1)])
def test_fields_have_their_channels_first(leaf):
    assert torch.equal(as_field(leaf), torch.from_numpy(PICTURE).permute(2, 0, 1))


def test_differences_are_in_levels_of_eight_bits():
    other = PICTURE.copy()
    other[1, 2, 0] += 7
    assert largest_difference(PICTURE, PICTURE.copy()) == 0
    assert largest_difference(PICTURE, other) == largest_difference(other, PICTURE) == 7
    assert largest_difference(torch.zeros(1, 2, 2), torch.full((1, 2, 2), 2 / 255)) == pytest.approx(2)
    assert largest_difference(PICTURE, PICTURE[:3]) == float("inf")
    assert largest_difference(PICTURE, PICTURE.astype(np.int16)) == float("inf")
    assert largest_difference(np.zeros((0, 3)), np.zeros((0, 3))) == 0


def test_what_is_no_image_is_named():
    with pytest.raises(SplitError, match="expected an image, a tensor or an array"):
        to_tensor(object())
