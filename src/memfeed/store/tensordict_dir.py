"""Any directory that `TensorDict.memmap()` wrote, as the fields and columns of a store: train from it at once.

`memfeed.store.tensordict_layout` reads and checks the directory; this module says what its entries are to a store.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from memfeed.errors import StoreError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field, Kind, Node, Schema, display
from memfeed.schema.fields import Path as FieldPath
from memfeed.store import tensordict_layout as layout
from memfeed.store.columns import Column, FixedColumn, JoinedFixed, Pieces, RaggedColumn, Values
from memfeed.store.format import MOST_EMPTY_ROWS


class Foreign(NamedTuple):
    """What ``read`` found: like a manifest, with the columns. ``rows`` is None for batch_size []."""

    schema: Schema
    rows: int | None
    digest: str
    columns: tuple[Column, ...]

    def column(self, number: int) -> Column:
        """The column of a field."""
        return self.columns[number]


class NestedColumn(RaggedColumn):
    """A strided nested tensor as tensordict saves it: all rows in one file, their dims in another (read already)."""

    def __init__(self, field: Field, file: Path, dims: Int64Array) -> None:
        elements = dims.prod(axis=1)
        super().__init__(field, file, len(dims), int(elements.sum()) * field.itemsize)
        self.start, self.dims = torch.from_numpy(np.cumsum(elements) - elements), torch.from_numpy(dims)

    @property
    def heap_path(self) -> Path:
        """The file that holds the bytes of all rows."""
        return self.path


def column_bytes(column: Column) -> int:
    """Bytes on disk of a column; values that tensordict keeps in its metadata count as none."""
    if isinstance(column, FixedColumn):
        return (1 if column.rows is None else column.rows) * column.field.row_bytes
    if isinstance(column, Values):
        return 0
    if isinstance(column, JoinedFixed):
        return column.rows * column.field.row_bytes
    return int(column.extents(np.arange(column.rows))[1].sum())


def whole_column(column: Column) -> Any:
    """What a batch of all rows has for this column: without a copy for one tensor in one file, else in new memory."""
    if isinstance(column, FixedColumn):
        return column.data
    if isinstance(column, Values):
        return column.values
    field = column.field
    if isinstance(column, JoinedFixed):
        out = torch.empty((column.rows, *field.row_shape), dtype=field.torch_dtype)
        return column.select(np.arange(column.rows), out)
    starts, lengths, dims = column.extents(np.arange(column.rows))
    raw = torch.empty(int(lengths.sum()), dtype=torch.uint8)
    column.copy(starts, lengths, raw.numpy())  # read, not mapped: a process may have 65,530 maps, a stack more pieces
    flat = raw.view(field.torch_dtype)
    if field.kind == "fixed":
        return flat.view(column.rows, *field.row_shape)
    if field.kind == "list":
        parts = torch.split(flat, (lengths // field.itemsize).tolist())
        return [part.view(shape) for part, shape in zip(parts, dims.tolist(), strict=True)]
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(dims[:, 0])]))
    return torch.nested.nested_tensor_from_jagged(flat.view(int(offsets[-1]), *field.row_shape), offsets)


def read(root: Path) -> Foreign:
    """The fields and columns of a directory written by `TensorDict.memmap()` or a tensorclass's.

    Raises StoreError for what is refused (pickles, symbolic links, the layout of before meta.json, a lazy stack along
    another dim than the first, a dtype no column can have), CorruptStoreError for files that are not what the
    metadata says.
    """
    reader = layout.Reader(root)
    top = reader.directory(root, 0)
    if not isinstance(top, layout.Group):
        raise StoreError(f"{root}: found {layout.KINDS[type(top)]}; expected a TensorDict: save it inside one")
    rows = top.batch[0] if top.batch else None
    planner = _Planner(rows)
    structure = planner.node(top, ())
    if not planner.columns:
        raise StoreError(f"{root}: found no tensor in it; expected at least one field")
    if (rows or 0) > MOST_EMPTY_ROWS and not any(map(column_bytes, planner.columns)):
        raise StoreError(
            f"{root}: found {rows:,} rows in no byte at all; expected at most {MOST_EMPTY_ROWS:,} of those"
        )
    schema = Schema(fields=tuple(column.field for column in planner.columns), structure=structure)
    return Foreign(schema, rows, reader.hash.hexdigest(), tuple(planner.columns))


class _Planner:
    """Makes the structure of a sample, and the columns in the order of its leaves."""

    def __init__(self, rows: int | None) -> None:
        self._rows = rows
        self._lengths: dict[bytes, int] = {}
        self.columns: list[Column] = []

    def node(self, entry: layout.Entry, path: FieldPath) -> Node:
        if isinstance(entry, layout.Shared):
            return Node(kind="shared", value=entry.value)
        if isinstance(entry, layout.Group):
            return Node(
                kind=entry.kind,
                name=entry.name,
                keys=tuple(entry.children),
                children=tuple(self.node(child, (*path, key)) for key, child in entry.children.items()),
                batch_dims=len(entry.batch) - 1,  # of one sample; -1 where the whole directory has no batch dim
            )
        self.columns.append(self._column(entry, path))
        return Node(kind="leaf")

    def _column(self, entry: layout.Tensor | layout.Nested | layout.Pieces | layout.PerRow, path: FieldPath) -> Column:
        def field(kind: Kind, dtype: str, shape: tuple[int | None, ...] = ()) -> Field:
            number = len(self.columns)
            return Field(path=path, name=display(path), stem=f"c{number}", kind=kind, dtype=dtype, shape=shape)

        if isinstance(entry, layout.PerRow):
            kind: Kind = "str" if all(isinstance(value, str) for value in entry.values) else "json"
            return Values(field(kind, "uint8"), entry.values)
        if isinstance(entry, layout.Tensor):
            shape = entry.shape if self._rows is None else entry.shape[1:]
            return FixedColumn(field("fixed", entry.dtype, shape), entry.file, self._rows)
        if isinstance(entry, layout.Nested):
            return NestedColumn(self._ragged(field, entry.dtype, entry.dims, True), entry.file, entry.dims)
        shapes = [tensor.shape for tensor in entry.tensors]
        dims = np.array(shapes, np.int64).reshape(len(shapes), len(shapes[0]))
        ragged = self._ragged(field, entry.tensors[0].dtype, dims, False)
        return Pieces(ragged, [tensor.file for tensor in entry.tensors], shapes)

    def _ragged(self, field: Callable[..., Field], dtype: str, dims: Int64Array, nested: bool) -> Field:
        """As for a dataset's leaf: jagged if only the leading dim varies, a list if others do; equal pieces stack."""
        first = dims[0].tolist() if len(dims) else [0] * dims.shape[1]
        varying = {axis for axis, size in enumerate(first) if (dims[:, axis] != size).any()}
        if not varying and not nested:
            return field("fixed", dtype, tuple(first))
        if varying - {0}:
            return field("list", dtype, (None,) * len(first))
        group = self._lengths.setdefault(dims[:, 0].tobytes(), len(self.columns))
        return msgspec.structs.replace(field("jagged", dtype, (None, *first[1:])), lengths_of=group)
