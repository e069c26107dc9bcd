"""Cases of boxes that are resized and of warped images, for the batched form in torch and for the kernels."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from memfeed.transforms import Affine, Resampled, Warped, Window
from memfeed.transforms.ops.rotate import inverse_matrix
from memfeed.transforms.params.value_changes import Scaled

LAYOUTS = (torch.contiguous_format, torch.channels_last)
DTYPES = (torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float32)
FORMS = ("contiguous", "channels_last", "part", "every other")
MODES = (("bilinear", True), ("bilinear", False), ("bicubic", True), ("bicubic", False), ("nearest", True),
         ("nearest-exact", True))  # fmt: skip


def smooth_images(n, c, h, w, seed=0):
    """Floats in [0, 1] that change little from pixel to pixel: a coordinate rounded otherwise hardly matters."""
    coarse = torch.rand(n, c, 4, 4, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, (h, w), mode="bicubic", align_corners=False).clamp(0, 1)


@st.composite
def batches(draw, most=30, dtypes=DTYPES, least=0):
    """Smooth images of up to `most` pixels a side, in several layouts in memory."""
    n, c = draw(st.integers(least, 3)), draw(st.integers(1, 5))
    h, w = draw(st.integers(1, most)), draw(st.integers(1, most))
    dtype, form = draw(st.sampled_from(dtypes)), draw(st.sampled_from(FORMS))
    extra, step = int(form == "part"), 2 if form == "every other" else 1
    seed = draw(st.integers(0, 9))
    made = smooth_images(n, c, (h + extra) * step, (w + 2 * extra) * step, seed)
    made = made.to(dtype) if dtype.is_floating_point else (made * 255).round().to(dtype)
    made = made.contiguous(memory_format=torch.channels_last) if form == "channels_last" else made
    return made[:, :, extra::step, extra : extra + w * step : step]


def integers(draw, lows, highs):
    return np.array([draw(st.integers(low, high)) for low, high in zip(lows, highs, strict=True)], np.int64)


@st.composite
def resized(draw, shape, most=40, shrink=100):
    """Boxes of images of this shape, resized to a size of up to `most` pixels a side, `shrink` times smaller."""
    n, _, h, w = shape
    ones = np.ones(n, np.int64)
    box_height, box_width = integers(draw, ones, ones * h), integers(draw, ones, ones * w)
    top, left = integers(draw, 0 * ones, h - box_height), integers(draw, 0 * ones, w - box_width)
    largest = (int(box.max(initial=1)) for box in (box_height, box_width))
    height, width = (draw(st.integers(-(-box // shrink), most)) for box in largest)
    mode, antialias = draw(st.sampled_from(MODES))
    return Resampled(top, left, box_height, box_width, height, width, mode, antialias)


@st.composite
def warped(draw, shape):
    """Rotations with moves, scales and shears, of images of this shape."""
    n, c, h, w = shape
    angle = np.array([draw(st.sampled_from([0.0, 90.0, 180.0, 17.0, -33.3])) for _ in range(n)])
    moves = np.stack([integers(draw, [-5] * n, [5] * n), integers(draw, [-5] * n, [5] * n)], 1)
    scale = np.array([draw(st.sampled_from([1.0, 0.7, 1.3, 1e-6])) for _ in range(n)])
    shears = (np.full(n, draw(st.sampled_from([0.0, 10.0]))), np.zeros(n))
    fill = draw(st.sampled_from([0, 7, tuple(range(5, 5 + c))]))
    matrix = inverse_matrix(angle, moves.reshape(n, 2), scale, shears, (0.0, 0.0))
    return Warped(matrix, h, w, draw(st.sampled_from(["nearest", "bilinear"])), fill)


@st.composite
def windows(draw, shape, height, width):
    """A window within images of this height and width, mirrored or not; or None."""
    if draw(st.booleans()):
        return None
    n, own_height, own_width = shape[0], draw(st.integers(1, height)), draw(st.integers(1, width))
    top = integers(draw, [0] * n, [height - own_height] * n)
    left = integers(draw, [0] * n, [width - own_width] * n)
    hflip, vflip = (integers(draw, [0] * n, [1] * n).astype(bool) for _ in range(2))
    return Window(top, left, own_height, own_width, hflip, vflip)


@st.composite
def affines(draw, c):
    """A cast to a float, with or without scales and shifts; or None."""
    if draw(st.booleans()):
        return None
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    if draw(st.booleans()):
        return Affine(dtype)
    values = st.lists(st.floats(-3, 3, width=16), min_size=c, max_size=c)
    return Affine(dtype, tuple(draw(values)), tuple(draw(values)))


def tolerance(dtype, largest=1.0):
    """How far two ways to compute images of this dtype may be apart: a step of integers, or two roundings."""
    return 1 if not dtype.is_floating_point else largest * max(4e-5, 2 * torch.finfo(dtype).eps)


@st.composite
def sampled_cases(draw, most, most_out, shrink, kinds=("resize", "warp")):
    """Images, a resize or a warp of them, a window of the result, an Affine and a layout."""
    image = draw(batches(most, (*DTYPES, torch.int64, torch.float64)))
    resize = draw(st.sampled_from(kinds)) == "resize"
    sampled = draw(resized(image.shape, most_out, shrink) if resize else warped(image.shape))
    window = draw(windows(image.shape, sampled.height, sampled.width))
    return image, sampled, window, draw(affines(image.shape[1])), draw(st.sampled_from(LAYOUTS))


def share_apart(got, image, sampled, window, affine, layout):
    """Return the share of values that differ from what torch makes of the images, one change after another."""
    assert got.is_contiguous(memory_format=layout)
    plain = sampled.all(image)
    plain = plain if window is None else window.all(plain)
    expected = plain if affine is None else Scaled(affine).all(plain)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    picks = sampled.mode.startswith("nearest")
    atol = 0 if picks and (affine is None or affine.scale is None) else tolerance(image.dtype, _largest(plain))
    if affine is not None:  # Triton's interpreter truncates towards bfloat16
        atol *= max(map(abs, affine.scale or (1,)))
        atol += _largest(expected) * max(1e-5, 2 * torch.finfo(affine.dtype).eps)
    differ = ~torch.isclose(got.cpu().double(), expected.double(), rtol=0, atol=atol)
    return float(differ.double().mean()) if got.numel() else 0.0


def _largest(image):
    return float(image.abs().max()) if image.numel() else 0.0
