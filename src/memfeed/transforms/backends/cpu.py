"""The fused CPU path: read each needed pixel once, and write it once more to normalise it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from memfeed.system.buffers import Allocator, Fresh
from memfeed.transforms.params.geometry import Imagewise
from memfeed.transforms.params.sizes import BySize, Images, ImagewiseBySize
from memfeed.transforms.params.values import Affine, Scaled, scale_and_shift


def fused(
    image: Images,
    changes: Sequence[Imagewise],
    affine: Affine | None,
    memory_format: torch.memory_format = torch.contiguous_format,
    allocator: Allocator | None = None,
) -> Images:
    """Change images [n, c, h, w] one by one, then apply `affine`. Return `image` itself if there is nothing to do.

    Args:
        image: CPU images of any strides, or a list of them, of several sizes. They are only read.
        changes: to carry out first, in order.
        affine: to apply then.
        memory_format: of the output: `torch.contiguous_format` or `torch.channels_last`.
        allocator: gives the memory of the output; None for fresh memory, which the caller owns.
    """
    dtype = image.dtype if isinstance(image, torch.Tensor) else image[0].dtype
    if not changes and (affine is None or (affine.dtype == dtype and affine.scale is None)):
        return image
    allocator = Fresh() if allocator is None else allocator
    if isinstance(image, list) and not any(isinstance(c, BySize) and c.makes_one_size for c in changes):
        return _fused_list(image, changes if affine is None else [*changes, Scaled(affine)], memory_format, allocator)
    # A subclass (MemoryMappedTensor, tv_tensors.Image) would run its __torch_function__ for every slice.
    image = image.as_subclass(torch.Tensor) if isinstance(image, torch.Tensor) else image
    shape, dtype = _output(image, changes)
    output = _allocate(shape, dtype if affine is None else affine.dtype, memory_format, allocator)
    source = output
    # Computing in 16 bits would round three times. So compute each image in float32, in one buffer that stays in cache.
    scratch = torch.empty(1, *shape[1:], device="cpu") if affine is not None and affine.is_half else None
    if changes or scratch is not None:
        # One image fits in the cache between two changes. The changes come before the cast, which makes uint8 four
        # times as large.
        for sample, (piece, target) in enumerate(zip(image, output, strict=True)):
            for change in changes:
                piece = change.one(piece, sample)
            if scratch is not None:
                scratch.copy_(piece)
                _apply(affine, scratch, scratch)
                piece = scratch[0]
            target.copy_(piece)
        if scratch is not None:
            return output
    elif output.dtype != dtype:
        output.copy_(image)  # type: ignore[arg-type]  # a list has changes
    else:
        source = image  # type: ignore[assignment]  # float images that do not move are normalised straight from input
    _apply(affine, source, output)
    return output


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
    for sample, (image, part) in enumerate(zip(images, torch.split(flat, sizes), strict=True)):
        for change in changes:
            image = change.one(image, sample)
        c, *size = image.shape
        is_last = memory_format is torch.channels_last
        target = part.view(*size, c).movedim(-1, 0) if is_last else part.view(c, *size)
        targets.append(target.copy_(image))
    return targets


def _output(image: Images, changes: Sequence[Imagewise], sample: int | None = None) -> tuple[torch.Size, torch.dtype]:
    """Return shape and dtype of the images after the changes; with `sample`, of that one of a list."""
    first = image if isinstance(image, torch.Tensor) else image[0][None]
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


def _apply(affine: Affine | None, source: torch.Tensor, output: torch.Tensor) -> None:
    if affine is not None and affine.scale is not None and affine.shift is not None:
        scale_and_shift(source, affine.scale, affine.shift, output)
