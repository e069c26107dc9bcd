"""Resizes and warps on a GPU, with the window, the flips, the cast and the normalisation after them, in one kernel.

Imported only with Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from memfeed.transfer.packing import upload
from memfeed.transforms.backends import sampling_kernels
from memfeed.transforms.params.geometry import Imagewise, Warped, filled
from memfeed.transforms.params.resample import Resampled
from memfeed.transforms.params.sizes import BySize, Images
from memfeed.transforms.params.value_changes import Affine
from memfeed.transforms.params.window import Window

Sampled: TypeAlias = Resampled | Warped

COLUMNS = 128  # per tile of one program, at most; measured on an H200, as the next
TILE_VALUES = 1024  # per tile, all channels together
MAX_CHANNELS = 16  # per tile
MAX_SPAN = 2**31  # elements from the first to the last of an image: the kernels count them with 32 bits

INTEGERS = (torch.uint8, torch.int8, torch.int16)  # float32 holds each value and what lies between them
FLOATS = (torch.float16, torch.bfloat16, torch.float32)  # computed in float32
PICKED = (*INTEGERS, *FLOATS, torch.int32, torch.int64, torch.float64)  # by nearest neighbour: no value changes


def takes_window(sampled: Sampled | None, window: Window) -> bool:
    """Return True if a kernel shows this window of what `sampled` gives: if it lies within."""
    return sampled is None or window.lies_within(sampled.height, sampled.width)


def of_list(images: Sequence[torch.Tensor], change: Imagewise) -> Resampled | None:
    """Return a change of images of several sizes as one of all of them, if a kernel carries it out on them."""
    parts = change.parts if isinstance(change, BySize) and change.makes_one_size else ()
    if not parts or not all(isinstance(part, Resampled) for part in parts):
        return None
    lines = np.empty((4, len(images)), np.int64)
    for part, samples in zip(parts, change.sizes.samples, strict=True):  # type: ignore[attr-defined]
        lines[:, samples] = part.top, part.left, part.box_height, part.box_width
    top, left, box_height, box_width = lines
    joined = replace(parts[0], top=top, left=left, box_height=box_height, box_width=box_width)
    steps = {(len(image), image.stride(2)) for image in images}
    fit = (
        len(steps) == 1
        and max(span(one.shape, one.stride()) for one in images) < MAX_SPAN
        and fits(images[0][None], joined, None)
    )
    return joined if fit else None


def fits(image: torch.Tensor, sampled: Sampled, affine: Affine | None) -> bool:
    """Return True if the kernel gives the result that torch gives, up to the order of sums."""
    if image.dtype not in (PICKED if _picks(sampled) else (*INTEGERS, *FLOATS)):
        return False
    if not (affine is None or affine.dtype in FLOATS):
        return False
    out = sampled.output_shape(image.shape)[1:].numel()
    return max(span(image.shape[1:], image.stride()[1:]), out) < MAX_SPAN and float32_has(_fill(image, sampled))


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last of one image [c, h, w]."""
    return sum((size - 1) * abs(stride) for size, stride in zip(shape, strides, strict=True))


def float32_has(fill: torch.Tensor) -> bool:
    """Return True if a fill is the same as float32, as kernels get it; some of int32, int64 and float64 are not."""
    return torch.equal(fill.to(torch.float32).to(fill.dtype), fill)


def launch(
    image: Images,
    sampled: Sampled,
    window: Window | None,
    affine: Affine | None,
    memory_format: torch.memory_format,
) -> torch.Tensor:
    """Sample images [n, c, h, w], show a `window` of the result, apply `affine`: one copy of parameters, one kernel.

    Call it only if it `fits`, with a window that lies within the result. Integers are rounded before `affine`. A list
    of images, of several sizes, takes what `of_list` gives.
    """
    images, image = image, image[0][None] if isinstance(image, list) else image
    _, c, h, w = image.shape
    n = len(images)
    whole = sampled.output_shape(torch.Size((n, c, h, w)))
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
    columns = min(COLUMNS, triton.next_power_of_2(window.width))
    rows = max(1, TILE_VALUES // (columns * channels))
    tiles = triton.cdiv(window.height, rows) * triton.cdiv(window.width, columns) * triton.cdiv(c, channels)
    parameters = _parameters(image, sampled, window, affine, images if isinstance(images, list) else ())
    kernel, options = _kernel_for(sampled, listed=isinstance(images, list))
    limits = torch.iinfo(image.dtype) if image.dtype in INTEGERS else None
    with torch.cuda.device_of(image):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        kernel[(n * tiles,)](
            image,
            output,
            upload(parameters, image.device),
            n,
            h,
            w,
            *image.stride(),
            window.height,
            window.width,
            c=c,
            channels=channels,
            rows=rows,
            columns=columns,
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


def _kernel_for(sampled: Sampled, *, listed: bool) -> tuple[Any, dict[str, Any]]:
    """Return the kernel, and the options that only this one has."""
    if isinstance(sampled, Warped):
        return sampling_kernels.warp, {}
    half = 0.5 if sampled.mode == "nearest-exact" else 0.0
    options = {"cubic": sampled.mode == "bicubic", "antialias": sampled.antialias, "half": half}
    return sampling_kernels.resize, {**options, "listed": listed}


def _parameters(
    image: torch.Tensor, sampled: Sampled, window: Window, affine: Affine | None, listed: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Pack what a kernel looks up in one tensor, int32 [rows * n + 3 * c], for a single copy to the device.

    Of each image: top, left, vflip and hflip of the window; then top, left, height and width of its box and the bits of
    the two scales, or the bits of its matrix. If they are a list: how many elements they are behind the first, divided
    by 2**31, and the remainder; the strides of channels and rows. Then the bits of a scale, shift and fill of each
    channel.
    """
    n, c, rows = len(window.top), image.shape[1], 14 if listed else 10
    packed = np.empty(rows * n + 3 * c, np.int32)
    ints = packed[: rows * n].reshape(rows, n)
    ints[0], ints[1], ints[2], ints[3] = window.top, window.left, window.vflip, window.hflip
    floats: NDArray[np.float32] = ints.view(np.float32)
    if isinstance(sampled, Warped):
        floats[4:10] = sampled.matrix.reshape(n, 6).T
    else:
        ints[4], ints[5], ints[6], ints[7] = sampled.top, sampled.left, sampled.box_height, sampled.box_width
        floats[8], floats[9] = (axis.scale for axis in sampled.axes)
    if listed:
        begin = image.data_ptr()
        behind = [(one.data_ptr() - begin) // one.itemsize for one in listed]
        ints[10:] = np.array(
            [(d >> 31, d & (2**31 - 1), *one.stride()[:2]) for d, one in zip(behind, listed, strict=True)]
        ).T
    values: NDArray[np.float32] = packed[rows * n :].view(np.float32).reshape(3, c)
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
