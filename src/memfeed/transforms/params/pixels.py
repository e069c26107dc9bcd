"""Images of bytes whose channels lie apart, in planes [c, h, w], or together, pixel by pixel: [h, w, c].

torch resizes the latter in 0.4 of the time that it takes for planes, to the same values. Its own ways from one to the
other take 0.4 (there) and 0.9 (back) of that time again. OpenCV's `merge` and `split` take 0.13 and 0.1: so they are
used where OpenCV is installed. They move bytes, and compute nothing.
"""

from __future__ import annotations

import threading
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch

from memfeed.system.buffers import Pool

_IDLE = 3  # buffers that a thread keeps: a crop, its pixels, the resized pixels
_BUFFER_BYTES = 1 << 20  # one size for all crops of the usual images
_here = threading.local()


def borrow(*shape: int) -> torch.Tensor:
    """Return bytes of this shape for a piece of an image, on the CPU.

    The memory comes back when the last tensor that shares it is freed: allocated anew, it would cost its page faults
    for each image, as much as resizing it.
    """
    pool: Pool | None = getattr(_here, "pool", None)
    if pool is None:
        pool = _here.pool = Pool(_IDLE, _BUFFER_BYTES)
    return pool.allocate(shape, torch.uint8)


def has_pixels(image: torch.Tensor) -> bool:
    """Return True if the channels of an image [c, h, w] of bytes lie together, and rows are made of whole pixels."""
    if image.dtype is not torch.uint8 or image.ndim != 3:
        return False
    channel, _, column = image.stride()
    return channel == 1 and column == len(image) and 1 < column <= 4


def to_pixels(planes: torch.Tensor) -> torch.Tensor:
    """Return an image of bytes [c, h, w], of any strides, as contiguous pixels [h, w, c], in borrowed memory."""
    c, h, w = planes.shape
    pixels = borrow(h, w, c)
    opencv = _opencv()
    if opencv is None or c == 1 or planes.stride(2) != 1:
        return torch.stack(planes.unbind(0), -1, out=pixels)
    whole = borrow(c, h, w).numpy()  # `merge` takes seven times as long for planes whose rows are apart
    np.copyto(whole, planes.numpy())
    opencv.merge([*whole], pixels.numpy())
    return pixels


def to_planes(image: torch.Tensor, planes: torch.Tensor | None = None) -> torch.Tensor:
    """Copy an image [c, h, w] that `has_pixels` into planes [c, h, w], by default borrowed ones. Return them."""
    planes = borrow(*image.shape) if planes is None else planes
    opencv = _opencv()
    if opencv is None or not planes.is_contiguous():
        np.copyto(planes.numpy(), image.numpy())  # half the time of torch's copy
    else:
        opencv.split(image.permute(1, 2, 0).numpy(), [*planes.numpy()])
    return planes


def copy_image(image: torch.Tensor, target: torch.Tensor) -> None:
    """Copy an image [c, h, w] of any layout into `target`, of any dtype and layout."""
    if image.dtype is torch.uint8 and image.ndim == 3 and 1 < len(image) <= 4:
        if has_pixels(image) and target.stride(2) == 1:
            image = to_planes(image, target if target.dtype is torch.uint8 else None)
        elif image.stride(2) == 1 and target.stride(0) == 1:
            image = to_pixels(image).permute(2, 0, 1)
    if image is not target:
        target.copy_(image)


_IMPORTING = threading.Lock()  # threads ask for it together, and cv2 replaces itself while it is imported


@cache
def _opencv() -> Any:
    """Return OpenCV; None where it is not installed, or cannot be imported (a library of the system is missing)."""
    with _IMPORTING:
        try:
            return import_module("cv2")
        except ImportError:
            return None
