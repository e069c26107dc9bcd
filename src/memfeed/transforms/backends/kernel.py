"""The fused GPU path: a window, a cast, a normalisation and erased boxes in one Triton kernel.

Imported with the first images on a GPU, and only if Triton is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

from memfeed.transfer.packing import upload
from memfeed.transforms.backends import sampling
from memfeed.transforms.params.geometry import Fill, Imagewise, filled
from memfeed.transforms.params.sizes import BySize, Images
from memfeed.transforms.params.value_changes import Affine, Erased, Scaled
from memfeed.transforms.params.window import Window

# The tile of one program: values side by side, and values in all. The fastest of those that were tried on an H200, for
# crops of 224 x 224: docs/notes/transforms.md.
TILES = {False: (256, 4096), True: (512, 2048)}  # by whether the output is channels_last

COPIED = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # to move values of other dtypes, by their size
COMPUTED = (torch.float16, torch.bfloat16, torch.float32)  # dtypes for which float32 is precise enough


def fused(
    image: torch.Tensor, changes: Sequence[Imagewise], affine: Affine | None, memory_format: torch.memory_format
) -> torch.Tensor:
    """Change images [n, c, h, w], then apply `affine`. Return `image` itself if there is nothing to do.

    A resize or a warp, the window within it that follows and the Affine after them take one kernel run, as does each
    alone. So do a window, the Affine after it and the erased boxes after both. A kernel writes each pixel of the output
    once. Torch carries out the other changes, each in its plain form.

    Arguments are those of `passes.fused`; ``memory_format`` is that of the kernel's output.
    """
    sampled: sampling.Sampled | None = None
    window: Window | None = None
    scaled: Affine | None = None

    def run(erased: Erased | None = None) -> torch.Tensor:
        return _run_or_fall_back(image, sampled, window, scaled, erased, memory_format)

    for change in [*changes, *([] if affine is None else [Scaled(affine)])]:
        if isinstance(change, Window):
            joins = window is None and scaled is None and sampling.takes_window(sampled, change)
        else:
            joins = scaled is None if isinstance(change, Scaled) else isinstance(change, Erased) and sampled is None
        if not joins:
            image, sampled, window, scaled = run(), None, None, None
        if isinstance(change, Window):
            window = change
        elif isinstance(change, Scaled):
            scaled = change.affine
        elif isinstance(change, Erased):
            image, window, scaled = run(change), None, None
        elif isinstance(change, sampling.Sampled):
            sampled = change
        else:
            image = change.all(image)
    return run()


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
    erased: Erased | None,
    memory_format: torch.memory_format,
) -> torch.Tensor:
    """Run the kernel if it fits, else torch."""
    if affine == Affine(image.dtype):
        affine = None
    if all(one is None for one in (sampled, window, affine, erased)):
        return image
    image = image.as_subclass(torch.Tensor)
    bits = None if image.dtype in COPIED or affine is not None or erased is not None else BITS.get(image.dtype.itemsize)
    only_moves = sampled is None or (sampled.mode.startswith("nearest") and not np.any(getattr(sampled, "fill", 0)))
    if bits is not None and only_moves and (window is None or window.fill == 0):
        moved = _run_or_fall_back(image.view(bits), sampled, window, None, None, memory_format)
        return moved.view(image.dtype)
    if sampled is not None:
        if sampling.fits(image, sampled, affine):
            return sampling.launch(image, sampled, window, affine, memory_format)
        image = sampled.all(image)
        return _run_or_fall_back(image, None, window, affine, erased, memory_format)
    if fits(image, window, affine, erased):
        return launch(image, window, affine, memory_format, erased)
    image = image if window is None else window.all(image)
    image = image if affine is None else Scaled(affine).all(image)
    return image if erased is None else erased.all(image)


def fits(image: torch.Tensor, window: Window | None, affine: Affine | None, erased: Erased | None = None) -> bool:
    """Return True if the kernel gives the result that torch gives."""
    if image.dtype not in COPIED or not (affine is None or affine.dtype in COMPUTED):
        return False
    _, c, h, w = image.shape
    out = c * h * w if window is None else c * window.height * window.width
    if max(sampling.span(image.shape[1:], image.stride()[1:]), out) >= sampling.MAX_SPAN:
        return False
    fills = [] if window is None else [_fill(window.fill, c, image.dtype)]
    if erased is not None and erased.fill is not None:
        fills.append(_fill(erased.fill, c, image.dtype if affine is None else affine.dtype))
    return all(map(sampling.float32_has, fills))


def launch(
    image: torch.Tensor,
    window: Window | None,
    affine: Affine | None,
    memory_format: torch.memory_format,
    erased: Erased | None = None,
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
    last = memory_format is torch.channels_last
    line, planes = (window.width * c, 1) if last else (window.width, c)
    columns = min(TILES[last][0], triton.next_power_of_2(line))
    rows = min(TILES[last][1] // columns, triton.next_power_of_2(window.height))
    tiles = triton.cdiv(line, columns) * triton.cdiv(window.height, rows) * planes
    with torch.cuda.device_of(image):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        _kernel[(n * tiles,)](
            image,
            output,
            _parameters(image, window, affine, erased, output.dtype),
            n,
            h,
            w,
            *image.stride(),
            window.height,
            window.width,
            c=c,
            rows=rows,
            columns=columns,
            padded=not window.lies_within(h, w),
            cast=affine is not None,
            # float16 and bfloat16 hold every integer of 8 bits
            rounded=scaled and image.dtype not in (torch.uint8, torch.int8),
            scaled=scaled,
            last=last,
            erased="no" if erased is None else "noise" if erased.fill is None else "fill",
            enable_fp_fusion=True,  # the default of Triton 3.9, which warns, but not of 3.10
        )
    return output


def _parameters(
    image: torch.Tensor, window: Window, affine: Affine | None, erased: Erased | None, dtype: torch.dtype
) -> torch.Tensor:
    """Pack what the kernel looks up in one tensor, int32, for a single copy to the device.

    Top, left, hflip and vflip of each image; the bits of a float32 scale, shift and fill of each channel; with boxes,
    the bits of the float32 they are painted with in each channel, then of each image top, left, bottom, right, and the
    lower and the upper half of the seed.
    """
    c = image.shape[1]
    scale: Sequence[float] = (1.0,) * c
    shift: Sequence[float] = (0.0,) * c
    if affine is not None and affine.scale is not None and affine.shift is not None:
        scale, shift = affine.scale, affine.shift
    floats = [np.array([*scale, *shift], np.float32), _fill(window.fill, c, image.dtype).float().numpy()]
    parts = [np.concatenate([window.top, window.left, window.hflip, window.vflip]).astype(np.int32)]
    boxes = []
    if erased is not None:
        floats.append(_fill(0 if erased.fill is None else erased.fill, c, dtype).float().numpy())
        bottom, right = erased.top + erased.box_height, erased.left + erased.box_width
        boxes = [np.concatenate([erased.top, erased.left, bottom, right]).astype(np.int32)]
        boxes += [half.astype(np.uint32).view(np.int32) for half in (erased.seeds & 0xFFFFFFFF, erased.seeds >> 32)]
    parts += [np.concatenate(floats).view(np.int32), *boxes]
    return upload(torch.from_numpy(np.concatenate(parts)), image.device)


def _fill(fill: Fill, c: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the fill of each channel, [c], in the dtype of the images, on the CPU. It is kept: write to a copy."""
    return _kept_fill(fill if isinstance(fill, int | float) else tuple(fill), c, dtype)


@lru_cache(64)
def _kept_fill(fill: float | tuple[float, ...], c: int, dtype: torch.dtype) -> torch.Tensor:
    return filled(fill, (c,), torch.empty(0, dtype=dtype, device="cpu"))


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
    rows: tl.constexpr,
    columns: tl.constexpr,
    padded: tl.constexpr,
    cast: tl.constexpr,
    rounded: tl.constexpr,
    scaled: tl.constexpr,
    last: tl.constexpr,
    erased: tl.constexpr,
):
    """Compute a tile of one output image: rows x columns values, in the order in which they lie in memory.

    For channels_last a line is a pixel row of all channels, c values a pixel; else it is a pixel row of one channel.
    Values side by side in a line belong to one thread, so that it stores 16 bytes at once. An offset is a sum of one
    part per dim, so that a thread computes a part once and not per value. The parts are added to 64-bit pointers, where
    no sum overflows.
    """
    line = width * c if last else width
    planes: tl.constexpr = 1 if last else c
    across = (line + columns - 1) // columns
    down = (height + rows - 1) // rows
    tile = tl.program_id(0)
    band = tile // across % down
    plane = tile // (across * down)
    sample = plane // planes
    plane = plane % planes
    top = tl.load(parameters + sample)
    left = tl.load(parameters + n + sample)
    hflip = tl.load(parameters + 2 * n + sample)
    vflip = tl.load(parameters + 3 * n + sample)

    row = (band * rows + tl.arange(0, rows))[:, None]
    value = (tile % across * columns + tl.arange(0, columns))[None, :]
    is_needed = (row < height) & (value < line)
    if last:
        column, channel = value // c, value % c
    else:
        column, channel = value, plane

    y = tl.where(vflip != 0, top + height - 1 - row, top + row)
    x = tl.where(hflip != 0, left + width - 1 - column, left + column)
    source = image + sample.to(tl.int64) * sample_stride
    source += y * row_stride + (channel * channel_stride + x * column_stride)
    floats = parameters + 4 * n + channel
    if padded:
        is_inside = (y >= 0) & (y < h) & (x >= 0) & (x < w)
        fill = tl.load(floats + 2 * c).to(tl.float32, bitcast=True)
        values = tl.load(source, mask=is_needed & is_inside, other=0)
        values = tl.where(is_inside, values, fill.to(values.dtype))
    else:
        values = tl.load(source, mask=is_needed, other=0)
    if cast:
        values = values.to(tl.float32)
        if rounded:
            values = values.to(output.dtype.element_ty)
    if scaled:
        scale = tl.load(floats).to(tl.float32, bitcast=True)
        shift = tl.load(floats + c).to(tl.float32, bitcast=True)
        values = values.to(tl.float32) * scale + shift
    values = values.to(output.dtype.element_ty)
    if erased != "no":
        box = parameters + 4 * (n + c) + sample
        is_erased = (row >= tl.load(box)) & (column >= tl.load(box + n))
        is_erased &= (row < tl.load(box + 2 * n)) & (column < tl.load(box + 3 * n))
        if erased == "noise":
            low, high = tl.load(box + 4 * n), tl.load(box + 5 * n)
            seed = low.to(tl.uint32, bitcast=True).to(tl.uint64) | (
                high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
            )
            paint = _normal(seed, (channel * height + row) * width + column)
        else:
            paint = tl.load(floats + 3 * c).to(tl.float32, bitcast=True)
        values = tl.where(is_erased, paint.to(values.dtype), values)

    target = output + (sample.to(tl.int64) * planes + plane) * (height * line)
    tl.store(target + (row * line + value), values, mask=is_needed)


@triton.jit
def _normal(seed, position):  # type: ignore[no-untyped-def]
    """Do what `memfeed.transforms.params.value_changes.normal` does."""
    bits = position.to(tl.uint64) * 0x9E3779B97F4A7C15 + seed
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    bits = bits ^ (bits >> 31)
    first, second = (bits >> 40).to(tl.uint32), (bits >> 16).to(tl.uint32) & 0xFFFFFF
    radius = tl.sqrt(-2.0 * tl.log((first + 1).to(tl.float32) * 5.9604644775390625e-08))
    return tl.cos(second.to(tl.float32) * 3.745070282923929e-07) * radius
