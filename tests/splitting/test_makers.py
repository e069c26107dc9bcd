"""Leaves are made again of rows: arrays, NumPy scalars and PIL images, where all samples have them alike."""

from enum import IntEnum

import numpy as np
import pytest
import torch

from memfeed.errors import SplitError
from memfeed.schema import values
from memfeed.schema.infer import infer
from memfeed.splitting.makers import finished_makers_of, is_kept_as_tensor, makers_of

image = pytest.importorskip("PIL.Image")


class Level(IntEnum):
    """Of a sample."""

    LOW = 0
    HIGH = 1


def palette_image(value, colours=range(30)):
    made = image.new("P", (3, 2), value)
    made.putpalette(bytes(colours))
    return made


def made_again(samples):
    schema = infer(samples).schema
    makers = makers_of(samples, schema)
    return [
        {field.name: makers[field.path](values.as_tensor(sample[field.name])) for field in schema} for sample in samples
    ]


def test_they_are_made_again_as_they_were():
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    samples = [
        {"array": pixels, "number": np.float32(i), "mask": palette_image(i), "image": image.fromarray(pixels + i)}
        for i in range(3)
    ]
    for sample, again in zip(samples, made_again(samples), strict=True):
        assert type(again["array"]) is np.ndarray
        assert np.array_equal(again["array"], sample["array"])
        assert type(again["number"]) is np.float32
        assert again["number"] == sample["number"]
        for name in ("mask", "image"):
            assert (again[name].mode, again[name].tobytes()) == (sample[name].mode, sample[name].tobytes())
        assert again["mask"].getpalette() == sample["mask"].getpalette()


@pytest.mark.parametrize("other", [palette_image(1, range(1, 31)), image.new("L", (3, 2)), image.new("PA", (3, 2))])
def test_images_that_are_not_alike_stay_tensors(other):
    samples = [palette_image(0), other]
    schema = infer([palette_image(0), palette_image(1)]).schema
    (maker,) = makers_of(samples, schema).values()
    assert is_kept_as_tensor(maker)
    assert torch.equal(maker(torch.zeros(1, 2, 3)), torch.zeros(1, 2, 3))


def test_an_optional_leaf_is_made_again_too():
    samples = [
        {"array": None if i % 2 else np.full(3, i), "mask": None if i % 3 else palette_image(i)} for i in range(6)
    ]
    samples = [{**one, "level": None if i < 2 else Level(i % 2)} for i, one in enumerate(samples)]
    schema = infer(samples).schema
    makers = {field.name: makers_of(samples, schema)[field.path] for field in schema}
    assert [makers["level"](value) for value in (None, 0, 1)] == [None, Level.LOW, Level.HIGH]
    assert type(makers["level"](1)) is Level
    assert type(makers["array"](torch.zeros(3))) is np.ndarray
    assert makers["mask"](torch.zeros(1, 2, 3, dtype=torch.uint8)).mode == "P"
    assert [makers[name](None) for name in makers] == [None] * 3


def test_a_copy_of_an_image_keeps_the_transparency_of_its_palette():
    made = image.new("P", (3, 2), 1)
    made.putpalette(bytes(range(40)), "RGBA")
    assert values.picture_of(values.copy_value(made)) == values.picture_of(made)
    assert is_kept_as_tensor(*makers_of([values.copy_value(made)], infer([made]).schema).values())


def test_a_finished_batch_has_no_palettes():
    with pytest.raises(SplitError, match="a palette of their own"):
        finished_makers_of([palette_image(0), palette_image(1)])
    assert finished_makers_of([torch.zeros(2), torch.ones(2)]) == {}
