"""Estimate what a conversion costs, before its first byte is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from memfeed.schema.codec import Packed
from memfeed.system import files
from memfeed.system.units import format_bytes, format_seconds


class Budget(msgspec.Struct, frozen=True):
    """The cost of a conversion: rows, bytes on disk, seconds; None where the dataset's length is not known."""

    row_count: int | None
    row_bytes: float
    byte_count: int | None
    seconds: float | None
    free_bytes: int

    def __str__(self) -> str:
        rows = "an unknown number of rows" if self.row_count is None else f"{self.row_count:,} rows"
        size = f"{format_bytes(self.row_bytes)} a row" if self.byte_count is None else format_bytes(self.byte_count)
        time_ = "" if self.seconds is None else f", about {format_seconds(self.seconds)}"
        return f"{rows}, {size}{time_}; {format_bytes(self.free_bytes)} free"


def mean_row_bytes(packed: Sequence[tuple[Packed, ...]]) -> float:
    """Return the mean number of bytes that one of these samples takes on disk."""
    sizes = [
        sum(sum(map(len, p.buffers)) + (8 + p.dims.nbytes if p.dims is not None else 0) for p in row) for row in packed
    ]
    return float(np.mean(sizes))


def estimate_budget(path: Path, row_count: int | None, row_bytes: float, row_seconds: float) -> Budget:
    """Return the cost of a store of so many rows. Raise SpaceError if the disk has too little free space."""
    total = None if row_count is None else int(row_bytes * row_count)
    if total is not None:
        files.check_room(path, total, f"{row_count:,} rows of {format_bytes(row_bytes)}")
    seconds = None if row_count is None else row_count * row_seconds
    return Budget(row_count, row_bytes, total, seconds, files.free_bytes(path))
