"""Casts and normalisation of values: joined as in turn, one by one as all, rounded once."""

import pytest
import torch

from memfeed.transforms.params.value_changes import Affine, Mapped, Scaled, scale_and_shift

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
IMAGES = torch.arange(2 * 2 * 6).view(2, 2, 2, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [torch.uint8, torch.float32, torch.float16, torch.int64])
def test_all_is_one_by_one(dtype, source):
    scaled = Scaled(Affine(dtype, (0.5, 3.0), (1.0, -2.0)))
    images = IMAGES.to(source)
    before = images.clone()
    every = scaled.all(images)
    assert every.dtype is scaled.output_dtype(source) is dtype
    assert torch.equal(every, torch.stack([scaled.one(image, i) for i, image in enumerate(images)]))
    assert torch.equal(images, before)
    exact = images.double() * torch.tensor([0.5, 3.0]).view(2, 1, 1) + torch.tensor([1.0, -2.0]).view(2, 1, 1)
    assert torch.equal(every, exact.to(dtype))


def test_a_cast_alone():
    cast = Scaled(Affine(torch.float16))
    assert torch.equal(cast.all(IMAGES), IMAGES.half())
    assert torch.equal(cast.one(IMAGES[0], 0), IMAGES[0].half())
    assert not Affine(torch.float16).is_half
    assert Affine(torch.bfloat16, (1.0,), (0.0,)).is_half
    assert not Affine(torch.float32, (1.0,), (0.0,)).is_half


@pytest.mark.parametrize(
    ("one", "other", "joined"),
    [
        (Affine(torch.float32), Affine(torch.float32, (2.0,), (1.0,)), Affine(torch.float32, (2.0,), (1.0,))),
        (Affine(torch.float32, (2.0,), (1.0,)), Affine(torch.float32), Affine(torch.float32, (2.0,), (1.0,))),
        (
            Affine(torch.float32, (2.0, 3.0), (1.0, 0.0)),
            Affine(torch.float32, (10.0, 1.0), (5.0, -1.0)),
            Affine(torch.float32, (20.0, 3.0), (15.0, -1.0)),
        ),
        (Affine(torch.float32), Affine(torch.float32), Affine(torch.float32)),
    ],
)
def test_joined(one, other, joined):
    assert one.then(other) == joined


def test_one_pass_may_write_in_place():
    values = torch.ones(1, 2, 3)
    scale_and_shift(values, (2.0, 3.0), (1.0, 1.0), values)
    assert values.tolist() == [[[3] * 3, [4] * 3]]


def test_any_function():
    mapped = Mapped(lambda image: image.sqrt(), torch.float32)
    images = torch.tensor([[[[4.0]]], [[[9.0]]]])
    assert mapped.all(images).flatten().tolist() == [2, 3]
    assert mapped.one(images[1], 1).item() == 3
    assert mapped.output_dtype(torch.float64) is torch.float32
    assert mapped.output_shape(images.shape) == images.shape
