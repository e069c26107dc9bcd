"""Turn the entries of a TensorDict, on disk or in memory, into the fields and columns of a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from memfeed.errors import StoreError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field, Kind, Node, Schema, display
from memfeed.schema.fields import Path as FieldPath
from memfeed.store import tensordict_entries as entries
from memfeed.store.column import Column
from memfeed.store.columns import FixedColumn, InMemoryColumn, JsonColumn
from memfeed.store.ragged_columns import NestedColumn, SeparateRowsColumn


class Contents(NamedTuple):
    """The schema and columns of a TensorDict. ``row_count`` is None for batch_size [].

    ``left_out`` says for each entry that is not read where it is and why.
    """

    schema: Schema
    row_count: int | None
    columns: tuple[Column, ...]
    left_out: tuple[str, ...]


def contents_of(top: entries.Group) -> Contents:
    """Return the fields and columns of a TensorDict. Raises StoreError if there is no column in it."""
    row_count = top.batch[0] if top.batch else None
    planner = _Planner(row_count)
    structure = planner.node(top, ())
    if not planner.columns:
        left_out = f" besides what cannot be read ({', '.join(planner.left_out)})" if planner.left_out else ""
        raise StoreError(f"found no tensor in it{left_out}; expected at least one field")
    schema = Schema(fields=tuple(column.field for column in planner.columns), structure=structure)
    return Contents(schema, row_count, tuple(planner.columns), tuple(planner.left_out))


class _Planner:
    """Builds the structure of a sample, and the columns in the order of its leaves."""

    def __init__(self, row_count: int | None) -> None:
        self._row_count = row_count
        self._lengths: dict[bytes, int] = {}
        self.columns: list[Column] = []
        self.left_out: list[str] = []

    def node(self, entry: entries.Entry, path: FieldPath) -> Node:
        if isinstance(entry, entries.Shared | entries.Unbatched):
            return Node(kind="shared", value=entry.value)
        if isinstance(entry, entries.Group):
            children = {}
            for key, child in entry.children.items():
                if isinstance(child, entries.LeftOut):
                    self.left_out.append(f"{display((*path, key))}: {child.why}")
                else:
                    children[key] = self.node(child, (*path, key))
            return Node(
                kind=entry.kind,
                name=entry.name,
                keys=tuple(children),
                children=tuple(children.values()),
                batch_dims=len(entry.batch) - 1,  # of one sample; -1 if the whole directory has no batch dim
                dim_names=entry.dim_names if any(entry.dim_names) else (),
            )
        assert not isinstance(entry, entries.LeftOut)
        self.columns.append(self._column(entry, path))
        return Node(kind="leaf")

    def _column(self, entry: entries.LeafEntry, path: FieldPath) -> Column:
        def field(kind: Kind, dtype: str, shape: tuple[int | None, ...] = ()) -> Field:
            stem = f"c{len(self.columns)}"
            return Field(path=path, name=display(path), stem=stem, kind=kind, dtype=dtype, shape=shape)

        if isinstance(entry, entries.PerRow):
            kind: Kind = "str" if all(isinstance(value, str) for value in entry.values) else "json"
            return JsonColumn(field(kind, "uint8"), entry.values)
        if isinstance(entry, entries.Tensor):
            shape = entry.shape if self._row_count is None else entry.shape[1:]
            fixed = field("fixed", entry.dtype, shape)
            if isinstance(entry.data, torch.Tensor):
                return InMemoryColumn(fixed, entry.data)
            return FixedColumn(fixed, entry.data, self._row_count)
        if isinstance(entry, entries.Nested):
            return NestedColumn(self._ragged(field, entry.dtype, entry.dims, True), entry.data, entry.dims)
        shapes = [tensor.shape for tensor in entry.tensors]
        dims = np.array(shapes, np.int64).reshape(len(shapes), len(shapes[0]))
        ragged = self._ragged(field, entry.tensors[0].dtype, dims, False)
        return SeparateRowsColumn(ragged, [tensor.data for tensor in entry.tensors], shapes)

    def _ragged(self, field: Callable[..., Field], dtype: str, dims: Int64Array, nested: bool) -> Field:
        """Choose the kind as for a dataset's leaf: fixed, jagged if one dim varies, a list if several do."""
        first = dims[0].tolist() if len(dims) else [0] * dims.shape[1]
        varying = [axis for axis, size in enumerate(first) if (dims[:, axis] != size).any()]
        if not varying and not nested:
            return field("fixed", dtype, tuple(first))
        if len(varying) > 1:
            return field("list", dtype, (None,) * len(first))
        ragged_dim = varying[0] if varying else 0
        group = self._lengths.setdefault(dims[:, ragged_dim].tobytes(), len(self.columns))
        shape = tuple(None if axis == ragged_dim else size for axis, size in enumerate(first))
        return msgspec.structs.replace(field("jagged", dtype, shape), lengths_of=group)
