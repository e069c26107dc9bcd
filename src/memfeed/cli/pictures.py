"""The images of a store as small PNG files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from memfeed.errors import SchemaError
from memfeed.schema.fields import Field
from memfeed.store.store import Store
from memfeed.system.extras import require

LONG_SIDE = 256
"""Pixels. Larger images are scaled down to this."""


def write_pictures(store: Store, rows: Iterable[int], directory: Path) -> Iterator[Path]:
    """Write the images of these rows as ``FIELD-ROW.png``, and yield each path once the file is written.

    Images are uint8 [1, h, w], [3, h, w], [4, h, w] or [h, w]. Raises SchemaError if no field holds images,
    ModuleNotFoundError without Pillow.
    """
    require("vision", "PIL")
    from PIL import Image

    indices = [index for index, field in enumerate(store.schema) if may_hold_images(field)]
    if not indices:
        raise SchemaError(
            f"{store.path}: found no image-like field among {store.schema.names()}; "
            "expected one of uint8 [c, h, w] with 1, 3 or 4 channels, or [h, w]: leave --pictures out"
        )
    directory.mkdir(parents=True, exist_ok=True)
    names = _file_names([store.schema.fields[index].name for index in indices])
    for row in rows:
        for index, name in zip(indices, names, strict=True):
            pixels = _pixels(store._view.columns[index].read_row(row))
            if pixels is None:
                continue
            picture = Image.fromarray(pixels.numpy())
            picture.thumbnail((LONG_SIDE, LONG_SIDE))
            path = directory / f"{name}-{row}.png"
            picture.save(path)
            yield path


def may_hold_images(field: Field) -> bool:
    """Return True if the dtype and shape of a field are those of images."""
    if field.dtype != "uint8" or field.kind not in ("fixed", "jagged", "list"):
        return False
    return len(field.shape) == 2 or (len(field.shape) == 3 and field.shape[0] in (None, 1, 3, 4))


def _pixels(value: Any) -> torch.Tensor | None:
    """Return [h, w] or [h, w, c] for Pillow; None if this row is no image."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return None
    if value.ndim == 2:
        return value
    if len(value) not in (1, 3, 4):
        return None
    return value[0] if len(value) == 1 else value.permute(1, 2, 0).contiguous()


def _file_names(fields: list[str]) -> list[str]:
    """Return a safe file name for each field; no two are equal."""
    names: list[str] = []
    for field in fields:
        name = re.sub(r"[^A-Za-z0-9._-]", "_", field)[:100].lstrip(".") or "field"
        names.append(name if name not in names else f"{name}-{len(names)}")
    return names
