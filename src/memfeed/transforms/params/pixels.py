"""Images of bytes whose channels lie apart, in planes [c, h, w], or together, pixel by pixel: [h, w, c].

torch resizes the latter in 0.4 of the time that it takes for planes, to the same values. Its own ways from one to the
other take 0.4 (there) and 0.9 (back) of that time again. OpenCV's `merge` and `split` take 0.13 and 0.1: so they are
used where OpenCV is installed. They move bytes, and compute nothing.

With OpenCV, pixels of three channels have a fourth byte that nobody reads: torch's kernel stores four bytes in less
time than three.
"""

from __future__ import annotations

import threading
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch

from memfeed.system.buffers import Pool

_IDLE = 3  # buffers that a thread keeps: pixels, planes, and one that a user's function still holds
_BUFFER_BYTES = 1 << 20  # one size for all crops of the usual images
_PIXEL_BYTES = 4


class _Here(threading.local):
    """Memory of one thread: `pool` for pieces that are handed on, `box` and `rest` for use within one call."""

    @torch.inference_mode(False)  # they outlive the caller's block
    def __init__(self) -> None:
        self.pool = Pool(_IDLE, _BUFFER_BYTES)
        self.box = np.empty(_BUFFER_BYTES, np.uint8)
        self.box_tensor = torch.from_numpy(self.box)
        self.rest = np.empty(_BUFFER_BYTES // _PIXEL_BYTES, np.uint8)


_here = _Here()


def borrow(*shape: int) -> torch.Tensor:
    """Return bytes of this shape for a piece of an image, on the CPU.

    The memory comes back when the last tensor that shares it is freed: new memory would cost its page faults
    for each image, as much as resizing it.
    """
    return _here.pool.allocate(shape, torch.uint8)


def has_pixels(image: torch.Tensor) -> bool:
    """Return True if the channels of an image [c, h, w] of bytes lie together, and rows are made of whole pixels."""
    if image.dtype is not torch.uint8 or image.ndim != 3:
        return False
    channel, row, column = image.stride()
    channels = image.size(0)
    if channel != 1 or not 1 < column <= _PIXEL_BYTES or column == channels:
        return channel == 1 and 1 < column == channels <= _PIXEL_BYTES
    # a fourth byte of the last pixel must be in memory too
    ends = row | image.storage_offset() | image.untyped_storage().nbytes()
    return bool(column == _PIXEL_BYTES and channels == 3 and ends % _PIXEL_BYTES == 0)


def box_pixels(image: torch.Tensor, top: int, left: int, height: int, width: int) -> torch.Tensor:
    """Return a box of an image of bytes, of 3 or 4 channels, as pixels [1, channels, height, width] to resize.

    There may be one channel more than the image has, of any values. The result is valid until this thread's next call.
    """
    plane, row, column = image.stride()
    size = height * row * _PIXEL_BYTES
    opencv = _opencv() if column == 1 and row == image.size(2) and size <= _BUFFER_BYTES else None
    if opencv is None:
        box = image[:, top : top + height, left : left + width]
        return (box if plane == 1 and has_pixels(image) else to_pixels(box).permute(2, 0, 1))[None]
    # `merge` takes seven times as long for planes whose rows are apart: so whole rows are merged, and torch copies the
    # box out of them
    planes = [*image.numpy()[:, top : top + height]]
    if len(planes) < _PIXEL_BYTES:
        planes.append(planes[0])
    opencv.merge(planes, _here.box[:size].reshape(height, row, _PIXEL_BYTES))
    strides = (size, 1, row * _PIXEL_BYTES, _PIXEL_BYTES)
    return _here.box_tensor.as_strided((1, _PIXEL_BYTES, height, width), strides, left * _PIXEL_BYTES)


def to_pixels(planes: torch.Tensor) -> torch.Tensor:
    """Return an image of bytes [c, h, w], of any strides, as contiguous pixels [h, w, c], in borrowed memory."""
    c, h, w = planes.shape
    pixels = borrow(h, w, c)
    opencv = _opencv()
    if opencv is None or c == 1 or planes.stride(2) != 1:
        return torch.stack(planes.unbind(0), -1, out=pixels)
    whole = borrow(c, h, w).numpy()
    np.copyto(whole, planes.numpy())
    opencv.merge([*whole], pixels.numpy())
    return pixels


def to_planes(image: torch.Tensor, planes: torch.Tensor | None = None) -> torch.Tensor:
    """Copy an image [c, h, w] that `has_pixels` into planes [c, h, w], by default borrowed ones. Return them."""
    planes = borrow(*image.shape) if planes is None else planes
    opencv, array = _opencv(), planes.numpy()
    if opencv is None or not planes.is_contiguous():
        np.copyto(array, image.numpy())  # half the time of torch's copy
        return planes
    pixels, channels = _pixels_of(image), [*array]
    if pixels.shape[2] != len(channels):
        rest = _here.rest if channels[0].size <= _here.rest.size else np.empty(channels[0].size, np.uint8)
        channels.append(rest[: channels[0].size].reshape(channels[0].shape))
    opencv.split(pixels, channels)
    return planes


def _pixels_of(image: torch.Tensor) -> Any:
    """Return an image [c, h, w] that `has_pixels` as an array [h, w, bytes of a pixel]."""
    _, h, w = image.shape
    _, row, column = image.stride()
    return image.as_strided((h, w, column), (row, column, 1)).numpy()


def copy_image(image: torch.Tensor, target: torch.Tensor) -> None:
    """Copy an image [c, h, w] of any layout into `target`, of any dtype and layout."""
    if image.dtype is torch.uint8 and image.ndim == 3 and 1 < image.size(0) <= _PIXEL_BYTES:
        if has_pixels(image):
            if target.stride(2) == 1:
                image = to_planes(image, target if target.dtype is torch.uint8 else None)
            elif image.stride(2) != image.size(0) and target.stride()[::2] == (1, 3) and (opencv := _opencv()):
                whole = target if target.dtype is torch.uint8 else borrow(*target.shape[1:], 3).permute(2, 0, 1)
                opencv.cvtColor(_pixels_of(image), opencv.COLOR_BGRA2BGR, whole.permute(1, 2, 0).numpy())
                image = whole
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
