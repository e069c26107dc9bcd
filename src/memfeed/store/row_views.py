"""Read rows of columns one by one: copied, or as views of the map.

``reference`` is the slow, obviously right way to read the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from memfeed.errors import RowError
from memfeed.schema import codec
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import HEAP_OF_BYTES
from memfeed.schema.jagged import jagged_rows
from memfeed.store.columns import Column, ComputedColumn, FixedColumn, JsonColumn, RaggedRows


def read_row(column: Column, row: int) -> Any:
    """Return one row of a column as the sample had it, in new memory."""
    field = column.field
    if isinstance(column, FixedColumn):
        return codec.unpack(field, column.data[row].clone())
    if isinstance(column, JsonColumn):
        return column.values[row]
    if isinstance(column, ComputedColumn):
        out = torch.empty((1, *field.row_shape), dtype=field.torch_dtype, device="cpu")
        return codec.unpack(field, column.gather_into(np.array([row]), out)[0])
    value = _view_row(column, row)
    return codec.unpack(field, value.clone()) if isinstance(value, torch.Tensor) else value


def _view_row(column: RaggedRows, row: int) -> Any:
    """Return one row of a ragged column: a tensor that shares the memory of a map, or a decoded value, or None."""
    field = column.field
    located = column.locate(np.array([row]))
    if located.lengths[0] < 0:
        return None
    raw = column.view(int(located.starts[0]), int(located.lengths[0]))
    if field.kind in HEAP_OF_BYTES:
        return codec.decode_bytes(field, raw.numpy().tobytes())
    return raw.view(field.torch_dtype).view(located.dims[0, : len(field.shape)].tolist())


def reference(columns: Sequence[Column], rows: Sequence[int]) -> list[list[Any]]:
    """Read each column's rows one by one: every batch must equal this before it is stacked."""
    return [[read_row(column, row) for row in rows] for column in columns]


class RaggedView(Sequence[Any]):
    """The rows of a ragged column, each a view of the map (str, bytes and json: decoded)."""

    def __init__(self, column: Column, rows: Int64Array, owner: object) -> None:
        self._column, self._rows, self._owner = column, rows, owner  # a temporary store lives as long as its views

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return RaggedView(self._column, self._rows[which], self._owner)
        try:
            row = int(self._rows[which])
        except IndexError:
            raise RowError(f"found row {which}; expected at most {len(self) - 1}") from None
        column = self._column
        if isinstance(column, FixedColumn | ComputedColumn | JsonColumn):
            return read_row(column, row)
        return _view_row(column, row)


def sample_leaves(column: Column, leaf: Any) -> Iterable[Any]:
    """Split a batch's leaf of ``column`` into one value per sample."""
    form = column.field.form
    if isinstance(leaf, list):
        if form == "tensor":
            return leaf
        return [None if value is None else (value.item() if form == "scalar" else value.tolist()) for value in leaf]
    if form == "scalar":
        numbers: list[Any] = leaf.tolist()
        return numbers
    rows = jagged_rows(leaf) if leaf.is_nested else list(leaf.unbind(0))
    return rows if form == "tensor" else [row.tolist() for row in rows]
