"""What a conversion will cost, said before its first byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from memfeed.schema.codec import Packed
from memfeed.system import files
from memfeed.system.units import format_bytes, format_seconds


class Budget(msgspec.Struct, frozen=True):
    """What a conversion will cost: rows, bytes on disk, seconds; None where the length is not known."""

    rows: int | None
    row_bytes: float
    bytes: int | None
    seconds: float | None
    free: int

    def __str__(self) -> str:
        rows = "an unknown number of rows" if self.rows is None else f"{self.rows:,} rows"
        size = f"{format_bytes(self.row_bytes)} a row" if self.bytes is None else format_bytes(self.bytes)
        time_ = "" if self.seconds is None else f", about {format_seconds(self.seconds)}"
        return f"{rows}, {size}{time_}; {format_bytes(self.free)} free"


def row_bytes(packed: Sequence[tuple[Packed, ...]]) -> float:
    """The bytes that one of these samples takes on disk, on average."""
    sizes = [
        sum(sum(map(len, p.buffers)) + (8 + p.dims.nbytes if p.dims is not None else 0) for p in row) for row in packed
    ]
    return float(np.mean(sizes))


def budget_of(path: Path, rows: int | None, row_bytes: float, seconds_a_row: float) -> Budget:
    """The cost of a store of ``rows`` such samples. Raises SpaceError if it cannot fit beside what is on the disk."""
    total = None if rows is None else int(row_bytes * rows)
    if total is not None:
        files.check_room(path, total, f"{rows:,} rows of {format_bytes(row_bytes)}")
    return Budget(rows, row_bytes, total, None if rows is None else rows * seconds_a_row, files.free_bytes(path))
