"""The positions of an epoch that each rank reads at each step: arithmetic alone.

The global batch of a step is ``batch_size * world_size`` consecutive positions; rank r reads the r-th slice of it. So a
step reads the same rows for any number of ranks with the same global batch, and a position in the epoch is one number:
how many rows all ranks together have read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

LastRows = Literal["repeat", "uneven", "drop", "pad"]
"""What ranks do with the rows left at the end of an epoch, which are fewer than a global batch."""


class StepRun(NamedTuple):
    """Consecutive steps that are alike.

    At step j of ``steps`` this rank reads ``size`` positions from ``start + j * stride``; then all ranks together have
    read ``row + (j + 1) * stride`` rows (at most n).
    """

    row: int
    start: int
    size: int
    steps: int
    stride: int


@dataclass(frozen=True)
class RankShards:
    """The share of each rank in an epoch of ``rows``.

    Args:
        rows: rows of the epoch.
        batch_size: rows of a batch of one rank.
        rank, world_size: which share this is, of how many.
        last: what becomes of the rows left at the end, fewer than a global batch. "repeat": every rank gets the same
            number of them, filled up with positions beyond the end (which stand for the first rows of the epoch).
            "uneven": ranks differ by at most one row, and some may get none. "drop": they are left out. "pad": every
            rank gets a whole batch, filled up with positions beyond the end.
    """

    rows: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    last: LastRows = "repeat"

    @property
    def stride(self) -> int:
        """The number of rows that all ranks read together at a step."""
        return self.batch_size * self.world_size

    def end(self, row: int = 0) -> int:
        """Return the row where an epoch that begins (or resumes) at ``row`` ends."""
        return self.rows - (self.rows - row) % self.stride if self.last == "drop" else self.rows

    def count(self, row: int = 0) -> int:
        """Return the number of steps from ``row`` to the end at which this rank gets a batch."""
        full, left = divmod(max(self.rows - row, 0), self.stride)
        if self.last == "drop" or not left:
            return full
        return full + (self.last != "uneven" or self.rank < left)

    def runs(self, row: int, most: int) -> Iterator[StepRun]:
        """Yield the steps from ``row`` on, at most ``most`` at a time; the last by itself if it differs."""
        while (full := (self.rows - row) // self.stride) > 0:
            count = min(full, most)
            yield StepRun(row, row + self.rank * self.batch_size, self.batch_size, count, self.stride)
            row += count * self.stride
        left = self.rows - row
        if left <= 0 or self.last == "drop":
            return
        size, more = divmod(left, self.world_size)
        if self.last == "uneven":
            mine, start = size + (self.rank < more), row + self.rank * size + min(self.rank, more)
        else:
            mine = self.batch_size if self.last == "pad" else size + (more > 0)
            start = row + self.rank * mine
        if mine:
            yield StepRun(row, start, mine, 1, self.stride)

    @property
    def repeated(self) -> int:
        """The number of rows that are read a second time at the end of an epoch."""
        return -self.rows % self.world_size if self.last == "repeat" else 0
