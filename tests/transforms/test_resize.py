"""Resize and RandomResizedCrop: against torchvision and Pillow, and what is drawn."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_batches import keys, params, pictures
from scipy import stats

from memfeed import Keys
from memfeed.transforms import RandomResizedCrop, Resize
from memfeed.transforms.operation import KeyedDraws, Operation
from memfeed.transforms.params.sizes import Sizes

COUNT = 2000
DTYPES = [torch.uint8, torch.int16, torch.float32, torch.float64]


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest", "nearest-exact"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_resized_crops_are_torchvisions(functional, mode, dtype):
    from torchvision.transforms import InterpolationMode

    images = pictures(8, 3, 40, 33, dtype)
    transform = RandomResizedCrop((16, 24), interpolation=InterpolationMode(mode))
    drawn = params(transform, images)
    expected = [
        functional.resized_crop(
            image, int(top), int(left), int(h), int(w), [16, 24], InterpolationMode(mode), antialias=True
        )
        for image, top, left, h, w in zip(
            images, drawn.top, drawn.left, drawn.box_height, drawn.box_width, strict=True
        )
    ]  # fmt: skip
    assert torch.equal(transform.apply(images, keys(8)), torch.stack(expected))


@pytest.mark.parametrize("size", [7, (9, 30), [12]])
@pytest.mark.parametrize("max_size", [None, 15])
def test_resize_is_torchvisions(functional, size, max_size):
    images = pictures(2, 3, 40, 33)
    if max_size is not None and size != 7:
        size = 7
    expected = functional.resize(images, size if isinstance(size, int) else list(size), max_size=max_size)
    assert torch.equal(Resize(size, max_size=max_size).apply(images, keys(2)), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32])
@pytest.mark.parametrize("size", [(1, 1), (7, 1), (40, 1), (1, 7)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_resized_to_one_pixel(channels, size, dtype):
    """Against Pillow: torch itself raises, or mistakes the layout of what is one pixel wide (torch 2.6 to 2.15)."""
    image = pytest.importorskip("PIL.Image")
    images = pictures(2, channels)
    found = Resize(size).apply(images.to(dtype), keys(2))
    assert found.dtype == dtype
    for one, resized in zip(images.flatten(0, 1), found.flatten(0, 1), strict=True):
        expected = np.array(image.fromarray(one.numpy()).resize(size[::-1], image.Resampling.BILINEAR))
        assert abs(resized.double().numpy() - expected).max() <= 1
    layout = images.to(dtype).contiguous(memory_format=torch.channels_last)
    assert torch.equal(Resize(size).apply(layout, keys(2)), found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_floats_of_16_bits_are_computed_in_float32(mode, dtype):
    images = pictures(2, 3, 40, 33).to(dtype) / 255
    transform = RandomResizedCrop(16, interpolation=mode)
    assert torch.equal(transform.apply(images, keys(2)), transform.apply(images.float(), keys(2)).to(dtype))


def test_boxes_of_resized_crops():
    drawn = params(RandomResizedCrop(8), pictures(500, 1, 64, 48))
    h, w = drawn.box_height.astype(float), drawn.box_width.astype(float)
    assert (drawn.top >= 0).all()
    assert (drawn.left >= 0).all()
    assert (drawn.top + h <= 64).all()
    assert (drawn.left + w <= 48).all()
    assert 0.07 < (h * w / (64 * 48)).min() < 0.1
    assert 0.72 < (w / h).min() < (w / h).max() < 1.38
    area = h * w / (64 * 48)
    assert 0.4 < np.median(area[w < 48]) < 0.6, "areas are uniform"
    wide = params(RandomResizedCrop(8, scale=(0.9, 1.0)), pictures(3, 1, 10, 100))
    assert (wide.box_height == 10).all()
    assert (wide.box_width == 13).all(), "the largest box in the middle whose ratio is allowed"


@pytest.mark.parametrize("size", [(40, 30), (31, 60), (60, 13), (13, 60), (24, 24)])
@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (0.9, 0.9), (1.4, 3.0)])
def test_boxes_that_never_fit_are_the_middle(size, ratio):
    transforms = pytest.importorskip("torchvision.transforms")
    images = pictures(3, 1, *size)
    expected = transforms.RandomResizedCrop.get_params(images[0], [2.0, 3.0], [*ratio])
    for transform in (RandomResizedCrop(8, (2, 3), ratio), RandomResizedCrop(8, (2, 3), ratio, "nearest")):
        drawn = params(transform, images)
        found = zip(drawn.top, drawn.left, drawn.box_height, drawn.box_width, strict=True)
        assert [tuple(map(int, box)) for box in found] == [expected] * 3
        top, left, h, w = expected
        box = images[:, :, top : top + h, left : left + w]
        same = Resize(8 if h == w else (8, 8), transform.interpolation).apply(box, keys(3))
        assert torch.equal(transform.apply(images, keys(3)), same)
        assert torch.equal(transform.apply([*images], keys(3)), same)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12),
    scale=st.sampled_from([(0.08, 1.0), (0.9, 3.0), (2.0, 3.0)]),
    ratio=st.sampled_from([(3 / 4, 4 / 3), (0.2, 0.8), (1.4, 3.0)]),
    seed=st.integers(0, 99),
)
def test_boxes_of_several_sizes_are_those_of_each_size(sizes, scale, ratio, seed):
    """They are drawn for all images together; each must be the one that its image gets among images of one size."""
    transform = RandomResizedCrop(4, scale, ratio)
    draws = KeyedDraws(Keys(seed, 0, torch.arange(len(sizes))))
    groups = Sizes.of([torch.empty(1, *size, dtype=torch.uint8) for size in sizes])
    together = transform.make_params_by_size(groups, torch.uint8, "", draws)
    apart = Operation.make_params_by_size(transform, groups, torch.uint8, "", draws)
    for one, other in zip(together, apart, strict=True):
        for name in ("top", "left", "box_height", "box_width"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert (one.height, one.width, one.mode) == (other.height, other.width, other.mode)


@pytest.mark.parametrize(
    ("size", "scale", "ratio"),
    [
        ((60, 20), (0.1, 1.0), (1.6, 4.0)),  # few of the ten tries fit
        ((20, 60), (0.15, 1.0), (0.2, 0.8)),
        ((41, 33), (0.8, 1.4), (0.5, 2.0)),
        ((32, 32), (0.08, 1.0), (3 / 4, 4 / 3)),
    ],
)
def test_boxes_have_torchvisions_distribution(size, scale, ratio):
    transforms = pytest.importorskip("torchvision.transforms")
    image = torch.zeros(1, *size)
    torch.manual_seed(0)
    theirs = np.array(
        [transforms.RandomResizedCrop.get_params(image, [*scale], [*ratio]) for _ in range(COUNT)], np.float64
    )
    drawn = params(RandomResizedCrop(8, scale, ratio), image.expand(COUNT, 1, *size))
    ours = np.stack([drawn.top, drawn.left, drawn.box_height, drawn.box_width], 1)
    for of in (lambda box: box, lambda box: box[:, :2] * 2 + box[:, 2:], lambda box: box[:, :1] * 100 + box[:, 2:]):
        for one, other in zip(of(ours).T, of(theirs).T, strict=True):
            assert stats.ks_2samp(one, other, method="asymp").pvalue > 1e-4
    middle = [((boxes[:, :2] == (np.array(size) - boxes[:, 2:]) // 2).all(1)).sum() for boxes in (ours, theirs)]
    assert stats.chi2_contingency([[count, COUNT - count] for count in middle]).pvalue > 1e-4
