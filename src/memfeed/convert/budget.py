"""Estimate what a conversion costs, before its first byte is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from memfeed.schema.codec import Packed
from memfeed.system import files
from memfeed.system.units import format_bytes, format_seconds


def mean_row_bytes(packed: Sequence[tuple[Packed, ...]]) -> float:
    """Return the mean number of bytes that one of these samples takes on disk."""
    sizes = [
        sum(sum(map(len, p.buffers)) + (8 + p.dims.nbytes if p.dims is not None else 0) for p in row) for row in packed
    ]
    return float(np.mean(sizes))


def describe_budget(path: Path, row_count: int | None, row_bytes: float, row_seconds: float) -> str:
    """Return a line with the rows, bytes and seconds that a store takes; ``row_count`` is None if it is not known.

    Raises SpaceError if the disk has too little free space.
    """
    free = f"{format_bytes(files.free_bytes(path))} free"
    if row_count is None:
        return f"an unknown number of rows, {format_bytes(row_bytes)} a row; {free}"
    total = int(row_bytes * row_count)
    files.check_room(path, total, f"{row_count:,} rows of {format_bytes(row_bytes)}")
    return f"{row_count:,} rows, {format_bytes(total)}, about {format_seconds(row_count * row_seconds)}; {free}"
