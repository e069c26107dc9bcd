"""Crops and flips: against torchvision, how they are drawn, and how windows join."""

import numpy as np
import pytest
import torch
from image_batches import keys, params, photos, pictures

from memfeed.errors import TransformError
from memfeed.transforms import CenterCrop, Compose, RandomCrop, RandomHorizontalFlip, RandomVerticalFlip, Window
from memfeed.transforms.backends.passes import fused


def test_crops_and_flips_are_torchvisions(functional):
    images = photos(16, 3, 13, 11)
    transform = Compose([RandomCrop((7, 5)), RandomHorizontalFlip(), RandomVerticalFlip()])
    drawn = []

    def uniform(draws):
        drawn.append(torch.rand(16, draws, dtype=torch.float64).numpy())
        return drawn[-1]

    window = None
    for part in transform.transforms:
        shape = images.shape if window is None else window.output_shape(images.shape)
        params = part.make_params(shape, images.dtype, uniform)
        window = params if window is None else window.then(params)
    expected = []
    for i, image in enumerate(images):
        image = functional.crop(image, int(drawn[0][i, 0] * 7), int(drawn[0][i, 1] * 7), 7, 5)
        image = functional.horizontal_flip(image) if drawn[1][i, 0] < 0.5 else image
        expected.append(functional.vertical_flip(image) if drawn[2][i, 0] < 0.5 else image)
    assert torch.equal(fused(images, [window], None), torch.stack(expected))


@pytest.mark.parametrize("size", [1, 4, 5, (9, 6), (8, 7), (13, 11), 14, (20, 4), (6, 21), (40, 33), (19, 16)])
@pytest.mark.parametrize("path", ["apply", "reference"])
def test_center_crop_is_torchvisions(functional, size, path):
    from torchvision.transforms.functional import center_crop

    sides = [size, size] if isinstance(size, int) else list(size)
    images = [photos(1, 3, 13, 11)[0], photos(1, 3, 12, 14)[0]]
    expected = [functional.center_crop(image, sides) for image in images]
    assert torch.equal(expected[0], center_crop(images[0], sides))
    assert torch.equal(getattr(CenterCrop(size), path)(images, keys(2)), torch.stack(expected))
    assert torch.equal(getattr(CenterCrop(size), path)(images[0][None], keys(1))[0], expected[0])
    joined = Compose([RandomHorizontalFlip(1.0), CenterCrop(size), RandomVerticalFlip(1.0)])  # one window
    turned = functional.center_crop(images[0].flip(-1), sides).flip(-2)
    assert torch.equal(getattr(joined, path)(images[0][None], keys(1))[0], turned)


def test_windows_compose():
    images = photos(1, 1, 9, 9)
    rng = np.random.default_rng(0)
    for _ in range(50):
        window, whole = Window.whole(images.shape), images
        for _ in range(4):
            height, width = rng.integers(1, whole.shape[2] + 1), rng.integers(1, whole.shape[3] + 1)
            top, left = rng.integers(0, whole.shape[2] - height + 1), rng.integers(0, whole.shape[3] - width + 1)
            flips = rng.random(2) < 0.5
            window = window.then(
                Window(np.array([top]), np.array([left]), int(height), int(width), flips[:1], flips[1:])
            )
            whole = whole[:, :, top : top + height, left : left + width]
            whole = whole.flip([dim for dim, flip in zip((-1, -2), flips, strict=True) if flip])
        top, left = int(window.top[0]), int(window.left[0])
        direct = images[:, :, top : top + window.height, left : left + window.width]
        direct = direct.flip([-1]) if window.hflip[0] else direct
        assert torch.equal(direct.flip([-2]) if window.vflip[0] else direct, whole)


def test_every_window_is_drawn_as_often():
    positions = torch.arange(9).reshape(1, 1, 3, 3).expand(4096, 1, 3, 3)
    corners = RandomCrop(2).apply(positions, keys(4096))[:, 0, 0, 0]
    counts = torch.bincount(corners, minlength=9)
    assert counts.count_nonzero() == 4
    assert counts[[0, 1, 3, 4]].min() > 1024 - 5 * 28


def test_flip_probability():
    images = torch.tensor([0, 1]).expand(4096, 1, 1, 2)
    flipped = RandomHorizontalFlip(0.25).apply(images, keys(4096))[:, 0, 0, 0].float().mean()
    assert abs(flipped - 0.25) < 5 * 0.007


@pytest.mark.parametrize("padding", [3, (1, 2), (1, 2, 3, 4)])
def test_padded_crops_are_torchvisions(functional, padding):
    images = pictures(16, 3, 11, 13)
    transform = RandomCrop(9, padding, fill=[7, 8, 9])
    drawn = params(transform, images)
    sides = [padding] if isinstance(padding, int) else list(padding)
    left, top = (sides * 2)[:2]
    expected = []
    for image, at_top, at_left in zip(images, drawn.top, drawn.left, strict=True):
        padded = functional.pad(image, sides, fill=[7, 8, 9])
        expected.append(functional.crop(padded, int(at_top) + top, int(at_left) + left, 9, 9))
    assert torch.equal(transform.apply(images, keys(16)), torch.stack(expected))
    corners = {(int(a), int(b)) for a, b in zip(drawn.top, drawn.left, strict=True)}
    assert len(corners) > 4


def test_a_crop_larger_than_the_padded_image():
    with pytest.raises(TransformError, match="26 x 22 pixels .*, the crop is 27 x 27"):
        RandomCrop(27, padding=1).apply(pictures(), keys())
