"""A contact sheet: images of a store beside what a transform makes of them, epoch by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from memfeed.errors import TransformError
from memfeed.loading.bind import UserTransform, bind
from memfeed.random import Keys
from memfeed.store.store import Store
from memfeed.system.extras import require
from memfeed.transforms import Transform
from memfeed.transforms.batch_fields import BatchField, find, find_all, tensors

SIDE, GAP, TITLE, MARGIN = 168, 8, 22, 64
"""Pixels of a picture, between two, of the line of titles, and of the row numbers."""
PAPER, INK = "white", "#1f2933"


def write_sheet(store: Store, rows: Sequence[int], transform: UserTransform, epochs: int, path: Path) -> None:
    """Writes one line per row, the original first, then what the transform makes of it in each epoch (seed 0), as PNG.

    Float images are scaled, all alike, so that the least value is black and the largest white.

    Raises TransformError where there are no images, before or after; ModuleNotFoundError without Pillow.
    """
    require("vision", "PIL")
    from PIL import Image, ImageDraw

    bound = bind(transform, store.schema)
    assert bound is not None
    given = store[list(rows)]
    on = transform.on if isinstance(transform, Transform) else None
    columns = [_images(given, find_all(given, on)[0].path if on is not None else find(given, None).path)]
    ids = store.base_rows(torch.tensor(rows).numpy())
    for epoch in range(epochs):
        out = bound(store[list(rows)], Keys(0, epoch, torch.from_numpy(ids)))
        columns.append(_images(out, columns[0].path))
    low = min(float(field.tensor.min()) for field in columns[1:])
    high = max(float(field.tensor.max()) for field in columns[1:])
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
            times = SIDE // max(picture.size)
            if times > 1:
                picture = picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)
            picture.thumbnail((SIDE, SIDE))
            sheet.paste(picture, (left, top))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def _images(batch: Any, path: tuple[Any, ...]) -> BatchField:
    """The images of a batch: at this path, else the field that looks like them."""
    for field in tensors(batch):
        if field.path == path:
            if field.tensor.ndim != 4 or not 1 <= field.tensor.shape[1] <= 4:
                raise TransformError(f"field {field}; expected images [n, c, h, w] with 1 to 4 channels")
            return field
    return find(batch, None)


def _pixels(image: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """uint8 [h, w] or [h, w, c] for Pillow."""
    if image.dtype is not torch.uint8:
        image = ((image.double() - low) / max(high - low, 1e-12) * 255).round().clamp(0, 255).to(torch.uint8)
    image = image[:3] if len(image) != 2 else image[:1]
    return image[0] if len(image) == 1 else image.permute(1, 2, 0).contiguous()
