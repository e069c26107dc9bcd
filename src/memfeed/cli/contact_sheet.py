"""A contact sheet: images of a store, and the same images after a transform, one column per epoch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import memfeed
from memfeed.errors import TransformError
from memfeed.store.store import Store
from memfeed.system.extras import require
from memfeed.transforms import Transform
from memfeed.transforms.batch_fields import BatchField, find, find_all, looks_like_images, mark_ragged, tensors

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
            picture = Image.fromarray(_pixels(field.tensor[down], low, high).numpy()).convert("RGB")
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


def _pixels(image: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return the image as uint8 [h, w] or [h, w, c], for Pillow."""
    if image.dtype is not torch.uint8:
        image = ((image.double() - low) / max(high - low, 1e-12) * 255).round().clamp(0, 255).to(torch.uint8)
    image = image[:3] if len(image) != 2 else image[:1]
    return image[0] if len(image) == 1 else image.permute(1, 2, 0).contiguous()
