"""Which values of a store are images, their pixels, and thumbnails of them."""

from __future__ import annotations

import base64
import io
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from memfeed.schema.fields import Field

CHANNELS = (1, 3, 4)
SMALLEST_FLOAT = 8
"""The least height and width of an image of floats: smaller ones are boxes and matrices more often."""


class Thumbnail(NamedTuple):
    """A small PNG image as the address of an HTML page, and its size in pixels."""

    uri: str
    width: int
    height: int


def may_hold_images(field: Field) -> bool:
    """Return True if the dtype and shape of a field are those of images; floats must also lie in 0 to 1."""
    if field.kind not in ("fixed", "jagged", "list"):
        return False
    dims = field.shape
    is_float = field.torch_dtype.is_floating_point and field.torch_dtype.itemsize > 1
    if field.dtype != "uint8" and not is_float:
        return False
    if len(dims) == 2:
        return not is_float or _is_large(dims)
    if len(dims) != 3:
        return False
    if dims[0] in (None, *CHANNELS) and (not is_float or _is_large(dims[1:])):
        return True
    return dims[2] in (None, *CHANNELS) and (not is_float or _is_large(dims[:2]))


def _is_large(dims: tuple[int | None, ...]) -> bool:
    return all(dim is None or dim >= SMALLEST_FLOAT for dim in dims)


def pixels(value: Any, longest: int | None = None) -> torch.Tensor | None:
    """Return an image as uint8 [h, w] or [h, w, c], in new memory; None for a value that is none.

    Images are uint8 [c, h, w], [h, w, c] with 1, 3 or 4 channels, and [h, w]; and floats in 0 to 1 of these shapes,
    of 8 pixels and more each way. With ``longest`` rows and columns of pixels are left out of larger ones, so that both
    sides have at most twice as many.
    """
    if not isinstance(value, torch.Tensor) or not value.numel() or value.ndim not in (2, 3):
        return None
    image = value.detach().as_subclass(torch.Tensor)
    if image.ndim == 3 and image.shape[0] in CHANNELS:
        image = image.permute(1, 2, 0)
    elif image.ndim == 3 and image.shape[2] not in CHANNELS:
        return None
    height, width = image.shape[:2]
    if longest is not None:
        step = max(1, max(height, width) // longest)
        image = image[::step, ::step]
    if image.is_floating_point():
        low, high = image.min().item(), image.max().item()
        if not 0 <= low <= high <= 1 or min(height, width) < SMALLEST_FLOAT:
            return None
        image = (image.float() * 255).round().to(torch.uint8)
    elif image.dtype is not torch.uint8:
        return None
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[:, :, 0]
    return image.clone(memory_format=torch.contiguous_format)


def thumbnail(value: Any, side: int) -> Thumbnail | None:
    """Return an image in at most ``side`` pixels each way; None for a value that is none, and without Pillow."""
    if find_spec("PIL") is None:
        return None
    found = pixels(value, side)
    if found is None:
        return None
    from PIL import Image

    picture, file = Image.fromarray(found.numpy()), io.BytesIO()
    picture.thumbnail((side, side))
    picture.save(file, "PNG")
    return Thumbnail(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}", *picture.size)
