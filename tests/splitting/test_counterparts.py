"""Transforms that take the place of steps: the arithmetic of their comparison, and what has none."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfeed.errors import TransformError
from memfeed.splitting.counterparts import (
    _affine_arguments,
    _changes_the_same,
    _cut_array,
    _fills_alike,
    _noise_like,
    counterpart,
)
from memfeed.splitting.leaves import kind_of
from memfeed.splitting.step_values import Value
from memfeed.transforms import CenterCrop, Window
from memfeed.transforms.params.geometry import Warped

v2 = pytest.importorskip("torchvision.transforms.v2")
geometry = pytest.importorskip("torchvision.transforms.v2.functional._geometry")
tv_tensors = pytest.importorskip("torchvision.tv_tensors")


def image(height=20, width=24):
    return tv_tensors.Image(torch.randint(0, 256, (3, height, width), dtype=torch.uint8))


def value_of(*leaves):
    return Value(leaves, {})


def warp_of(angle, moves, scale, shear, size=(20, 24), center=None):
    """Return the map of torchvision's affine as memfeed describes it: output pixels to those that they show."""
    height, width = size
    middle = [width / 2, height / 2] if center is None else center
    center_f = [0.0, 0.0] if center is None else [middle[0] - width * 0.5, middle[1] - height * 0.5]
    matrix = geometry._get_inverse_affine_matrix(center_f, angle, [float(m) for m in moves], scale, shear)
    return Warped(np.array(matrix, np.float64).reshape(1, 2, 3), height, width)


@settings(max_examples=80)
@given(
    angle=st.floats(-179, 179),
    moves=st.tuples(st.integers(-5, 5), st.integers(-5, 5)),
    scale=st.floats(0.3, 3),
    shear=st.tuples(st.floats(-40, 40), st.floats(-40, 40)),
    center=st.none() | st.tuples(st.integers(0, 24), st.integers(0, 20)),
)
def test_the_arguments_of_a_map_give_the_map_again(angle, moves, scale, shear, center):
    given_map = warp_of(angle, moves, scale, list(shear), center=center)
    found = _affine_arguments(given_map, center)
    again = warp_of(found[0], found[1], found[2], found[3], center=center)
    assert np.allclose(again.matrix[0, :, :2], given_map.matrix[0, :, :2], atol=1e-6)
    assert np.allclose(again.matrix, given_map.matrix, atol=1e-5)
    assert found[1] == list(moves)


@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("vflip", [False, True])
def test_windows_of_arrays(hflip, vflip):
    window = Window(np.array([1]), np.array([2]), 3, 4, hflip=np.array([hflip]), vflip=np.array([vflip]))
    array = np.arange(6 * 8 * 3).reshape(6, 8, 3)
    expected = array[1:4, 2:6]
    expected = expected[::-1] if vflip else expected
    expected = expected[:, ::-1] if hflip else expected
    assert np.array_equal(_cut_array(array, window), expected)
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    assert np.array_equal(_cut_array(tensor, window).permute(1, 2, 0).numpy(), expected)
    with pytest.raises(TransformError, match="only windows of arrays"):
        _cut_array(array, object())


def test_noise_has_the_kind_of_its_image():
    noise = np.random.RandomState(0)
    for leaf in (
        image(),
        torch.rand(3, 4, 5),
        tv_tensors.Mask(torch.zeros(4, 5, dtype=torch.bool)),
        np.zeros((4, 5, 3), np.uint8),
    ):
        made = _noise_like(leaf, noise)
        assert kind_of(made) == kind_of(leaf)
        assert made.shape == leaf.shape
        assert len(np.unique(np.asarray(made))) > 1


def test_a_crop_that_pads_fills_images_and_masks_alike():
    pads = v2.RandomCrop(8, padding=2, fill=7)
    mask = tv_tensors.Mask(torch.zeros(20, 24))
    assert _fills_alike(pads, 7, [image()])
    assert not _fills_alike(pads, 0, [image()])
    assert not _fills_alike(pads, 7, [image(), mask])  # torchvision would fill the mask with 7 too
    assert _fills_alike(v2.RandomCrop(8), 0, [image(), mask])


STEPS = [
    (v2.CenterCrop(8), [("CenterCrop", {"size": [8, 8]})]),
    (v2.RandomHorizontalFlip(0.3), [("RandomHorizontalFlip", {"p": 0.3})]),
    (v2.RandomCrop(8), [("RandomCrop", None)]),
    (v2.GaussianBlur(3), None),
    (v2.RandomCrop(8, padding=1, padding_mode="edge"), None),
    (lambda given: given, None),
]


@pytest.mark.parametrize(("step", "expected"), STEPS)
def test_steps(step, expected):
    found = counterpart(step, [value_of(image()) for _ in range(2)], [("image",)])
    if expected is None:
        assert found is None
        return
    assert [one.name for one in found] == [name for name, _ in expected]
    for one, (_, arguments) in zip(found, expected, strict=True):
        assert arguments is None or arguments.items() <= dict(one.arguments).items()
        assert one.on == (("image",),)


def test_a_step_of_values_without_an_image_has_none():
    assert counterpart(v2.CenterCrop(8), [value_of(3)], [()]) is None


def test_an_image_that_is_too_small_for_the_transform_is_left_to_the_step():
    assert counterpart(v2.RandomCrop(30), [value_of(image())], [("image",)]) is None


def test_a_plain_tensor_beside_an_image_does_not_move():
    flip = v2.RandomHorizontalFlip(0.5)
    both = value_of(image(), torch.rand(1, 20, 24))
    assert not _changes_the_same(flip, [CenterCrop(8, on=[("0",), ("1",)])], both)
    mask = value_of(image(), tv_tensors.Mask(torch.rand(20, 24) > 0.5))
    assert _changes_the_same(flip, [CenterCrop(8, on=[("0",), ("1",)])], mask)
