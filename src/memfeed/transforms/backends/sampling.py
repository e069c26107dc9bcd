"""Resizes and warps on a GPU, with the window, the flips, the cast and the normalisation after them, in one kernel.

Imported only with Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from memfeed.transfer.packing import upload
from memfeed.transforms.backends import sampling_kernels
from memfeed.transforms.params.geometry import filled
from memfeed.transforms.params.resample import Resampled
from memfeed.transforms.params.values import Affine
from memfeed.transforms.params.warp import Warped
from memfeed.transforms.params.window import Window

Sampled: TypeAlias = Resampled | Warped

COLUMNS = 32  # per tile of one program; usual image widths are multiples of it, so that no thread is idle
TILE_VALUES = 2048  # per tile, all channels together
MAX_CHANNELS = 16  # per tile
MAX_SPAN = 2**31  # elements from the first to the last of an image: the kernels count them with 32 bits

INTEGERS = (torch.uint8, torch.int8, torch.int16)  # float32 holds each value and what lies between them
FLOATS = (torch.float16, torch.bfloat16, torch.float32)  # computed in float32
PICKED = (*INTEGERS, *FLOATS, torch.int32, torch.int64, torch.float64)  # by nearest neighbour: no value changes


def takes_window(sampled: Sampled | None, window: Window) -> bool:
    """Return True if a kernel shows this window of what `sampled` gives: if it lies within."""
    return sampled is None or window.lies_within(sampled.height, sampled.width)


def fits(image: torch.Tensor, sampled: Sampled, affine: Affine | None) -> bool:
    """Return True if the kernel gives the result that torch gives, up to the order of sums."""
    if image.dtype not in (PICKED if _picks(sampled) else (*INTEGERS, *FLOATS)):
        return False
    if not (affine is None or affine.dtype in FLOATS):
        return False
    shape, strides = image.shape[1:], image.stride()[1:]
    span = sum((size - 1) * abs(stride) for size, stride in zip(shape, strides, strict=True))
    out = sampled.output_shape(image.shape)[1:].numel()
    fill = _fill(image, sampled)  # the kernel gets it as float32, which changes some values of int32, int64 and float64
    return max(span, out) < MAX_SPAN and torch.equal(fill.to(torch.float32).to(fill.dtype), fill)


def launch(
    image: torch.Tensor,
    sampled: Sampled,
    window: Window | None,
    affine: Affine | None,
    memory_format: torch.memory_format,
) -> torch.Tensor:
    """Sample images [n, c, h, w], show a `window` of the result, apply `affine`: one copy of parameters, one kernel.

    Call it only if it `fits`, with a window that lies within the result. Integers are rounded before `affine`.
    """
    n, c, h, w = image.shape
    whole = sampled.output_shape(image.shape)
    window = Window.whole(whole) if window is None else window
    scaled = affine is not None and affine.scale is not None
    output = torch.empty(
        window.output_shape(whole),
        dtype=image.dtype if affine is None else affine.dtype,
        device=image.device,
        memory_format=memory_format,
    )
    if not output.numel():
        return output
    channels = min(triton.next_power_of_2(c), MAX_CHANNELS)
    rows = max(1, TILE_VALUES // (COLUMNS * channels))
    tiles = triton.cdiv(window.height, rows) * triton.cdiv(window.width, COLUMNS) * triton.cdiv(c, channels)
    kernel, options = _kernel_for(sampled)
    limits = torch.iinfo(image.dtype) if image.dtype in INTEGERS else None
    with torch.cuda.device_of(image):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        kernel[(n * tiles,)](
            image,
            output,
            upload(_parameters(image, sampled, window, affine), image.device),
            n,
            h,
            w,
            *image.stride(),
            window.height,
            window.width,
            c=c,
            channels=channels,
            rows=rows,
            columns=COLUMNS,
            picks=_picks(sampled),
            **options,
            integer=limits is not None,
            low=0 if limits is None else limits.min,
            high=0 if limits is None else limits.max,
            cast=affine is not None,
            # float16 and bfloat16 hold every integer of 8 bits; what was computed is rounded once
            rounded=scaled and _picks(sampled) and image.dtype not in (torch.uint8, torch.int8),
            scaled=scaled,
            last=memory_format is torch.channels_last,
            enable_fp_fusion=True,  # the default of Triton 3.9, which warns, but not of 3.10
        )
    return output


def _kernel_for(sampled: Sampled) -> tuple[Any, dict[str, Any]]:
    """Return the kernel, and the options that only this one has."""
    if isinstance(sampled, Warped):
        return sampling_kernels.warp, {}
    half = 0.5 if sampled.mode == "nearest-exact" else 0.0
    options = {"cubic": sampled.mode == "bicubic", "antialias": sampled.antialias, "half": half}
    return sampling_kernels.resize, options


def _parameters(image: torch.Tensor, sampled: Sampled, window: Window, affine: Affine | None) -> torch.Tensor:
    """Pack what a kernel looks up in one tensor, int32 [10 * n + 3 * c], for a single copy to the device.

    Of each image: top, left, vflip and hflip of the window; then top, left, height and width of its box and the bits of
    the two scales, or the bits of its matrix. Then the bits of a scale, shift and fill of each channel.
    """
    n, c = image.shape[:2]
    packed = np.empty(10 * n + 3 * c, np.int32)
    ints = packed[: 10 * n].reshape(10, n)
    ints[0], ints[1], ints[2], ints[3] = window.top, window.left, window.vflip, window.hflip
    floats: NDArray[np.float32] = ints.view(np.float32)
    if isinstance(sampled, Warped):
        floats[4:] = sampled.matrix.reshape(n, 6).T
    else:
        ints[4], ints[5], ints[6], ints[7] = sampled.top, sampled.left, sampled.box_height, sampled.box_width
        floats[8], floats[9] = (axis.scale for axis in sampled.axes)
    values: NDArray[np.float32] = packed[10 * n :].view(np.float32).reshape(3, c)
    scale: Sequence[float] | None = None if affine is None else affine.scale
    values[0] = 1 if scale is None else scale
    values[1] = 0 if affine is None or affine.shift is None else affine.shift
    values[2] = _fill(image, sampled).float().numpy()
    return torch.from_numpy(packed)


def _fill(image: torch.Tensor, sampled: Sampled) -> torch.Tensor:
    """Return the fill of each channel, [c], on the CPU, in the dtype that torch fills with."""
    like = torch.empty(0, dtype=image.dtype if _picks(sampled) else torch.float32, device="cpu")
    if isinstance(sampled, Resampled) or not np.any(sampled.fill):
        return like.new_zeros(image.shape[1])
    return filled(sampled.fill, (image.shape[1],), like)


def _picks(sampled: Sampled) -> bool:
    return sampled.mode.startswith("nearest")
