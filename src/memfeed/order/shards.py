"""Which positions of an epoch each rank reads at each step: arithmetic alone.

The global batch of a step is ``batch_size * world_size`` consecutive positions; rank r reads the r-th slice of it. So a
step is the same rows for any number of ranks with the same global batch, and a place in the epoch is one number: how
many rows all ranks together have read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Run(NamedTuple):
    """Steps that follow each other and are alike.

    At step j of ``steps`` this rank reads ``size`` positions from ``start + j * stride``; then all ranks together have
    read ``row + (j + 1) * stride`` rows (at most n).
    """

    row: int
    start: int
    size: int
    steps: int
    stride: int


@dataclass(frozen=True)
class Steps:
    """How an epoch of ``rows`` is dealt to ranks.

    The rows left at the end, fewer than a global batch, are dealt so that ranks differ by a row at most (some may get
    none), or dropped (``drop_last``), or filled up with positions beyond the end (``pad_last``).
    """

    rows: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    pad_last: bool = False

    @property
    def stride(self) -> int:
        """Rows that all ranks read together at a step."""
        return self.batch_size * self.world_size

    def end(self, row: int = 0) -> int:
        """Where the epoch ends for those who begin (or resume) at ``row``."""
        return self.rows - (self.rows - row) % self.stride if self.drop_last else self.rows

    def count(self, row: int = 0) -> int:
        """Steps from ``row`` to the end at which this rank gets a batch."""
        full, left = divmod(max(self.rows - row, 0), self.stride)
        if self.drop_last or not left:
            return full
        return full + (self.pad_last or self.rank < left)

    def runs(self, row: int, most: int) -> Iterator[Run]:
        """The steps from ``row`` on, at most ``most`` at a time; the last, if it is not like the others, by itself."""
        while (full := (self.rows - row) // self.stride) > 0:
            count = min(full, most)
            yield Run(row, row + self.rank * self.batch_size, self.batch_size, count, self.stride)
            row += count * self.stride
        left = self.rows - row
        if left and self.pad_last:
            yield Run(row, row + self.rank * self.batch_size, self.batch_size, 1, self.stride)
        elif left and not self.drop_last:
            size, more = divmod(left, self.world_size)
            mine = size + (self.rank < more)
            if mine:
                yield Run(row, row + self.rank * size + min(self.rank, more), mine, 1, self.stride)
