"""The positions of an epoch that each rank reads at each step: arithmetic alone.

The global batch of a step is ``batch_size * world_size`` consecutive positions; rank r reads the r-th slice of it. So a
step reads the same rows for any number of ranks with the same global batch, and a position in the epoch is one number:
how many rows all ranks together have read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


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

    The rows left at the end, fewer than a global batch, are shared out so that ranks differ by at most one row (some
    may get none), or dropped (``drop_last``), or filled up with positions beyond the end (``pad_last``).
    """

    rows: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    pad_last: bool = False

    @property
    def stride(self) -> int:
        """The number of rows that all ranks read together at a step."""
        return self.batch_size * self.world_size

    def end(self, row: int = 0) -> int:
        """Return the row where an epoch that begins (or resumes) at ``row`` ends."""
        return self.rows - (self.rows - row) % self.stride if self.drop_last else self.rows

    def count(self, row: int = 0) -> int:
        """Return the number of steps from ``row`` to the end at which this rank gets a batch."""
        full, left = divmod(max(self.rows - row, 0), self.stride)
        if self.drop_last or not left:
            return full
        return full + (self.pad_last or self.rank < left)

    def runs(self, row: int, most: int) -> Iterator[StepRun]:
        """Yield the steps from ``row`` on, at most ``most`` at a time; the last by itself if it differs."""
        while (full := (self.rows - row) // self.stride) > 0:
            count = min(full, most)
            yield StepRun(row, row + self.rank * self.batch_size, self.batch_size, count, self.stride)
            row += count * self.stride
        left = self.rows - row
        if left and self.pad_last:
            yield StepRun(row, row + self.rank * self.batch_size, self.batch_size, 1, self.stride)
        elif left and not self.drop_last:
            size, more = divmod(left, self.world_size)
            mine = size + (self.rank < more)
            if mine:
                yield StepRun(row, row + self.rank * size + min(self.rank, more), mine, 1, self.stride)
