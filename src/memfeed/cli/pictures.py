"""The images of a store as small PNG files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

import memfeed
from memfeed.errors import SchemaError, TransformError
from memfeed.store.store import Store
from memfeed.store.store_html import may_hold_images, pixels
from memfeed.system.messages import require
from memfeed.transforms import Transform
from memfeed.transforms.batch_fields import BatchField, find, find_all, looks_like_images, mark_ragged, tensors

LONG_SIDE = 256
"""Pixels. Larger images are scaled down to this."""


def write_pictures(store: Store, rows: Sequence[int], directory: Path) -> Iterator[Path]:
    """Write the images of these rows as ``FIELD-ROW.png``, and yield each path once the file is written.

    Images are what `memfeed.store.store_html.pixels` says. Raises SchemaError if no field holds images, or none of
    these rows; ModuleNotFoundError without Pillow.
    """
    require("vision", "PIL")
    from PIL import Image

    indices = [index for index, field in enumerate(store.schema) if may_hold_images(field)]
    if not indices:
        raise SchemaError(
            f"{store.path}: found no image-like field among {store.schema.names()}; expected one of uint8, or of "
            "floats in 0 to 1, [c, h, w] or [h, w, c] with 1, 3 or 4 channels, or [h, w]: leave --pictures out"
        )
    directory.mkdir(parents=True, exist_ok=True)
    has_written = False
    names = _file_names([store.schema.fields[index].name for index in indices])
    for row in rows:
        for index, name in zip(indices, names, strict=True):
            found = pixels(store._view.columns[index].read_row(row))
            if found is None:
                continue
            has_written = True
            picture = Image.fromarray(found.numpy())
            picture.thumbnail((LONG_SIDE, LONG_SIDE))
            path = directory / f"{name}-{row}.png"
            picture.save(path)
            yield path
    if not has_written and len(rows):
        raise SchemaError(
            f"{store.path}: found no image in these rows of {', '.join(names):.150}; expected uint8, or floats in 0 "
            "to 1: leave --pictures out"
        )


def _file_names(fields: list[str]) -> list[str]:
    """Return a safe file name for each field; no two are equal."""
    names: list[str] = []
    for field in fields:
        name = re.sub(r"[^A-Za-z0-9._-]", "_", field)[:100].lstrip(".") or "field"
        numbered = (f"{name}-{number}" for number in count(len(names)))
        names.append(name if name not in names else next(one for one in numbered if one not in names))
    return names


SIDE, GAP, TITLE, MARGIN = 168, 8, 22, 64
"""Pixels: the side of a picture, the gap between two, the height of the titles, the width of the row labels."""
PAPER, INK = "white", "#1f2933"


def write_contact_sheet(store: Store, rows: Sequence[int], transform: Any, epochs: int, path: Path) -> None:
    """Write a PNG file with one line per row: the stored image, then the image of each epoch (seed 0).

    Float images of all epochs are scaled alike: the lowest value is black, the highest is white.

    Raises TransformError if there are no images before or after the transform; ModuleNotFoundError without Pillow.
    """
    require("vision", "PIL")
    from PIL import Image, ImageDraw

    loader = memfeed.Loader(store.subset(list(rows)), len(rows), transform=transform)
    lists = store.schema.list_paths()
    stored = mark_ragged(store[list(rows)], len(rows), lists)
    on = transform.on if isinstance(transform, Transform) else None
    columns = [_images(stored, find_all(stored, on, store.schema.given_names())[0].path)]
    for _ in range(epochs):
        (batch,) = loader
        columns.append(_images(mark_ragged(batch, len(rows), lists), columns[0].path))
    low = min(float(image.min()) for field in columns[1:] for image in field.tensor)
    high = max(float(image.max()) for field in columns[1:] for image in field.tensor)
    width, height = (MARGIN + len(columns) * (SIDE + GAP), TITLE + len(rows) * (SIDE + GAP))
    sheet = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(sheet)
    for across, field in enumerate(columns):
        left = MARGIN + across * (SIDE + GAP)
        pen.text((left, 5), "original" if across == 0 else f"epoch {across - 1}", fill=INK)
        for down, row in enumerate(rows):
            top = TITLE + down * (SIDE + GAP)
            if across == 0:
                pen.text((GAP, top + SIDE // 2), f"row {row}", fill=INK)
            picture = Image.fromarray(_sheet_pixels(field.tensor[down], low, high).numpy()).convert("RGB")
            factor = SIDE // max(picture.size)
            if factor > 1:
                picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
            picture.thumbnail((SIDE, SIDE))
            sheet.paste(picture, (left, top))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def _images(batch: Any, path: tuple[Any, ...]) -> BatchField:
    """Return the field at this path, which must be images; without such a field, the one that looks like images."""
    for field in tensors(batch):
        if field.path == path:
            if not looks_like_images(field.tensor):
                raise TransformError(f"field {field}; expected images [n, c, h, w] with 1 to 4 channels")
            return field
    return find(batch, None)


def _sheet_pixels(image: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return the image as uint8 [h, w] or [h, w, c], for Pillow."""
    if image.dtype is not torch.uint8:
        image = ((image.double() - low) / max(high - low, 1e-12) * 255).round().clamp(0, 255).to(torch.uint8)
    image = image[:3] if len(image) != 2 else image[:1]
    return image[0] if len(image) == 1 else image.permute(1, 2, 0).contiguous()
