"""RandomRotation and RandomAffine: against torchvision, and how neighbouring maps join."""

import numpy as np
import pytest
import torch
from image_batches import keys, params, pictures

from memfeed.transforms import Compose, RandomAffine, RandomRotation


def close(got, expected):
    """Equal but for a few pixels where a coordinate lies between two and is rounded the other way."""
    assert got.dtype == expected.dtype
    differ = (got.double() - expected.double()).abs() > (1 if got.dtype == torch.uint8 else 1e-4)
    assert differ.double().mean() < 0.02


@pytest.mark.parametrize("center", [None, (3.0, 8.5)])
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_rotations_are_torchvisions(functional, mode, dtype, center):
    from torchvision.transforms import InterpolationMode

    images = pictures(1, 3, 24, 20, dtype)
    for angle in (-30, 0, 17, 180, 271):
        got = RandomRotation((angle, angle), mode, center).apply(images, keys(1))
        expected = functional.rotate(images, angle, InterpolationMode(mode), center=center, fill=None)
        close(got, expected)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_affine_maps_are_torchvisions(functional, mode):
    from torchvision.transforms import InterpolationMode

    images = pictures(1, 3, 24, 20, torch.float32)
    transform = RandomAffine((10, 10), (1.0, 1.0), (1.2, 1.2), (5, 5, -7, -7), mode, center=(4, 9))
    uniform = {1: 0.6, 2: 0.35}  # moves by 0.2 of the width and -0.3 of the height
    drawn = transform.make_params(
        images.shape, images.dtype, lambda draws: np.array([[uniform.get(j, 0.5) for j in range(draws)]])
    )
    expected = functional.affine(
        images, 10, [4, -7], 1.2, [5, -7], InterpolationMode(mode), fill=None, center=[4, 9]
    )  # fmt: skip
    close(drawn.all(images), expected)


def test_neighbouring_maps_sample_once():
    images = pictures(4, 3, 40, 40, torch.float32)
    twice = Compose([RandomRotation((20, 20), "bilinear"), RandomRotation((-20, -20), "bilinear")])
    assert torch.allclose(twice.apply(images, keys(4)), images, atol=1e-5), "there and back is where it was"
    apart = images
    for part in twice.transforms:
        apart = part.apply(apart, keys(4))
    middle = (..., slice(14, 26), slice(14, 26))
    assert (apart - images)[middle].abs().max() > 1e-4, "sampled twice it is blurred"


def test_joined_maps_do_what_one_after_the_other_does():
    images, sample = pictures(6), torch.arange(6)
    xy = torch.rand(6, 2, dtype=torch.float64) * 20
    first = params(RandomAffine(40, (0.3, 0.3), (0.7, 1.4), 10), images)
    second = params(RandomRotation((70, 80), center=(3, 4)), images)
    joined = first.then(second)
    torch.testing.assert_close(joined.points(xy, sample), second.points(first.points(xy, sample), sample))
    assert first.then(params(RandomRotation(5, "bilinear"), images)) is None
    assert first.then(params(RandomRotation(5, fill=1), images)) is None
