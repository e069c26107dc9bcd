"""Read rows of columns one by one: copied, or as views of the map.

``reference`` is the slow, obviously right way to read the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memfeed.errors import RowError
from memfeed.schema.codec import Int64Array
from memfeed.store.column import Column


def reference(columns: Sequence[Column], rows: Sequence[int]) -> list[list[Any]]:
    """Read each column's rows one by one: every batch must equal this before it is stacked."""
    return [[column.read_row(row) for row in rows] for column in columns]


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
        return self._column.view_row(row)
