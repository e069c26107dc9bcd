"""The fused GPU path: a window, a cast and a normalisation in one Triton kernel.

Imported with the first images on a GPU, and only if Triton is installed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from memfeed.transforms.backends import sampling
from memfeed.transforms.params.geometry import Imagewise, filled
from memfeed.transforms.params.sizes import BySize, Images
from memfeed.transforms.params.values import Affine, Scaled
from memfeed.transforms.params.window import Window

COLUMNS = 32  # per tile of one program; usual image widths are multiples of it, so that no thread is idle
TILE_VALUES = 2048  # per tile, all channels together
MAX_SPAN = 2**31  # elements from the first to the last of an image: the kernel counts them with 32 bits

COPIED = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
COMPUTED = (torch.float16, torch.bfloat16, torch.float32)  # dtypes for which float32 is precise enough


def fused(
    image: torch.Tensor, changes: Sequence[Imagewise], affine: Affine | None, memory_format: torch.memory_format
) -> torch.Tensor:
    """Change images [n, c, h, w], then apply `affine`. Return `image` itself if there is nothing to do.

    A resize or a warp, the window within it that follows and the Affine after them take one kernel run, as does each
    alone. A kernel writes each pixel of the output once. Torch carries out the other changes, each in its plain form.

    Args:
        image: GPU images of any strides. They are only read.
        changes: to carry out first, in order.
        affine: to apply then.
        memory_format: of the kernel's output: `torch.contiguous_format` or `torch.channels_last`.
    """
    sampled: sampling.Sampled | None = None
    window: Window | None = None

    def run(affine: Affine | None) -> torch.Tensor:
        return _run_or_fall_back(image, sampled, window, affine, memory_format)

    for change in [*changes, *([] if affine is None else [Scaled(affine)])]:
        if isinstance(change, Scaled):
            image, sampled, window = run(change.affine), None, None
        elif isinstance(change, Window) and window is None and sampling.takes_window(sampled, change):
            window = change
        else:
            image, sampled, window = run(None), None, None
            if isinstance(change, Window):
                window = change
            elif isinstance(change, sampling.Sampled):
                sampled = change
            else:
                image = change.all(image)
    return run(None)


def fused_list(
    images: Images, changes: Sequence[Imagewise], affine: Affine | None, memory_format: torch.memory_format
) -> Images:
    """Do what `fused` does, also with a list of images of several sizes. A resize to one size takes one kernel run."""
    for at, change in enumerate(changes):
        if not isinstance(images, list):
            return fused(images, changes[at:], affine, memory_format)
        resized, rest = sampling.of_list(images, change), changes[at + 1 :]
        if resized is None:
            images = change.all(images) if isinstance(change, BySize) else [change.all(one[None])[0] for one in images]  # type: ignore[arg-type]
            continue
        follows = rest[0] if rest else None
        window = follows if isinstance(follows, Window) and sampling.takes_window(resized, follows) else None
        rest = rest if window is None else rest[1:]
        scaled = affine if not rest and affine is not None and affine.dtype in COMPUTED else None
        images = sampling.launch(images, resized, window, scaled, memory_format)
        return fused(images, rest, None if scaled is not None else affine, memory_format)
    if not isinstance(images, list):
        return fused(images, (), affine, memory_format)
    return images if affine is None else [Scaled(affine).all(one[None])[0] for one in images]


def _run_or_fall_back(
    image: torch.Tensor,
    sampled: sampling.Sampled | None,
    window: Window | None,
    affine: Affine | None,
    memory_format: torch.memory_format,
) -> torch.Tensor:
    """Run the kernel if it fits, else torch."""
    if affine == Affine(image.dtype):
        affine = None
    if sampled is None and window is None and affine is None:
        return image
    image = image.as_subclass(torch.Tensor)
    if sampled is not None:
        if sampling.fits(image, sampled, affine):
            return sampling.launch(image, sampled, window, affine, memory_format)
        image = sampled.all(image)
        return _run_or_fall_back(image, None, window, affine, memory_format)
    if fits(image, window, affine):
        return launch(image, window, affine, memory_format)
    image = image if window is None else window.all(image)
    return image if affine is None else Scaled(affine).all(image)


def fits(image: torch.Tensor, window: Window | None, affine: Affine | None) -> bool:
    """Return True if the kernel gives the result that torch gives."""
    if image.dtype not in COPIED or not (affine is None or affine.dtype in COMPUTED):
        return False
    _, c, h, w = image.shape
    span = sum((size - 1) * abs(stride) for size, stride in zip(image.shape[1:], image.stride()[1:], strict=True))
    out = c * h * w if window is None else c * window.height * window.width
    if max(span, out) >= MAX_SPAN:
        return False
    # The kernel gets the fill as float32, which changes some values of int32, int64 and float64.
    fill = torch.empty(0, device="cpu") if window is None else _fill(image, window)
    return torch.equal(fill.to(torch.float32).to(fill.dtype), fill)


def launch(
    image: torch.Tensor, window: Window | None, affine: Affine | None, memory_format: torch.memory_format
) -> torch.Tensor:
    """Run the kernel; see `fused`. Call it only if it `fits`."""
    n, c, h, w = image.shape
    window = Window.whole(image.shape) if window is None else window
    scaled = affine is not None and affine.scale is not None
    output = torch.empty(
        window.output_shape(image.shape),
        dtype=image.dtype if affine is None else affine.dtype,
        device=image.device,
        memory_format=memory_format,
    )
    if not output.numel():
        return output
    channels = triton.next_power_of_2(c)
    rows = max(1, TILE_VALUES // (COLUMNS * channels))
    tiles = triton.cdiv(window.height, rows) * triton.cdiv(window.width, COLUMNS)
    with torch.cuda.device_of(image):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        _kernel[(n * tiles,)](
            image,
            output,
            _parameters(image, window, affine),
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
            padded=not window.lies_within(h, w),
            cast=affine is not None,
            # float16 and bfloat16 hold every integer of 8 bits
            rounded=scaled and image.dtype not in (torch.uint8, torch.int8),
            scaled=scaled,
            last=memory_format is torch.channels_last,
            enable_fp_fusion=True,  # the default of Triton 3.9, which warns, but not of 3.10
        )
    return output


def _parameters(image: torch.Tensor, window: Window, affine: Affine | None) -> torch.Tensor:
    """Pack what the kernel looks up in one tensor, int32 [4 * n + 3 * c], for a single copy to the device.

    Top, left, hflip and vflip of each image, then the bits of a float32 scale, shift and fill of each channel.
    """
    c = image.shape[1]
    scale: Sequence[float] = (1.0,) * c
    shift: Sequence[float] = (0.0,) * c
    if affine is not None and affine.scale is not None and affine.shift is not None:
        scale, shift = affine.scale, affine.shift
    floats = np.concatenate([scale, shift, _fill(image, window).float().numpy()]).astype(np.float32)
    positions = np.concatenate([window.top, window.left, window.hflip, window.vflip]).astype(np.int32)
    packed = torch.from_numpy(np.concatenate([positions, floats.view(np.int32)]))
    # The caller does not wait for a copy from page-locked memory. Torch keeps that memory until the copy is complete.
    return packed.pin_memory().to(image.device, non_blocking=True) if image.is_cuda else packed


def _fill(image: torch.Tensor, window: Window) -> torch.Tensor:
    """Return the fill of each channel, [c], in the dtype of the images, on the CPU."""
    return filled(window.fill, (image.shape[1],), torch.empty(0, dtype=image.dtype))


@triton.jit(do_not_specialize=["n", "h", "w", "sample_stride", "channel_stride", "row_stride", "height"])  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]  # Triton reads the types
    image,
    output,
    parameters,
    n,
    h,
    w,
    sample_stride,
    channel_stride,
    row_stride,
    column_stride,
    height,
    width,
    c: tl.constexpr,
    channels: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    padded: tl.constexpr,
    cast: tl.constexpr,
    rounded: tl.constexpr,
    scaled: tl.constexpr,
    last: tl.constexpr,
):
    """Compute a tile of one output image: all channels of rows x columns pixels.

    The block is [channels, rows, columns]. Triton does not know the order of these dims in memory, so it assigns the
    last one to neighbouring threads, which then read neighbouring pixels. For channels_last it exchanges values between
    threads, and writes in memory order. An offset is a sum of one part per dim, so that a thread computes a part once
    and not per value. The parts are added to 64-bit pointers, where no sum overflows.
    """
    across = (width + columns - 1) // columns
    tiles = across * ((height + rows - 1) // rows)
    sample = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    top = tl.load(parameters + sample)
    left = tl.load(parameters + n + sample)
    hflip = tl.load(parameters + 2 * n + sample)
    vflip = tl.load(parameters + 3 * n + sample)

    channel = tl.arange(0, channels)[:, None, None]
    row = (tile // across * rows + tl.arange(0, rows))[None, :, None]
    column = (tile % across * columns + tl.arange(0, columns))[None, None, :]
    is_needed = (channel < c) & (row < height) & (column < width)

    y = top + tl.where(vflip != 0, height - 1 - row, row)
    x = left + tl.where(hflip != 0, width - 1 - column, column)
    source = image + sample.to(tl.int64) * sample_stride
    source += y * row_stride + (channel * channel_stride + x * column_stride)
    floats = parameters + 4 * n + channel
    if padded:
        is_inside = (y >= 0) & (y < h) & (x >= 0) & (x < w)
        fill = tl.load(floats + 2 * c, mask=channel < c, other=0).to(tl.float32, bitcast=True)
        values = tl.load(source, mask=is_needed & is_inside, other=0)
        values = tl.where(is_inside, values, fill.to(values.dtype))
    else:
        values = tl.load(source, mask=is_needed, other=0)
    if cast:
        values = values.to(tl.float32)
        if rounded:
            values = values.to(output.dtype.element_ty)
    if scaled:
        scale = tl.load(floats, mask=channel < c, other=0).to(tl.float32, bitcast=True)
        shift = tl.load(floats + c, mask=channel < c, other=0).to(tl.float32, bitcast=True)
        values = values.to(tl.float32) * scale + shift
    values = values.to(output.dtype.element_ty)

    target = output + sample.to(tl.int64) * (c * height * width)
    if last:
        target += row * (width * c) + (column * c + channel)
    else:
        target += row * width + (channel * (height * width) + column)
    tl.store(target, values, mask=is_needed)
