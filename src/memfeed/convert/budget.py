"""Say what a store will take: rows, bytes and seconds, and how to take less."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from memfeed.convert.overlap import LEAST_FACTOR
from memfeed.schema.codec import Packed
from memfeed.system import files
from memfeed.system.units import format_bytes, format_seconds

LARGE_SHARE = 0.5  # of the free disk: above it, smaller forms of a store are proposed


def mean_row_bytes(packed: Sequence[Sequence[Packed]]) -> float:
    """Return the mean number of bytes that one of these samples takes on disk."""
    sizes = [
        sum(sum(map(len, p.buffers)) + (8 + p.dims.nbytes if p.dims is not None else 0) for p in row) for row in packed
    ]
    return float(np.mean(sizes))


def describe_budget(
    path: Path, row_count: int | None, row_bytes: float, row_seconds: float, overlap: float = 1.0
) -> str:
    """Return a line with the rows, bytes and seconds that a store takes; ``row_count`` is None if it is not known.

    ``overlap`` says how many times it has each byte. Raises SpaceError if the disk has too little free space.
    """
    found = files.free_bytes(path)
    free = "free space unknown" if found is None else f"{format_bytes(found)} free"
    if row_count is None:
        unknown = "an unknown number of rows (an iterable without an end needs length=)"
        return f"{unknown}, {format_bytes(row_bytes)} a row; {free}"
    total = int(row_bytes * row_count)
    files.check_room(path, total, f"{row_count:,} rows of {format_bytes(row_bytes)}")
    line = f"{row_count:,} rows, {format_bytes(total)}, about {format_seconds(row_count * row_seconds)}; {free}"
    is_large = found is not None and total > found * LARGE_SHARE
    smaller = "; smaller forms: forms= of memfeed.cache (memfeed cache --dry-run measures them)"
    again = (
        f"; neighbouring samples overlap, so that it has each byte about {overlap:,.0f} times: store the sequences "
        "whole, and read windows of them with Store.packed() or Store.windows() (docs/sequences.md)"
    )
    return line + (smaller if is_large else "") + (again if overlap >= LEAST_FACTOR else "")
