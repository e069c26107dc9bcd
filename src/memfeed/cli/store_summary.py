"""The output of ``memfeed inspect``: the fields of a store, its first rows, and pictures of them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import memfeed
from memfeed.cli.error_lines import UsageError
from memfeed.errors import SchemaError, TransformError, listed
from memfeed.remote.layout import read_manifest
from memfeed.schema.fields import HEAP_OF_BYTES, Field, Schema
from memfeed.store.dataset_attributes import Loss
from memfeed.store.ragged import column_files
from memfeed.store.store import Store
from memfeed.store.store_html import manifest_lines, manifest_parts, may_hold_images, parts, pixels, summary
from memfeed.system.files import local_path, write_file
from memfeed.system.messages import format_bytes, printable, require

if TYPE_CHECKING:
    from memfeed.system.html_parts import Html
    from memfeed.transforms.batch_fields import BatchField

PIPE_WIDTH = 200
"""Characters per line of a table that is not printed to a terminal; rich would cut it to 80."""
MOST_TARGETS = 20
MOST_COLUMNS = 20  # of the table of rows: it is read from left to right
MOST_DECODED = 64  # rows of a compressed field, to measure how fast they are decoded
DECODE_SECONDS = 0.2


def summarise(
    store: Path, rows: int, pictures: Path | None, augment: str | None, epochs: int, html: Path | None = None
) -> None:
    """Print what a store holds; ``memfeed inspect --help`` explains the arguments."""
    pictures, html = (None if one is None else local_path(one) for one in (pictures, html))
    transform = None
    if augment is not None:
        from memfeed.cli.user_code import load_transform

        transform = load_transform(augment)
    opened = memfeed.open(store)
    row_count = None if opened._view.backing.row_count is None else len(opened)  # None: such as the weights of a model
    shown = range(min(rows, row_count or 0))
    console = _console()
    size = "no rows (a TensorDict of batch_size [])" if row_count is None else f"{row_count:,} rows"
    typer.echo(f"{printable(store)}: {size}, {len(opened.schema):,} fields, {format_bytes(opened.nbytes)}")
    if html is not None:
        # before what a damaged column ends
        _write_page(html, store.name, parts(opened._view, rows))
    for line in _kept_lines(opened):
        typer.echo(printable(line))
    console.print(_fields_table(opened.schema, opened._view.field_bytes()))
    for line in _coded_lines(opened):
        typer.echo(printable(line))
    if shown or row_count is None:
        console.print(_values_table(opened, None if row_count is None else shown))
    if augment is not None:
        if not shown:
            raise UsageError(f"found --augment and no rows to show of {store}; expected at least one row: see --rows")
        path = (pictures or Path()) / f"{store.stem}-augmented.png"
        write_contact_sheet(opened, shown, transform, epochs, path)
        typer.echo(printable(path))
    elif pictures is not None:
        for path in write_pictures(opened, shown, pictures):
            typer.echo(printable(path))


def summarise_address(address: str, html: Path | None = None) -> None:
    """Print what the manifest of the store at an address says."""
    remote = read_manifest(address)
    manifest, schema = remote.manifest, remote.manifest.schema
    total = sum(manifest.files.values())
    typer.echo(f"{printable(remote.address)}: {manifest.rows:,} rows, {len(schema):,} fields, {format_bytes(total)}")
    typer.echo(f"digest: {remote.digest}")
    for line in manifest_lines(manifest):
        typer.echo(printable(line))
    sizes = [sum(manifest.files.get(name, 0) for name in column_files(field, 0)) for field in schema]
    _console().print(_fields_table(schema, sizes))
    if html is not None:
        _write_page(local_path(html), remote.address.name, manifest_parts(remote.address, manifest, sizes))


def _write_page(path: Path, name: str, parts: Iterable[Html]) -> None:
    from memfeed.system.html_parts import page

    write_file(path, page(f"memfeed: {name}", parts).encode())
    typer.echo(printable(path))


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def _kept_lines(store: Store) -> list[str]:
    """Return lines with what the store keeps beside its columns."""
    lines = list(manifest_lines(store._view.manifest))
    if hasattr(store, "targets"):
        lines.append(f"targets: {len(store.targets):,}: {listed(list(store.targets[:MOST_TARGETS]))}")
    return lines


def _coded_lines(store: Store) -> list[str]:
    """Return for each compressed field its codec, what it saves, how fast it is decoded, and what it changed."""
    manifest = store._view.manifest
    attributes = manifest.attributes if manifest is not None else None
    losses = {loss.field: loss for loss in attributes.losses} if attributes else {}
    lines = []
    for field_index, column in enumerate(store._view.columns):
        loss = losses.get(store._view.fields[field_index])
        if (column.stored is column and loss is None) or not len(store):
            continue
        if loss is not None and column.stored is column:
            lines.append(f"{column.field.name}: raw, after a lossy codec; {_loss_text(loss)}")
            continue
        rows, started, count = np.arange(min(len(store), MOST_DECODED)), time.perf_counter(), 0
        while time.perf_counter() - started < DECODE_SECONDS:
            column.read_row(int(rows[count % len(rows)]))
            count += 1
        rate = count / (time.perf_counter() - started)
        decoded = column.mean_row_bytes * len(store)
        name, coding = column.field.name, column.stored.field.form_text
        line = (
            f"{name}: {coding}, 1/{decoded / max(column.nbytes, 1):.1f} of "
            f"{format_bytes(decoded)}, {rate:,.0f} rows/s decoded by one core"
        )
        lines.append(line if loss is None else f"{line}; {_loss_text(loss)}")
    return lines


def _loss_text(loss: Loss) -> str:
    ratio = "no loss" if loss.psnr is None else f"PSNR {loss.psnr:.1f} dB"
    return (
        f"{ratio}, pixels differ by {loss.mean:.2f} of 255 on average and {loss.largest} at most "
        f"({loss.samples} samples)"
    )


def _fields_table(schema: Schema, sizes: list[int]) -> Table:
    table = Table("field", "kind", "dtype", "shape", "optional", title="Fields", title_justify="left")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    total = max(sum(sizes), 1)
    for field, size in zip(schema, sizes, strict=True):
        dtype, shape = _dtype_and_shape(field)
        optional = "yes" if field.optional else ""
        cells = [printable(field.name), field.kind, dtype, shape, optional, format_bytes(size), f"{size / total:.1%}"]
        table.add_row(*map(Text, cells))  # Text: a field's name may look like rich's markup
    return table


def _dtype_and_shape(field: Field) -> tuple[str, str]:
    if field.kind in HEAP_OF_BYTES:
        return "", ""
    return field.dtype, "[" + ", ".join("*" if dim is None else str(dim) for dim in field.shape) + "]"


def _values_table(store: Store, rows: range | None) -> Table:
    """Return the given rows side by side; with None, the one value of each field of a store without rows."""
    title = "Values" if rows is None else "First rows"
    if rows is not None and len(rows) > MOST_COLUMNS:
        title, rows = f"The first {MOST_COLUMNS} of these {len(rows):,} rows", rows[:MOST_COLUMNS]
    headings = ["value"] if rows is None else [f"row {row}" for row in rows]
    table = Table("field", *headings, title=title, title_justify="left")
    for field, column in zip(store.schema, store._view.columns, strict=True):
        found = [store.column(field.path)] if rows is None else [column.read_row(row) for row in rows]
        table.add_row(*map(Text, [printable(field.name), *map(summary, found)]))
    return table


# --- pictures

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

    from memfeed.transforms import Transform
    from memfeed.transforms.batch_fields import find_all, mark_ragged

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
    from memfeed.transforms.batch_fields import find, looks_like_images, tensors

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
