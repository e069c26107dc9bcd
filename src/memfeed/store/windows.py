"""Windows over rows: for each row, the rows around it in its episode, as columns that are made when they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field
from memfeed.store.columns import Column, ComputedColumn, ConcatFixedColumn, FileRows


class Episodes:
    """The rows of a store as sequences, one after the other.

    Args:
        starts: the position at which each begins, int64 [e], ascending.
        row_count: the number of positions.
        rows: the row of the base store at each position, int64 [row_count]; None where that is the position itself.
    """

    def __init__(self, starts: Int64Array, row_count: int, rows: Int64Array | None) -> None:
        self.starts, self.ends, self.rows = starts, np.append(starts[1:], row_count), rows
        self._held: tuple[Int64Array, tuple[Int64Array, Int64Array, Int64Array]] | None = None
        self._sorter = self._sorted = rows
        if rows is not None:
            self._sorter = np.argsort(rows, kind="stable")
            self._sorted = rows[self._sorter]

    def _bounds(self, rows: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return the position of each row, and the first and last position of its episode, int64 [k, 1] each.

        They are kept, because all columns of a batch ask for the same rows.
        """
        held = self._held
        if held is not None and np.array_equal(held[0], rows):  # a caller may fill one array again and again
            return held[1]
        at = rows
        if self._sorter is not None:
            at = self._sorter[np.searchsorted(self._sorted, rows)]  # type: ignore[arg-type]
        episode = np.searchsorted(self.starts, at, side="right") - 1
        found = at[:, None], self.starts[episode][:, None], self.ends[episode][:, None] - 1
        self._held = rows.copy(), found
        return found

    def window_rows(self, rows: Int64Array, offsets: Int64Array) -> Int64Array:
        """Return the rows at ``offsets`` [s] from ``rows`` [k], int64 [k, s]; beyond an episode its first or last."""
        at, first, last = self._bounds(rows)
        found = at + offsets
        np.maximum(found, first, out=found)  # half the time of np.clip
        np.minimum(found, last, out=found)
        return found if self.rows is None else self.rows[found]

    def exist(self, rows: Int64Array, offsets: Int64Array) -> npt.NDArray[np.bool_]:
        """Return True where the row at an offset is in the episode, bool [k, s]."""
        at, first, last = self._bounds(rows)
        found = at + offsets
        return (found >= first) & (found <= last)

    def complete_rows(self, lowest: int, highest: int) -> Int64Array:
        """Return the rows that have a row at each offset from ``lowest`` to ``highest``, in order."""
        firsts = np.minimum(self.starts - min(lowest, 0), self.ends)
        counts = np.maximum(self.ends - max(highest, 0) - firsts, 0)
        at = np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        return at if self.rows is None else self.rows[at]

    def rows_with(self, rows: Int64Array) -> Int64Array:
        """Return all rows of the episodes in which some of ``rows`` are, ascending."""
        at = self._bounds(rows)[1].ravel()
        chosen = np.isin(self.starts, at)
        firsts, counts = self.starts[chosen], (self.ends - self.starts)[chosen]
        at = np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        return at if self.rows is None else np.sort(self.rows[at])


class WindowColumn(ComputedColumn):
    """The rows of a column around each row: row i is [steps, *shape], the rows at ``offsets`` from row i."""

    offsets: Int64Array

    def __init__(self, field: Field, base: Column, row_count: int, offsets: Int64Array, episodes: Episodes) -> None:
        super().__init__(field, row_count)
        self._base, self.offsets, self.episodes = base, offsets, episodes

    @property
    def base(self) -> Column:
        """See ``Column.base``."""
        return self._base

    @property
    def nbytes(self) -> int:
        """The bytes of the base."""
        return self.base.nbytes

    @property
    def kept_in(self) -> str:
        """The place of the base."""
        return self.base.kept_in

    def base_rows(self, rows: Int64Array) -> Int64Array:
        """See ``Column.base_rows``."""
        return self.episodes.window_rows(rows, self.offsets)

    def rows_needed(self, rows: Int64Array) -> Int64Array:
        """Return all rows of the episodes of ``rows``."""
        return self.episodes.rows_with(rows)

    def gather_into(self, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """See ``Column.gather_into``."""
        return self.gather_windows(self.base_rows(rows), out)

    def gather_windows(self, base_rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """See ``Column.gather_windows``."""
        self.base.gather_into(base_rows.ravel(), out.view(-1, *out.shape[2:]))
        return out

    def over(self, base: Column) -> WindowColumn:
        """See ``Column.over``."""
        return WindowColumn(self.field, base, self.row_count, self.offsets, self.episodes)

    def files(self, begin: int = 0) -> Iterator[FileRows]:
        """See ``Column.files``."""
        return (replace(part, base_rows=self.base_rows, shares_pages=True) for part in self.base.files(begin))

    def placed_bytes(self, rows: Int64Array | None) -> int | None:
        """See ``Column.placed_bytes``."""
        return self.base.placed_bytes(None if rows is None else self.rows_needed(rows))

    def joined(self, field: Field, columns: Sequence[Any]) -> Column:
        """See ``Column.joined``."""
        base = ConcatFixedColumn(self.base.field, [one.base for one in columns])
        return WindowColumn(self.field, base, base.row_count, self.offsets, _join_episodes(columns))


class MaskColumn(ComputedColumn):
    """The mask of each window, bool [steps]: True for a step that is a row of the episode. It is computed."""

    offsets: Int64Array
    in_memory = True
    nbytes = 0
    why_mapped = "made of row numbers"

    def __init__(self, field: Field, row_count: int, offsets: Int64Array, episodes: Episodes) -> None:
        super().__init__(field, row_count)
        self.offsets, self.episodes = offsets, episodes

    def gather_into(self, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """See ``Column.gather_into``."""
        return out.copy_(torch.from_numpy(self.episodes.exist(rows, self.offsets)))

    def joined(self, field: Field, columns: Sequence[Any]) -> Column:
        """See ``Column.joined``."""
        count = sum(one.row_count for one in columns)
        return MaskColumn(self.field, count, self.offsets, _join_episodes(columns))


def _join_episodes(columns: Sequence[WindowColumn | MaskColumn]) -> Episodes:
    """Return the episodes of the stores of ``columns``, whose rows come in turn."""
    counts = [int(one.episodes.ends[-1]) if len(one.episodes.ends) else 0 for one in columns]
    ats = np.cumsum([0, *counts])
    starts = np.concatenate([one.episodes.starts + at for one, at in zip(columns, ats, strict=False)])
    if all(one.episodes.rows is None for one in columns):
        return Episodes(starts, int(ats[-1]), None)
    begins = np.cumsum([0, *(one.row_count for one in columns)])
    rows = [
        begin + (np.arange(count) if one.episodes.rows is None else one.episodes.rows)
        for one, begin, count in zip(columns, begins, counts, strict=False)
    ]
    return Episodes(starts, int(ats[-1]), np.concatenate(rows))
