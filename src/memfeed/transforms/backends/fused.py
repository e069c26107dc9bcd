"""The fast road on the CPU: each pixel that is needed is read once, and written once more by the normalisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfeed.transforms.memory import Empty
from memfeed.transforms.params.affine import Affine, scale_and_shift
from memfeed.transforms.params.geometry import Imagewise


def fused(image: torch.Tensor, changes: Sequence[Imagewise], affine: Affine | None, empty: Empty) -> torch.Tensor:
    """Change images [n, c, h, w] one by one, then apply `affine`; `image` itself where there is nothing to do.

    The output [n, c, height, width] lies in memory from `empty`. The memory of `image` is only read.
    """
    dtype = image.dtype if affine is None else affine.dtype
    if not changes and dtype == image.dtype and (affine is None or affine.scale is None):
        return image
    # A subclass (MemoryMappedTensor, tv_tensors.Image) pays for its __torch_function__ at every slice.
    image = image.as_subclass(torch.Tensor)
    shape, kind = image.shape, image.dtype
    for change in changes:
        shape, kind = change.output_shape(shape), change.output_dtype(kind)
    dtype = kind if affine is None else affine.dtype
    output = empty(shape, dtype)
    source = output
    # 16 bits would be rounded three times: each image is computed in float32, and the one scratch stays in the cache
    scratch = torch.empty(1, *shape[1:]) if affine is not None and affine.halves else None
    if changes or scratch is not None:
        # one by one: an image is small enough to stay in the cache between two changes, which come before the cast, as
        # that quadruples uint8
        for sample, (piece, place) in enumerate(zip(image, output, strict=True)):
            for change in changes:
                piece = change.one(piece, sample)
            if scratch is not None:
                scratch.copy_(piece)
                _apply(affine, scratch, scratch)
                piece = scratch[0]
            place.copy_(piece)
        if scratch is not None:
            return output
    elif dtype != image.dtype:
        output.copy_(image)
    else:
        source = image  # float images in, nothing moved: normalised straight from where they are
    _apply(affine, source, output)
    return output


def _apply(affine: Affine | None, source: torch.Tensor, output: torch.Tensor) -> None:
    if affine is not None and affine.scale is not None and affine.shift is not None:
        scale_and_shift(source, affine.scale, affine.shift, output)
