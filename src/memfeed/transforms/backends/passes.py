"""The fused path: a Triton kernel, if it works on the GPU of the images, and what the CPU does.

There each image goes through all changes, and into the output, while it is in the cache of one core. Images are shared
among threads; see `memfeed.system.share`. Where numba is installed, compiled loops crop, resize and flip bytes; see
`compiled_passes`. The functions here call torch for each image, and give the same values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from importlib.util import find_spec
from types import ModuleType

import torch

from memfeed.schema.jagged import RowViews
from memfeed.system.buffers import Allocator, Pool
from memfeed.system.messages import warn
from memfeed.system.share import RowsFunction, share
from memfeed.transforms.backends.compiled_passes import Head, change_one, head_of
from memfeed.transforms.params.geometry import Imagewise, Warped
from memfeed.transforms.params.pixels import copy_image, has_pixels, to_planes
from memfeed.transforms.params.resample import Resampled
from memfeed.transforms.params.sizes import BySize, Images, ImagewiseBySize
from memfeed.transforms.params.value_changes import Affine, Erased, Gray, Jitter, Scaled, scale_and_shift
from memfeed.transforms.params.window import VolumeWindow, Window

OURS = {Erased, Gray, Jitter, Resampled, Scaled, VolumeWindow, Warped, Window}
PART_BYTES = 256 << 10  # of the output, at least, that a thread takes at a time
CACHED_BYTES = 512 << 10  # of the output that is normalised at once: what the cache of a core still has
HEAVY_BYTES = 8 << 20  # of the output: they take a few milliseconds
_lent = Pool(2)  # for calls by hand, images and masks: new memory costs its page faults, a quarter of the time


def fused(
    image: Images | RowViews,
    changes: Sequence[Imagewise],
    affine: Affine | None,
    memory_format: torch.memory_format = torch.contiguous_format,
    allocator: Allocator | None = None,
) -> Images:
    """Change images [n, c, h, w] one by one, then apply `affine`. With nothing to do, return `image`, rows copied.

    Args:
        image: CPU images of any strides, or rows of a store's map, or a list of images of several sizes. They are
            only read.
        changes: to carry out first, in order.
        affine: to apply then.
        memory_format: of the output: `torch.contiguous_format` or `torch.channels_last`.
        allocator: gives the memory of the output; None for memory that is used again when no tensor shares it any more.
    """
    dtype = image[0].dtype if isinstance(image, list) else image.dtype
    if not changes and (affine is None or (affine.dtype == dtype and affine.scale is None)):
        return image.owned() if isinstance(image, RowViews) else image
    allocator = _lent if allocator is None else allocator
    if isinstance(image, list) and not any(isinstance(c, BySize) and c.makes_one_size for c in changes):
        return _fused_list(image, changes if affine is None else [*changes, Scaled(affine)], memory_format, allocator)
    # A subclass (MemoryMappedTensor, tv_tensors.Image) would run its __torch_function__ for every slice.
    image = image.as_subclass(torch.Tensor) if isinstance(image, torch.Tensor) else image
    shape, dtype = _output(image, changes)
    output = _allocate(shape, dtype if affine is None else affine.dtype, memory_format, allocator)
    if not output.numel():
        return output
    image_bytes = math.prod(shape[1:]) * output.element_size()
    at_once = max(1, CACHED_BYTES // image_bytes)
    head = head_of(image, changes, output.numel())
    source, rest = (image, changes) if head is None else (head, changes[head.length :])
    fill = None if head is None or rest else head.filler(affine, output, at_once)
    if fill is None:
        fill = partial(_fill, source, rest, affine, output, at_once)
    _share(len(output), fill, changes, output.nbytes)
    return output


def _share(count: int, fill: RowsFunction, changes: Sequence[Imagewise], size: int) -> None:
    """Fill `count` outputs of together `size` bytes, on several threads if the changes are ours alone."""
    parts = (part for change in changes for part in (change.parts if isinstance(change, BySize) else [change]))
    if any(type(part) not in OURS for part in parts):  # a user's code may rely on one thread
        fill(0, count)
        return
    share(count, fill, least=max(1, PART_BYTES * count // max(size, 1)), work=size, is_heavy=size >= HEAVY_BYTES)


def _fill(
    images: Images | RowViews | Head, changes: Sequence[Imagewise], affine: Affine | None, output: torch.Tensor,
    at_once: int, begin: int, end: int,
) -> None:  # fmt: skip
    """Fill rows `begin` to `end` of the output, `at_once` at a time."""
    # Computing in 16 bits would round three times. So compute in float32, in one buffer that stays in the cache.
    is_half = affine is not None and affine.is_half
    is_scaled = affine is not None and affine.scale is not None
    at_once = at_once if is_scaled or isinstance(images, Head) else end - begin
    scratch = torch.empty(min(at_once, end - begin), *output.shape[1:], device="cpu") if is_half else None
    for first in range(begin, end, at_once):
        rows = slice(first, min(first + at_once, end))
        output_rows = output[rows]
        target = output_rows if scratch is None else scratch[: rows.stop - first]
        source = target
        if changes or not isinstance(images, torch.Tensor):
            pieces = images[rows]
            pieces = pieces.unbind(0) if isinstance(pieces, torch.Tensor) else pieces
            _change(pieces, changes, target.unbind(0), first)
        elif target.dtype != images.dtype:
            target.copy_(images[rows])
        else:  # float images that do not move are normalised straight from the input
            source = images[rows]
        if affine is not None and affine.scale is not None and affine.shift is not None:
            scale_and_shift(source, affine.scale, affine.shift, target)
        if target is not output_rows:
            output_rows.copy_(target)


def _change(
    images: Sequence[torch.Tensor], changes: Sequence[Imagewise], targets: Sequence[torch.Tensor], first: int
) -> None:
    """Carry out the changes of each image, and copy it into its target. `first` is the sample of the first image."""
    # One image fits in the cache between two changes. The changes come before the cast, which makes uint8 four times as
    # large.
    for sample, (piece, target) in enumerate(zip(images, targets, strict=True), first):
        for at, change in enumerate(changes):
            if at and target.stride(-1) == 1 and has_pixels(piece):
                piece = to_planes(piece)
            piece = change_one(change, piece, sample)
        copy_image(piece, target)


def _fused_list(
    images: list[torch.Tensor],
    changes: Sequence[Imagewise],
    memory_format: torch.memory_format,
    allocator: Allocator,
) -> list[torch.Tensor]:
    """Change a list of images into another list, whose tensors share one piece of memory."""
    outputs = [_output(image[None], changes, sample) for sample, image in enumerate(images)]
    sizes = [math.prod(shape) for shape, _ in outputs]
    flat = allocator.allocate((sum(sizes),), outputs[0][1])
    targets = []
    for (shape, _), part in zip(outputs, torch.split(flat, sizes), strict=True):
        c, *size = shape[1:]
        is_last = memory_format is torch.channels_last
        targets.append(part.view(*size, c).movedim(-1, 0) if is_last else part.view(c, *size))

    def fill(begin: int, end: int) -> None:
        for sample in range(begin, end):
            _change(images[sample : sample + 1], changes, targets[sample : sample + 1], sample)

    _share(len(images), fill, changes, flat.nbytes)
    return targets


def _output(
    image: Images | RowViews, changes: Sequence[Imagewise], sample: int | None = None
) -> tuple[torch.Size, torch.dtype]:
    """Return shape and dtype of the images after the changes; with `sample`, of that one of a list."""
    first = image[0][None] if isinstance(image, list) else image
    shape, dtype = first.shape, first.dtype
    for change in changes:
        if isinstance(change, ImagewiseBySize):
            shape = torch.Size((1, *change.output_size(sample or 0, shape[1:])))
        else:
            shape = change.output_shape(shape)
        dtype = change.output_dtype(dtype)
    return torch.Size((len(image), *shape[1:])), dtype


def _allocate(
    shape: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format, allocator: Allocator
) -> torch.Tensor:
    if memory_format is not torch.channels_last:
        return allocator.allocate(shape, dtype)
    n, c, *size = shape
    return allocator.allocate((n, *size, c), dtype).movedim(-1, 1)


def kernel_for(images: torch.Tensor | list[torch.Tensor]) -> ModuleType | None:
    """Return the module `kernel` if it takes these images, on a CUDA device where Triton works.

    It takes a batch [n, c, h, w], and a list of images [c, h, w].
    """
    first, dims = (images[0], 3) if isinstance(images, list) else (images, 4)
    return gpu_kernel(first.device) if first.device.type == "cuda" and first.ndim == dims else None


@cache
def gpu_kernel(device: torch.device) -> ModuleType | None:
    """Return the module `kernel` if it runs on `device`. Return None without Triton, or with a warning if it fails.

    Triton is imported here and not before, because the import is slow and the CPU path does not need it.
    """
    if find_spec("triton") is None:
        return None
    try:
        from memfeed.transforms.backends import kernel

        kernel.launch(torch.zeros(1, 1, 1, 1, device=device), None, Affine(torch.float16), torch.contiguous_format)
    except Exception as error:  # any kind: from Triton, from a compiler that it calls, from the driver
        warn(
            f"Triton does not work on {device} ({type(error).__name__}: {error}); expected to compile the kernel of "
            "memfeed.transforms with it; transforms run there one by one, which is slower; Triton needs a C compiler"
        )
        return None
    return kernel
