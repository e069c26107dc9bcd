"""Windows over rows: for each row, the rows around it in its episode, as columns that are made when they are read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field
from memfeed.store.columns import Column, ComputedColumn, ConcatFixedColumn, gather_rows


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

    def __init__(self, field: Field, base: Column, row_count: int, offsets: Int64Array, episodes: Episodes) -> None:
        super().__init__(field, row_count)
        self.base, self.offsets, self.episodes = base, offsets, episodes

    def base_rows(self, rows: Int64Array) -> Int64Array:
        """Return the rows of ``base`` that ``rows`` (int [k]) are made of, int64 [k, steps]."""
        return self.episodes.window_rows(rows, self.offsets)

    def gather_into(self, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """See ``ComputedColumn.gather_into``."""
        return self.gather_windows(self.base_rows(rows), out)

    def gather_windows(self, base_rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """Write windows of ``base_rows`` (int64 [k, steps]) into ``out``, as ``gather_into`` does."""
        gather_rows(self.base, base_rows.ravel(), out.view(-1, *out.shape[2:]))
        return out

    def over(self, base: Column) -> WindowColumn:
        """Return the same windows over another column of the same rows."""
        return WindowColumn(self.field, base, self.row_count, self.offsets, self.episodes)


class MaskColumn(ComputedColumn):
    """Which steps of a window are rows of the episode, bool [steps] for each row. Kept nowhere."""

    in_memory = True

    def __init__(self, field: Field, row_count: int, offsets: Int64Array, episodes: Episodes) -> None:
        super().__init__(field, row_count)
        self.offsets, self.episodes = offsets, episodes

    def gather_into(self, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """See ``ComputedColumn.gather_into``."""
        return out.copy_(torch.from_numpy(self.episodes.exist(rows, self.offsets)))


def offsets_of(column: Column) -> list[int] | None:
    """Return the offsets of a column of windows or of their mask; None for any other column."""
    return column.offsets.tolist() if isinstance(column, WindowColumn | MaskColumn) else None


def join_windows(columns: Sequence[Column]) -> Column | None:
    """Return the columns of several stores, all of windows or all of masks, as one; None for other columns."""
    first = columns[0]
    if isinstance(first, WindowColumn):
        windows = [column for column in columns if isinstance(column, WindowColumn)]
        bases = [one.base for one in windows]
        base = ConcatFixedColumn(bases[0].field, bases)
        return WindowColumn(first.field, base, base.row_count, first.offsets, _join_episodes(windows))
    if isinstance(first, MaskColumn):
        masks = [column for column in columns if isinstance(column, MaskColumn)]
        return MaskColumn(first.field, sum(one.row_count for one in masks), first.offsets, _join_episodes(masks))
    return None


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
