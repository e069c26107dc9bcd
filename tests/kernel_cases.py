"""Cases for the GPU kernel, which Triton's interpreter and a GPU try alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from memfeed.transforms import Affine, Window

LAYOUTS = (torch.contiguous_format, torch.channels_last)


def by_turns(cases, others=LAYOUTS):
    """Pair each case with each of the others: a pair in turn is for the usual run, all pairs are for the long one."""
    return [
        pytest.param(case, other, marks=() if i % len(others) == j else pytest.mark.long, id=f"{name_of(case)}-{j}")
        for i, case in enumerate(cases)
        for j, other in enumerate(others)
    ]


def name_of(case):
    parts = case[0] if isinstance(case, tuple) else case
    return " ".join(type(part).__name__ for part in parts)


@st.composite
def cases(draw, most=40):
    """Images of up to `most` pixels a side, a window, an Affine and a layout."""
    n, c = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    h, w, height, width = (draw(st.integers(1, most)) for _ in range(4))
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.int64, torch.float16, torch.float32, torch.float64]))
    image = images(n, c, h, w, dtype, draw(st.sampled_from(["contiguous", "channels_last", "part", "every other"])))
    window = None
    if draw(st.booleans()):
        within = draw(st.booleans())  # else some reach beyond, or lie outside altogether
        height, width = (min(height, h), min(width, w)) if within else (height, width)
        low = (0, 0) if within else (-height - 1, -width - 1)
        high = (h - height, w - width) if within else (h + 1, w + 1)
        corners = [st.lists(st.integers(a, b), min_size=n, max_size=n) for a, b in zip(low, high, strict=True)]
        flips = st.lists(st.booleans(), min_size=n, max_size=n)
        fill = draw(st.sampled_from([0, 7, tuple(range(5, 5 + c))]))
        top, left = (np.array(draw(corner), np.int64) for corner in corners)
        hflip, vflip = (np.array(draw(flips), np.bool_) for _ in range(2))
        window = Window(top, left, height, width, hflip, vflip, fill)
    affine = None
    if window is None or draw(st.booleans()):
        target = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16]))
        scaled = target.is_floating_point and draw(st.booleans())
        values = st.lists(st.floats(-3, 3, width=16), min_size=c, max_size=c)
        affine = Affine(target, tuple(draw(values)), tuple(draw(values))) if scaled else Affine(target)
    return image, window, affine, draw(st.sampled_from(LAYOUTS))


def images(n, c, h, w, dtype, kind="contiguous"):
    """Images with values from -100 to 255, or 0 to 255; of several layouts in memory."""
    low, extra = (-100 if dtype.is_signed else 0), 1 if kind == "part" else 0
    step = 2 if kind == "every other" else 1
    shape = (n, c, (h + extra) * step, (w + 2 * extra) * step)
    made = torch.randint(low, 256, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    made = made.contiguous(memory_format=torch.channels_last) if kind == "channels_last" else made
    return made[:, :, extra::step, extra : extra + w * step : step]


def check(got, image, window, affine, layout, truncates=False):
    """That `got` is what the windows, and arithmetic in float64, make of the images, laid out so if `layout` says how.

    `truncates`: towards bfloat16, as Triton's interpreter does and a GPU does not.
    """
    assert layout is None or got.is_contiguous(memory_format=layout)
    exact = (image if window is None else window.all(image)).to(image.dtype if affine is None else affine.dtype)
    got = got.cpu()
    assert got.dtype == exact.dtype
    assert got.shape == exact.shape
    if affine is None or affine.scale is None:
        assert torch.equal(got, exact)
        return
    scale, shift = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (affine.scale, affine.shift))
    exact = exact.double() * scale + shift
    # the sum in float32, to two units in the last place of the largest, then the rounding to the dtype
    units = 1.01 if truncates and affine.dtype is torch.bfloat16 else 0.51
    rtol = units * torch.finfo(affine.dtype).eps if affine.dtype.itemsize == 2 else 0
    torch.testing.assert_close(got.double(), exact, rtol=rtol, atol=2e-4)
