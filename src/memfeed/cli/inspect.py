"""``memfeed inspect``: what a store holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import memfeed
from memfeed.cli.cache import load_transform
from memfeed.cli.errors import UsageError
from memfeed.cli.pictures import write_pictures
from memfeed.cli.sheet import write_sheet
from memfeed.errors import StoreError
from memfeed.schema import values
from memfeed.schema.fields import HEAP_OF_BYTES, Field
from memfeed.store import ragged, tensordict_dir
from memfeed.store.gather import read_row
from memfeed.store.store import Store
from memfeed.system.units import format_bytes, printable

WIDTH_OF_A_PIPE = 200
"""Columns of a table that no terminal shows; rich would cut it to 80."""
MOST_SKIPPED = 20


def inspect(
    store: Annotated[Path, typer.Argument(help="The store's directory, or one that TensorDict.memmap() wrote.")],
    rows: Annotated[int, typer.Option(min=0, help="How many of the first rows to show.")] = 3,
    pictures: Annotated[
        Path | None, typer.Option(help="Write the image-like fields of these rows there, as small PNG files.")
    ] = None,
    augment: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:TRANSFORM",
            help="Draw these rows beside what this transform makes of them, as one PNG file in the --pictures "
            "directory, or here.",
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How many versions of each row --augment shows.")] = 5,
) -> None:
    """Show the fields of a store, their bytes, and the first rows."""
    transform = None if augment is None else load_transform(augment)
    opened = memfeed.open(store)
    count = _count(opened)
    shown = range(min(rows, count or 0))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_OF_A_PIPE)
    said = "no rows (a TensorDict of batch_size [])" if count is None else f"{count:,} rows"
    typer.echo(f"{store}: {said}, {len(opened.schema):,} fields, {format_bytes(opened.nbytes)}")
    if opened.skipped:
        numbers = ", ".join(map(str, opened.skipped[:MOST_SKIPPED]))
        more = ", ..." if len(opened.skipped) > MOST_SKIPPED else ""
        typer.echo(f"left out: {len(opened.skipped):,} samples of the dataset, numbers {numbers}{more}")
    console.print(_fields(opened))
    if shown or count is None:
        console.print(_values(opened, None if count is None else shown))
    if augment is not None:
        if not shown:
            raise UsageError(f"found --augment and no rows to show of {store}; expected one at least: see --rows")
        sheet = (pictures or Path()) / f"{store.stem}-augmented.png"
        write_sheet(opened, shown, transform, epochs, sheet)
        typer.echo(str(sheet))
    elif pictures is not None:
        for path in write_pictures(opened, shown, pictures):
            typer.echo(str(path))


def _count(store: Store) -> int | None:
    try:
        return len(store)
    except StoreError:  # a model's weights, say
        return None


def _fields(store: Store) -> Table:
    table = Table("field", "kind", "dtype", "shape", "or None", title="Fields", title_justify="left")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    sizes = field_bytes(store)
    total = max(sum(sizes), 1)
    for field, size in zip(store.schema, sizes, strict=True):
        dtype, shape = _form(field)
        optional = "yes" if field.optional else ""
        cells = [printable(field.name), field.kind, dtype, shape, optional, format_bytes(size), f"{size / total:.1%}"]
        table.add_row(*map(Text, cells))  # Text: names of fields may look like rich's markup
    return table


def _form(field: Field) -> tuple[str, str]:
    if field.kind in HEAP_OF_BYTES:
        return "", ""
    return field.dtype, "[" + ", ".join("*" if dim is None else str(dim) for dim in field.shape) + "]"


def field_bytes(store: Store) -> list[int]:
    """The bytes on disk of every field."""
    manifest = store.manifest
    if manifest is None:
        return [tensordict_dir.column_bytes(column) for column in store.columns]
    return [sum(manifest.files[name] for name in ragged.column_files(field, 0)) for field in store.schema]


def _values(store: Store, rows: range | None) -> Table:
    """The first rows side by side; where there are no rows, each field's one value."""
    headings = ["value"] if rows is None else [f"row {row}" for row in rows]
    table = Table("field", *headings, title="First rows" if rows is not None else "Values", title_justify="left")
    for field, column in zip(store.schema, store.columns, strict=True):
        values = [store.column(field.path)] if rows is None else [read_row(column, row) for row in rows]
        table.add_row(*map(Text, [printable(field.name), *map(brief, values)]))
    return table


def brief(value: Any) -> str:
    """A value in a few words: a number as it is, many of them by shape, range and mean."""
    tensor = values.as_tensor(value)
    if isinstance(value, bytes):
        return f"{_cut(repr(value[:40]))} ({format_bytes(len(value))})"
    if tensor is None:
        try:
            return _cut(printable(repr(value)))
        except RecursionError:
            return f"a deeply nested {type(value).__name__}"
    shape = f"[{', '.join(map(str, tensor.shape))}]"
    if tensor.numel() == 0 and tensor.ndim > 1:  # a list of lists could be a long one
        return f"{shape} empty"
    if tensor.numel() <= 6:
        return _cut(repr(tensor.tolist()))
    if tensor.is_complex() or tensor.dtype is torch.bool:
        return shape if tensor.is_complex() else f"{shape} {int(tensor.sum()):,} true"
    wide = tensor.double()
    return f"{shape} {wide.min().item():.4g} to {wide.max().item():.4g}, mean {wide.mean().item():.4g}"


def _cut(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
