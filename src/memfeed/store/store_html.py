"""A store for people: as HTML, with the bytes of its columns, its first rows and thumbnails of images; values as text.

It reads a few rows at most and waits for none. What cannot be read is shown as the error that it raised.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch

from memfeed.errors import brief, cut, listed
from memfeed.schema import values
from memfeed.schema.fields import Field
from memfeed.store.manifest import Manifest
from memfeed.store.view import View
from memfeed.system.html_parts import (
    MOST_FIELDS,
    NAME_WIDTH,
    SHADES,
    Html,
    bar_row,
    count_text,
    element,
    joined,
    more_fields,
    table,
    text,
)
from memfeed.system.messages import format_bytes, printable

CELL_WIDTH = 60


def summary(value: Any) -> str:
    """Return a value in at most 60 characters: up to six numbers as they are, more by shape, range and mean."""
    tensor = values.as_tensor(value)
    if isinstance(value, bytes):
        return f"{cut(repr(value[:40]), CELL_WIDTH)} ({format_bytes(len(value))})"
    if tensor is None:
        try:
            return cut(printable(repr(value)), CELL_WIDTH)
        except RecursionError:
            return f"a deeply nested {type(value).__name__}"
    shape = shape_text(tensor)
    if tensor.numel() == 0 and tensor.ndim > 1:  # its list of lists could be long
        return f"{shape} empty"
    if tensor.numel() <= 6:
        return cut(repr(tensor.tolist()), CELL_WIDTH)
    if tensor.is_complex() or tensor.dtype is torch.bool:
        return shape if tensor.is_complex() else f"{shape} {int(tensor.sum()):,} true"
    wide = tensor.double()
    return f"{shape} {wide.min().item():.4g} to {wide.max().item():.4g}, mean {wide.mean().item():.4g}"


def shape_text(tensor: torch.Tensor) -> str:
    """Return the shape of a tensor as text: ``[3, 224, 224]``."""
    return f"[{', '.join(map(str, tensor.shape))}]"


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


MOST_SKIPPED = 20
LINE_WIDTH = 160
MOST_KEYS = 20


def manifest_lines(manifest: Manifest | None) -> Iterator[str]:
    """Yield the samples that were skipped, the classes and the metadata; nothing for a directory without a manifest."""
    if manifest is None:
        return
    if manifest.skipped:
        more = ", ..." if len(manifest.skipped) > MOST_SKIPPED else ""
        indices = ", ".join(map(str, manifest.skipped[:MOST_SKIPPED]))
        yield f"samples skipped: {len(manifest.skipped):,}, dataset indices {indices}{more}"
    if manifest.attributes and manifest.attributes.classes is not None:
        classes = manifest.attributes.classes
        yield f"classes: {len(classes):,}: {listed(classes, LINE_WIDTH)}"
    metadata = manifest.metadata or {}
    for key in list(metadata)[:MOST_KEYS]:
        yield f"metadata {cut(key, LINE_WIDTH)}: {brief(metadata[key], LINE_WIDTH)}"
    if len(metadata) > MOST_KEYS:
        yield f"metadata: {len(metadata) - MOST_KEYS:,} more keys"


ROWS = 3
SIDE = 112
"""Pixels of a thumbnail each way, at most."""
MOST_THUMBNAILS = 24
MOST_ROW_BYTES = 64 << 20
"""Larger rows are not read."""
ERROR_WIDTH = 300
NOT_THERE = element("span", "not there yet", "pale")
LEFT_OUT = element("span", "left out: the dataset raised", "pale")


def parts(view: View, rows: int = ROWS) -> Iterator[Html]:
    """Yield the parts of a page about a store, with its first ``rows``."""
    has_rows = view.backing.row_count is not None
    size = count_text(len(view), "row") if has_rows else "no rows"
    yield element("h1", f"Store: {size}, {count_text(len(view.schema), 'field')}")
    yield element("p", view.path, "pale")
    yield from (element("p", line) for line in _lines(view))
    stored = [_stored_field(view, number) for number in range(len(view.fields))]
    sizes = or_error(view.field_bytes)
    yield from _column_bars(stored, sizes)
    yield from or_error(lambda: list(_first_rows(view, min(rows, len(view))) if has_rows else _values(view)), [])


def manifest_parts(place: object, manifest: Manifest, sizes: Sequence[int]) -> Iterator[Html]:
    """Yield the parts of a page about a store of which only the manifest is at hand."""
    yield element("h1", f"Store: {count_text(manifest.rows, 'row')}, {count_text(len(manifest.schema), 'field')}")
    yield element("p", place, "pale")
    yield from (element("p", line) for line in manifest_lines(manifest))
    yield from _column_bars(manifest.schema.fields, sizes)
    yield element("p", "Its rows are not read from here: pull it, or open it with a cache directory.", "pale")


def _column_bars(stored: Sequence[Field], sizes: Sequence[int] | Html) -> Iterator[Html]:
    """Yield a bar for each column: its share of the bytes that all of them take."""
    yield element("h2", "Bytes on disk")
    if isinstance(sizes, Html):
        yield element("p", sizes)
        sizes = [0] * len(stored)
    total = max(sum(sizes), 1)
    for number, (field, size) in enumerate(zip(stored[:MOST_FIELDS], sizes, strict=False)):
        bar = [(f"s{number % SHADES}", size / total)]
        yield bar_row(_labelled(field), bar, f"{format_bytes(size)}, {size / total:.1%}")
    yield from more_fields(len(stored))
    yield element("p", f"{format_bytes(sum(sizes))} in all", "pale")


def _labelled(stored: Field) -> Html:
    """Return the name of a field, and below it what its values are and how they are stored."""
    form = "" if stored.coding is None else f", {stored.form_text}"
    below = element("span", f"{stored.decoded.describe()}{form}", "pale small")
    return joined([text(cut(stored.name, NAME_WIDTH)), below])


def or_error(make: Callable[[], Any], otherwise: Any = None) -> Any:
    """Return what ``make`` returns; if it raises, the error as `Html`, within ``otherwise`` if that is a list."""
    try:
        return make()
    except Exception as error:  # a page of a damaged store says what is damaged, beside what can be read
        message = element("span", f"{type(error).__name__}: {str(error)[:ERROR_WIDTH]}", "error")
        return message if otherwise is None else [*otherwise, element("p", message)]


def _stored_field(view: View, number: int) -> Field:
    """Return a field as its column stores it; as it is read, if the column cannot be opened."""
    found = or_error(lambda: view.backing.column(view.fields[number]).stored.field)
    return view.schema.fields[number] if isinstance(found, Html) else found


def _lines(view: View) -> Iterator[str]:
    """Yield what is known of the store beside its columns."""
    if view.backing.description:
        yield view.backing.description
    if not view.has_all_rows:
        yield f"a view of {count_text(view.base_length, 'row')}; the bytes are those of all of them"
    if view.supply is not None:
        found = view.progress()
        yield f"being filled: {found.present:,} of {count_text(found.total, 'row')} are there"
        if found.skipped:
            yield f"{count_text(found.skipped, 'row')} left out, because the dataset raised"
    yield from manifest_lines(view.manifest)


# --- rows


def _first_rows(view: View, count: int) -> Iterator[Html]:
    """Yield the first rows side by side."""
    if not count:
        return
    yield element("h2", "First rows")
    base_rows, lines = view.base_rows(np.arange(count)), []
    left_out = set(view.supply.skipped()) if view.supply is not None and view.backing.masks_rows else set()
    cells = _Cells()
    with view.present_now(base_rows) as present:
        for field, index in zip(view.schema.fields[:MOST_FIELDS], view.fields, strict=False):
            line = [
                cells.of(partial(_read_row, view, index, row)) if there else LEFT_OUT if row in left_out else NOT_THERE
                for row, there in zip(base_rows.tolist(), present.tolist(), strict=True)
            ]
            lines.append((cut(field.name, NAME_WIDTH), *line))
    yield table(("field", *(f"row {row:,}" for row in range(count))), lines, "text")
    yield from more_fields(len(view.schema))


def _values(view: View) -> Iterator[Html]:
    """Yield the one value of each field of a store without rows, such as the weights of a model."""
    yield element("h2", "Values")
    cells = _Cells()
    rows = []
    for field, index in zip(view.schema.fields[:MOST_FIELDS], view.fields, strict=False):
        rows.append((cut(field.name, NAME_WIDTH), cells.of(partial(lambda at: view.backing.column(at).whole, index))))
    yield table(("field", "value"), rows, "text")
    yield from more_fields(len(view.schema))


class _Cells:
    """The values of a table: a few of them with a thumbnail."""

    def __init__(self) -> None:
        self._thumbnails_left = MOST_THUMBNAILS

    def of(self, read: Callable[[], Any]) -> Html:
        """Return the value that ``read`` returns; `Html` stays as it is."""
        return or_error(lambda: self._of_value(read()))  # type: ignore[no-any-return]

    def _of_value(self, value: Any) -> Html:
        if isinstance(value, Html):
            return value
        if isinstance(value, torch.Tensor) and value.nbytes > MOST_ROW_BYTES:
            return text(f"{shape_text(value)}: {format_bytes(value.nbytes)}, not read here")
        found = thumbnail(value, SIDE) if self._thumbnails_left else None
        if found is None:
            return text(summary(value))
        self._thumbnails_left -= 1
        image = f'<img src="{found.uri}" width="{found.width}" height="{found.height}" alt="{shape_text(value)}">'
        return joined([Html(image), element("span", shape_text(value), "pale small")])


def _read_row(view: View, field_index: int, row: int) -> Any:
    """Return a row of the base store, which is there; of a large one only its size, as `Html`."""
    column, size = view.backing.column(field_index), 0
    if column.field.kind == "fixed":
        size = column.field.row_bytes
    elif column.layout == "ragged":
        size = int(column.locate(np.array([row])).lengths[0])
    if size > MOST_ROW_BYTES:
        return text(f"{column.field.describe()}: {format_bytes(size)}, not read here")
    return column.view_row(row)
