"""Row numbers from what a user gives: an index, a mask, the parts of a split."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from memfeed.errors import RowError
from memfeed.schema.codec import Int64Array


def one_row(which: Any, row_count: int) -> int:
    """Return the row that an int (perhaps negative) names. Raises RowError for anything else, or out of range."""
    try:
        row = operator.index(which)
    except TypeError:
        raise RowError(
            f"found {type(which).__name__} as an index; expected an int, a slice, or a list, tensor or array of "
            "ints or bools"
        ) from None
    if not -row_count <= row < row_count:
        raise RowError(f"found row {row}; expected {-row_count} to {row_count - 1} (the store has {row_count} rows)")
    return row % row_count


def many_rows(which: Any, row_count: int) -> Int64Array:
    """Return the rows that ints (perhaps negative) or a mask of bools name, int64 [k]. See ``check_range``."""
    try:
        array = np.asarray(which)
    except ValueError:
        raise RowError("found indices of unequal lengths; expected ints in one dimension") from None
    if array.dtype == np.bool_:
        if array.shape != (row_count,):
            raise RowError(f"found a mask of shape {array.shape}; expected ({row_count},), one bool per row")
        return np.flatnonzero(array)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RowError(f"found indices {array.dtype} {list(array.shape)}; expected ints in one dimension")
    if array.dtype == np.uint64 and len(array) and int(array.max()) > np.iinfo(np.int64).max:
        raise RowError(f"found row {int(array.max())}; expected {-row_count} to {row_count - 1}")
    array = array.astype(np.int64)
    low = int(array.min()) if len(array) else 0
    if low < -row_count:
        raise RowError(f"found row {low}; expected {-row_count} to {row_count - 1}")
    return np.where(array < 0, array + row_count, array)


def check_range(rows: Int64Array, row_count: int) -> None:
    """Raise RowError for a row that is not in range."""
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < row_count):
        bad = int(rows[int(((rows < 0) | (rows >= row_count)).argmax())])
        raise RowError(f"found row {bad}; expected 0 to {row_count - 1} (the store has {row_count} rows)")


def part_lengths(parts: Sequence[float], row_count: int) -> list[int]:
    """Return the length of each part of a split: of fractions that sum to 1, or counts that sum to ``row_count``.

    As in `torch.utils.data.random_split`, the rows left by rounding go to the first parts, one each.
    """
    try:
        parts = [getattr(part, "item", lambda part=part: part)() for part in parts]
        is_valid = bool(parts) and all(part >= 0 for part in parts)  # no NaN is
        total = sum(parts) if is_valid else 0
    except TypeError:
        is_valid = False
    if not is_valid:
        raise ValueError(f"found parts {parts!r:.150}; expected a list of fractions or counts, none negative")
    if all(isinstance(part, int) for part in parts) and total == row_count:
        return [int(part) for part in parts]
    if abs(total - 1) >= 1e-6:
        raise ValueError(f"found parts that sum to {total}; expected fractions that sum to 1, or counts to {row_count}")
    lengths = [int(row_count * part) for part in parts]
    for i in range(row_count - sum(lengths)):
        lengths[i % len(lengths)] += 1
    return lengths
