"""Boxes that are resized: all as one by one, as torch does it, for masks and points too."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

from memfeed.errors import TransformError
from memfeed.transforms import Resize, ToDtype
from memfeed.transforms.params.resample import FEW, MODES, Resampled, check_mode


def boxes(n, height, width, out, seed=0, **options):
    draw = np.random.RandomState(seed)
    h, w = draw.randint(1, height + 1, n), draw.randint(1, width + 1, n)
    top, left = (draw.randint(0, side - size + 1) for side, size in ((height, h), (width, w)))
    return Resampled(top, left, h, w, *out, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int32, torch.float16])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("n", [2, FEW + 1])
def test_all_is_one_by_one(mode, dtype, channels, n):
    images = (torch.arange(n * channels * 63).view(n, channels, 7, 9) * 37 % 256).to(dtype)
    for out in ((4, 5), (7, 9), (12, 1), (1, 1)):
        change = boxes(n, 7, 9, out, mode=mode)
        every = change.all(images)
        assert every.shape == change.output_shape(images.shape) == (n, channels, *out)
        assert every.dtype is dtype
        for i, image in enumerate(images):
            one = change.one(image, i)
            assert torch.equal(one, every[i])


@pytest.mark.parametrize(("mode", "antialias"), [*itertools.product(["bilinear", "bicubic"], [True, False])])
def test_the_whole_image_is_resized_as_torch_does_it(mode, antialias):
    images = torch.rand(2, 3, 8, 6)
    zero = np.zeros(2, np.int64)
    change = Resampled(zero, zero, zero + 8, zero + 6, 4, 5, mode, antialias)
    assert torch.equal(
        change.all(images), interpolate(images, (4, 5), mode=mode, align_corners=False, antialias=antialias)
    )


def test_no_images():
    empty = np.zeros(0, np.int64)
    assert Resampled(empty, empty, empty, empty, 4, 5).all(torch.zeros(0, 3, 8, 6)).shape == (0, 3, 4, 5)


def test_masks_are_never_mixed():
    mask = torch.tensor([[[0, 5], [5, 0]]])
    zero = np.zeros(1, np.int64)
    change = Resampled(zero, zero, zero + 2, zero + 2, 5, 5).nearest()
    assert change.mode == "nearest"
    assert set(change.one(mask, 0).flatten().tolist()) == {0, 5}
    assert change.nearest() is change


def test_points_go_where_their_pixels_go():
    change = Resampled(np.array([2]), np.array([1]), np.array([4]), np.array([5]), 8, 20)
    points = torch.tensor([[1.0, 2.0], [6.0, 6.0]], dtype=torch.float64)
    assert change.points(points, torch.zeros(2, dtype=torch.int64)).tolist() == [[0, 0], [20, 8]]


@pytest.mark.parametrize("mode", ["lanczos", "", None, 3])
def test_what_is_no_mode(mode):
    with pytest.raises(TransformError):
        check_mode(mode)


def test_modes_of_torchvision():
    v2 = pytest.importorskip("torchvision.transforms.v2")
    assert [check_mode(v2.InterpolationMode(mode)) for mode in ("nearest", "bilinear", "bicubic")] == [
        "nearest",
        "bilinear",
        "bicubic",
    ]


@pytest.mark.parametrize("size", [4.0, None, True, "4", (4, 5, 6), (), 0])
def test_what_is_no_size(size):
    with pytest.raises(TransformError, match="expected a positive int"):
        Resize(size)


def test_what_is_no_dtype():
    with pytest.raises(TransformError, match="expected a dtype of torch"):
        ToDtype("float32")
