"""A column of a table: a sequence of rows that is read in runs, from chunks in memory or in files."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from memfeed.errors import RowError
from memfeed.schema.fields import Kind


class TableColumn:
    """The rows of one column. Slices are read from chunks; of chunks in files, the last one is kept.

    Args:
        name: how messages name the column.
        lengths: the rows of each chunk; at least one chunk.
        load: returns chunk ``i``, which can be sliced.
        convert: makes the rows of a slice: an array [rows, ...] if the column is plain, else a list.
        is_plain: all rows have one dtype and shape, and none is None.
        is_lazy: chunks come from files, so that a loader cannot read the column in place.
        kind: "json" for values that are JSON whatever the first rows look like; None lets the rows decide.
        find_telling_rows: finds rows that show what others may not: one with a value, one without.
    """

    def __init__(
        self,
        name: str,
        lengths: Sequence[int],
        load: Callable[[int], Any],
        convert: Callable[[Any], Any],
        *,
        is_plain: bool,
        is_lazy: bool = False,
        kind: Kind | None = None,
        find_telling_rows: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self.name, self.is_plain, self.is_lazy, self.kind = name, is_plain, is_lazy, kind
        self.find_telling_rows = find_telling_rows
        self._starts, self._load, self._convert = [0, *accumulate(lengths)], load, convert
        self._kept: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            start, stop, step = which.indices(len(self))
            return self.read(start, max(start, stop)) if step == 1 else self[list(range(start, stop, step))]
        if isinstance(which, list):
            rows = [self[row] for row in which]
            return np.stack(rows) if self.is_plain and rows else self.read(0, 0) if self.is_plain else rows
        row = operator.index(which)
        if not -len(self) <= row < len(self):
            raise RowError(f"column {self.name}: found row {row}; expected {-len(self)} to {len(self) - 1}")
        row %= len(self)
        return self.read(row, row + 1)[0]

    def read(self, start: int, stop: int) -> Any:
        """Return rows ``start`` to ``stop``: an array if the column is plain, else a list."""
        at, parts = start, list[Any]()
        index = bisect.bisect_right(self._starts, start, hi=len(self._starts) - 1) - 1
        while at < stop or not parts:
            begin, end = self._starts[index : index + 2]
            parts.append(self._convert(self._chunk(index)[at - begin : min(stop, end) - begin]))
            at, index = end, index + 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if self.is_plain else [value for part in parts for value in part]

    def addresses(self) -> list[int]:
        """Return where the array, or the Arrow buffers, of the first chunk are in memory."""
        chunk = None if self.is_lazy else self._load(0)
        if isinstance(chunk, np.ndarray):
            return [chunk.__array_interface__["data"][0]]
        buffers: list[Any] = getattr(chunk, "buffers", list)()
        return [buffer.address for buffer in buffers if buffer is not None and buffer.size]

    def _chunk(self, index: int) -> Any:
        if not self.is_lazy:
            return self._load(index)
        at, chunk = self._kept
        if at != index:
            chunk = self._load(index)
            self._kept = (index, chunk)
        return chunk
