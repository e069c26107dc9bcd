"""Open any directory that `TensorDict.memmap()` wrote as the fields and columns of a store.

`memfeed.store.tensordict_layout` reads and checks the directory; this module turns its entries into columns.
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
from memfeed.store.columns import (
    Column,
    ComputedColumn,
    ConcatFixedColumn,
    FilePerRowColumn,
    FixedColumn,
    JsonColumn,
    RaggedColumn,
)
from memfeed.store.gather import Gather
from memfeed.store.manifest import MOST_EMPTY_ROWS
from memfeed.store.ragged import RaggedFiles, consecutive_starts, element_counts
from memfeed.system.buffers import Fresh


class Contents(NamedTuple):
    """The schema and columns of a directory. ``row_count`` is None for batch_size []."""

    schema: Schema
    row_count: int | None
    digest: str
    columns: tuple[Column, ...]


class NestedColumn(RaggedColumn):
    """A strided nested tensor as tensordict saves it: all rows in one file. The dims were read at opening."""

    def __init__(self, field: Field, file: Path, dims: Int64Array) -> None:
        counts = element_counts(dims)
        # start and dims are set here, so only the path of the heap is used
        super().__init__(field, RaggedFiles(file, file, file), len(dims), int(counts.sum()) * field.itemsize)
        self.start, self.dims = torch.from_numpy(consecutive_starts(counts, 0)), torch.from_numpy(dims)


def column_bytes(column: Column) -> int:
    """Return the bytes on disk of a column; values that tensordict keeps in its metadata count as 0."""
    if isinstance(column, FixedColumn | ConcatFixedColumn | ComputedColumn):
        return (1 if column.row_count is None else column.row_count) * column.field.row_bytes
    if isinstance(column, JsonColumn):
        return 0
    return int(column.locate(np.arange(column.row_count))[1].sum())


def all_rows(column: Column) -> Any:
    """Return a column's leaf of the batch of all rows: without a copy for a fixed column, else in new memory."""
    if isinstance(column, FixedColumn):
        return column.data
    if isinstance(column, JsonColumn):
        return column.values
    # Gather reads and does not map: a process may have 65,530 maps, and a stack more files
    return Gather([column], [Fresh()])(np.arange(column.row_count))[0]


def read(root: Path) -> Contents:
    """Read the fields and columns of a directory written by `TensorDict.memmap()` or that of a tensorclass.

    Raises StoreError for contents that are refused (pickles, symbolic links, the layout older than meta.json, a lazy
    stack along another dim than the first, a dtype that no column can have), CorruptStoreError for files that differ
    from the metadata.
    """
    reader = layout.Reader(root)
    top = reader.directory(root, 0)
    if not isinstance(top, layout.Group):
        raise StoreError(f"{root}: found {layout.DESCRIPTIONS[type(top)]}; expected a TensorDict: save it inside one")
    row_count = top.batch[0] if top.batch else None
    planner = _Planner(row_count)
    structure = planner.node(top, ())
    if not planner.columns:
        raise StoreError(f"{root}: found no tensor in it; expected at least one field")
    if (row_count or 0) > MOST_EMPTY_ROWS and not any(map(column_bytes, planner.columns)):
        raise StoreError(
            f"{root}: found {row_count:,} rows in no byte at all; expected at most {MOST_EMPTY_ROWS:,} of those"
        )
    schema = Schema(fields=tuple(column.field for column in planner.columns), structure=structure)
    return Contents(schema, row_count, reader.hash.hexdigest(), tuple(planner.columns))


class _Planner:
    """Builds the structure of a sample, and the columns in the order of its leaves."""

    def __init__(self, row_count: int | None) -> None:
        self._row_count = row_count
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
                batch_dims=len(entry.batch) - 1,  # of one sample; -1 if the whole directory has no batch dim
            )
        self.columns.append(self._column(entry, path))
        return Node(kind="leaf")

    def _column(self, entry: layout.LeafEntry, path: FieldPath) -> Column:
        def field(kind: Kind, dtype: str, shape: tuple[int | None, ...] = ()) -> Field:
            stem = f"c{len(self.columns)}"
            return Field(path=path, name=display(path), stem=stem, kind=kind, dtype=dtype, shape=shape)

        if isinstance(entry, layout.PerRow):
            kind: Kind = "str" if all(isinstance(value, str) for value in entry.values) else "json"
            return JsonColumn(field(kind, "uint8"), entry.values)
        if isinstance(entry, layout.Tensor):
            shape = entry.shape if self._row_count is None else entry.shape[1:]
            return FixedColumn(field("fixed", entry.dtype, shape), entry.file, self._row_count)
        if isinstance(entry, layout.Nested):
            return NestedColumn(self._ragged(field, entry.dtype, entry.dims, True), entry.file, entry.dims)
        shapes = [tensor.shape for tensor in entry.tensors]
        dims = np.array(shapes, np.int64).reshape(len(shapes), len(shapes[0]))
        ragged = self._ragged(field, entry.tensors[0].dtype, dims, False)
        return FilePerRowColumn(ragged, [tensor.file for tensor in entry.tensors], shapes)

    def _ragged(self, field: Callable[..., Field], dtype: str, dims: Int64Array, nested: bool) -> Field:
        """Choose the kind as for a dataset's leaf: fixed, jagged if only the first dim varies, a list if others do."""
        first = dims[0].tolist() if len(dims) else [0] * dims.shape[1]
        varying = {axis for axis, size in enumerate(first) if (dims[:, axis] != size).any()}
        if not varying and not nested:
            return field("fixed", dtype, tuple(first))
        if varying - {0}:
            return field("list", dtype, (None,) * len(first))
        group = self._lengths.setdefault(dims[:, 0].tobytes(), len(self.columns))
        return msgspec.structs.replace(field("jagged", dtype, (None, *first[1:])), lengths_of=group)
