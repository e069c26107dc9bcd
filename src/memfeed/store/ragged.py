"""The files of a column, and how rows of different sizes lie in them. Only this module knows these names and units.

A fixed column is one file, ``STEM.memmap``, with its rows one after another. Any other column is a directory ``STEM``:

- ``heap.bin`` has the bytes of all rows, in any order, perhaps with gaps;
- ``start.memmap`` has one int64 per row: the index of its first element in the heap. The unit is one element of the
  field's dtype, which is one byte for str, bytes and json;
- ``dims.memmap`` has ``dims_width`` int64 per row: the dims of the row. The first is -1 if the row is None. A row of
  rank 0 has the one dim 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from memfeed.schema.codec import Int64Array, Packed
from memfeed.schema.fields import Field

INT64_BYTES = 8
ROWS_AT_ONCE = 1 << 20  # of start and dims, so that a billion rows need no memory for each


class RaggedFiles(NamedTuple):
    """The paths of a column's files, for a column that is not fixed."""

    start: Path
    dims: Path
    heap: Path


class Located(NamedTuple):
    """The positions of rows in their column.

    Args:
        starts: the first byte of each row, int64 [k]; where rows have files of their own, the number of the file.
        lengths: the bytes of each row, int64 [k]; -1 for None.
        dims: the dims of each row, int64 [k, dims_width].
    """

    starts: Int64Array
    lengths: Int64Array
    dims: Int64Array

    def part(self, which: slice | npt.NDArray[np.bool_]) -> Located:
        """Return where some of the rows lie: those of a slice or of a mask, bool [k]."""
        return Located(self.starts[which], self.lengths[which], self.dims[which])

    @property
    def nbytes(self) -> int:
        """The bytes of all rows together."""
        return int(self.lengths.clip(0).sum())


def fixed_file(root: Path, field: Field) -> Path:
    """Return the path of the file that has all rows of a fixed column, of the store or build at ``root``."""
    return root / f"{field.stem}.memmap"


def ragged_files(root: Path, field: Field) -> RaggedFiles:
    """Return the paths of the files of a column that is not fixed, of the store or build at ``root``."""
    directory = root / field.stem
    return RaggedFiles(directory / "start.memmap", directory / "dims.memmap", directory / "heap.bin")


def dims_width(field: Field) -> int:
    """Return how many int64 each row of ``dims`` has."""
    return max(field.rank, 1)


def column_files(field: Field, row_count: int) -> dict[str, int | None]:
    """Return the files of a column, named as in a manifest, with their sizes in bytes; None for the heap."""
    if field.kind == "fixed":
        return {f"{field.stem}.memmap": row_count * field.row_bytes}
    return {
        f"{field.stem}/start.memmap": row_count * INT64_BYTES,
        f"{field.stem}/dims.memmap": row_count * INT64_BYTES * dims_width(field),
        f"{field.stem}/heap.bin": None,
    }


def record_sizes(field: Field) -> dict[str, int | None]:
    """Return the files of a column with the bytes that each has per row; None for the heap."""
    return column_files(field, 1)


def element_counts(dims: Int64Array) -> Int64Array:
    """Return the elements of each row, int64 [k], for ``dims`` [k, dims_width]; 0 for None."""
    return np.where(dims[:, 0] < 0, 0, dims.prod(axis=1))


def consecutive_starts(counts: Int64Array, first: int) -> Int64Array:
    """Return the start of each row, for rows of so many elements one after another from element ``first``."""
    return np.where(counts > 0, np.cumsum(counts) - counts + first, 0)


def regular_rows(field: Field, first: int, count: int) -> tuple[Int64Array, Int64Array]:
    """Return the start and dims of ``count`` rows from row ``first`` of a fixed column whose file becomes a heap."""
    starts = np.arange(first, first + count, dtype=np.int64) * field.row_elements
    return starts, np.tile(np.array(field.row_shape or (1,), np.int64), (count, 1))


def open_rows(root: Path, field: Field, row_count: int) -> tuple[Int64Array, Int64Array]:
    """Map start [n] and dims [n, dims_width] of a column that is not fixed, read-only."""
    start, dims, _ = ragged_files(root, field)
    return (
        np.memmap(start, np.int64, "r", shape=(row_count,)),
        np.memmap(dims, np.int64, "r", shape=(row_count, dims_width(field))),
    )


def read_row(root: Path, field: Field, row: int) -> Packed:
    """Return the bytes and dims of one row."""
    return next(read_rows(root, field, [row]))


def read_rows(root: Path, field: Field, rows: Iterable[int]) -> Iterator[Packed]:
    """Yield the bytes and dims of each row. Each file of the column is opened once."""
    if field.kind == "fixed":
        size = field.row_bytes
        with open(fixed_file(root, field), "rb") as file:
            for row in rows:
                yield Packed([np.frombuffer(_read(file, row * size, size), np.uint8)], None)
        return
    paths, width = ragged_files(root, field), INT64_BYTES * dims_width(field)
    with open(paths.start, "rb") as start_file, open(paths.dims, "rb") as dims_file, open(paths.heap, "rb") as heap:
        for row in rows:
            dims = np.frombuffer(_read(dims_file, row * width, width), np.int64)[None]
            start = int.from_bytes(_read(start_file, row * INT64_BYTES, INT64_BYTES), "little")
            data = _read(heap, start * field.itemsize, int(element_counts(dims)[0]) * field.itemsize)
            yield Packed([np.frombuffer(data, np.uint8)], dims)


def _read(file: BinaryIO, first: int, size: int) -> bytes:
    file.seek(first)
    return file.read(size)


def used_heap_ranges(
    root: Path, field: Field, row_count: int, present: npt.NDArray[np.bool_] | None = None
) -> Int64Array:
    """Return the bytes of the heap in which rows lie: int64 [k, 2] of first and last + 1, ascending and apart.

    ``present`` [row_count] says which rows count; None means all.
    """
    found = [np.empty((2, 0), np.int64)]
    if row_count and ragged_files(root, field).heap.stat().st_size:
        starts, dims = open_rows(root, field, row_count)
        for first in range(0, row_count, ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            begin, counts = np.asarray(starts[part]), element_counts(np.asarray(dims[part]))
            kept = counts > 0 if present is None else (counts > 0) & present[part]
            found.append(_merge(np.stack([begin[kept], begin[kept] + counts[kept]])))
    used: Int64Array = _merge(np.concatenate(found, axis=1)).T * field.itemsize
    return used


def _merge(ranges: Int64Array) -> Int64Array:
    """Merge ranges, int64 [2, k] of first and last + 1, that touch or overlap; return them in ascending order."""
    begin, end = ranges
    cuts = np.flatnonzero(begin[1:] != end[:-1])  # most rows follow the one before: sort only what is left
    begin, end = begin[np.append(0, cuts + 1)[: len(begin)]], end[np.append(cuts, -1)[: len(end)]]
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    cuts = np.flatnonzero(begin[1:] > end[:-1])
    return np.stack([begin[np.append(0, cuts + 1)[: len(begin)]], end[np.append(cuts, -1)[: len(end)]]])
