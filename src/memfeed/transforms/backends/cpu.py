"""The fused CPU path: read each needed pixel once, and write it once more to normalise it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfeed.system.buffers import Allocator, Fresh
from memfeed.transforms.params.geometry import Imagewise
from memfeed.transforms.params.values import Affine, scale_and_shift


def fused(
    image: torch.Tensor,
    changes: Sequence[Imagewise],
    affine: Affine | None,
    memory_format: torch.memory_format = torch.contiguous_format,
    allocator: Allocator | None = None,
) -> torch.Tensor:
    """Change images [n, c, h, w] one by one, then apply `affine`. Return `image` itself if there is nothing to do.

    Args:
        image: CPU images of any strides. They are only read.
        changes: to carry out first, in order.
        affine: to apply then.
        memory_format: of the output: `torch.contiguous_format` or `torch.channels_last`.
        allocator: gives the memory of the output; None for fresh memory, which the caller owns.
    """
    dtype = image.dtype if affine is None else affine.dtype
    if not changes and dtype == image.dtype and (affine is None or affine.scale is None):
        return image
    # A subclass (MemoryMappedTensor, tv_tensors.Image) would run its __torch_function__ for every slice.
    image = image.as_subclass(torch.Tensor)
    shape, dtype = image.shape, image.dtype
    for change in changes:
        shape, dtype = change.output_shape(shape), change.output_dtype(dtype)
    dtype = dtype if affine is None else affine.dtype
    output = _allocate(shape, dtype, memory_format, Fresh() if allocator is None else allocator)
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
    elif dtype != image.dtype:
        output.copy_(image)
    else:
        source = image  # float images that do not move are normalised straight from the input
    _apply(affine, source, output)
    return output


def _allocate(
    shape: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format, allocator: Allocator
) -> torch.Tensor:
    if memory_format is not torch.channels_last:
        return allocator.allocate(shape, dtype)
    n, c, h, w = shape
    return allocator.allocate((n, h, w, c), dtype).permute(0, 3, 1, 2)


def _apply(affine: Affine | None, source: torch.Tensor, output: torch.Tensor) -> None:
    if affine is not None and affine.scale is not None and affine.shift is not None:
        scale_and_shift(source, affine.scale, affine.shift, output)
