"""Single rows: of a ragged column without a copy, and of a gathered batch as the leaves of its samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from memfeed.errors import RowError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import HEAP_OF_BYTES
from memfeed.store.columns import Column, ConcatFixedColumn, FixedColumn, JsonColumn
from memfeed.store.gather import read_row


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
        if isinstance(column, FixedColumn | ConcatFixedColumn | JsonColumn) or column.field.kind in HEAP_OF_BYTES:
            return read_row(column, row)
        starts, lengths, dims = column.locate(np.array([row]))
        if lengths[0] < 0:
            return None
        shape = dims[0, : len(column.field.shape)].tolist()
        return column.view(int(starts[0]), int(lengths[0])).view(column.field.torch_dtype).view(shape)


def sample_leaves(column: Column, leaf: Any) -> Iterable[Any]:
    """Split a batch's leaf of ``column`` into one value per sample."""
    form = column.field.form
    if isinstance(leaf, list):
        if form == "tensor":
            return leaf
        return [None if value is None else (value.item() if form == "scalar" else value.tolist()) for value in leaf]
    if form == "tensor":
        return list(leaf.unbind(0))
    return leaf.tolist() if form == "scalar" else [row.tolist() for row in leaf.unbind(0)]
