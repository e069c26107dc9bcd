"""The fast road on the CPU: each pixel that is needed is read once, and written once more by the normalisation."""

from __future__ import annotations

import torch

from memfeed.transforms.affine import Affine
from memfeed.transforms.memory import Empty
from memfeed.transforms.window import Window


def fused(image: torch.Tensor, window: Window | None, affine: Affine | None, empty: Empty) -> torch.Tensor:
    """Cut `window` out of images [n, c, h, w] and apply `affine`; `image` itself where there is nothing to do.

    The output [n, c, height, width] lies in memory from `empty`. The memory of `image` is only read.
    """
    dtype = image.dtype if affine is None else affine.dtype
    if window is None and dtype == image.dtype and (affine is None or affine.scale is None):
        return image
    # A subclass (MemoryMappedTensor, tv_tensors.Image) pays for its __torch_function__ at every slice.
    image = image.as_subclass(torch.Tensor)
    shape = image.shape if window is None else window.output_shape(image.shape)
    output = empty(shape, dtype)
    source = output
    if window is not None:
        _copy_windows(image, window, output)
    elif dtype != image.dtype:
        output.copy_(image)
    else:
        source = image  # float images in, no window: normalised straight from where they are
    if affine is not None and affine.scale is not None and affine.shift is not None:
        _scale_and_shift(source, affine.scale, affine.shift, output)
    return output


def _copy_windows(image: torch.Tensor, window: Window, output: torch.Tensor) -> None:
    """Copy, flip and cast sample by sample: a sample is small enough to stay in the cache between the two."""
    height, width = window.height, window.width
    offsets = zip(window.top.tolist(), window.left.tolist(), strict=True)
    flips = zip(window.hflip.tolist(), window.vflip.tolist(), strict=True)
    for i, ((top, left), (hflip, vflip)) in enumerate(zip(offsets, flips, strict=True)):
        piece = image[i, :, top : top + height, left : left + width]
        if hflip or vflip:
            # torch has no negative strides; flipping the bytes before the cast moves a quarter of what floats would.
            piece = piece.flip([-1, -2] if hflip and vflip else [-1] if hflip else [-2])
        output[i].copy_(piece)


def _scale_and_shift(
    source: torch.Tensor, scale: tuple[float, ...], shift: tuple[float, ...], output: torch.Tensor
) -> None:
    """Write source * scale + shift per channel, in one pass.

    A scalar add with alpha took 0.6 ms for [64, 3, 224, 224], mul_ then add_ 1.4 ms, a broadcast addcmul 2.6 ms.
    """
    for channel in range(output.shape[1]):
        offset = torch.tensor(shift[channel], dtype=output.dtype)
        torch.add(offset, source[:, channel], alpha=scale[channel], out=output[:, channel])
