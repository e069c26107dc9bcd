"""Heap space in which no row lies: given back to the disk, granted again, or written once more."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memfeed.building.extents import MOST_PARTS, NO_LIST, RECORD
from memfeed.errors import StoreError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field, Schema
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.ragged import (
    INT64_BYTES,
    ROWS_AT_ONCE,
    dims_width,
    element_counts,
    open_rows,
    ragged_files,
    used_heap_ranges,
)
from memfeed.system import files


def take_back(root: Path, schema: Schema, present: npt.NDArray[np.bool_]) -> None:
    """Give the disk all heap space in which no present row lies, and let it be granted again.

    Only while no writer is inside a write, and before the next writer is made.
    """
    row_count = int(np.flatnonzero(present).max(initial=-1)) + 1
    taken = [np.empty(0, RECORD)]
    for index, field in enumerate(schema.fields):
        if field.kind != "fixed":
            end = trim_heap(root, field, row_count, present[:row_count])
            parts = _parts(root, field, row_count, present)
            if parts.shape[1] > MOST_PARTS:
                parts = np.array([[0], [end], [row_count]])
            records = np.empty(parts.shape[1], RECORD)
            records["field"], records["list"], (records["start"], stop, records["row"]) = index, NO_LIST, parts
            records["size"] = stop - records["start"]
            taken.append(records)
    files.write_atomically(root / WORK_DIRECTORY / "extents", np.concatenate(taken).tobytes())


def _parts(root: Path, field: Field, row_count: int, present: npt.NDArray[np.bool_]) -> Int64Array:
    """Return the parts of a heap in which rows follow one another, int64 [3, k], in the order of the heap.

    Of each: its first byte, its last + 1, and the row after its last one.
    """
    found = [np.empty((3, 0), np.int64)]
    if row_count and ragged_files(root, field).heap.stat().st_size:
        starts, dims = open_rows(root, field, row_count)
        for first in range(0, row_count, ROWS_AT_ONCE):
            part = slice(first, min(first + ROWS_AT_ONCE, row_count))
            counts = element_counts(np.asarray(dims[part]))
            kept = np.flatnonzero((counts > 0) & present[part])
            begin = np.asarray(starts[part])[kept]
            found.append(_join_parts(np.stack([begin, begin + counts[kept], kept + first + 1])))
    parts = _join_parts(np.concatenate(found, axis=1))
    parts[:2] *= field.itemsize
    return parts[:, np.argsort(parts[0], kind="stable")]


def _join_parts(parts: Int64Array) -> Int64Array:
    begin, end, row = parts
    cuts = np.flatnonzero(begin[1:] != end[:-1])
    firsts, lasts = np.append(0, cuts + 1)[: len(begin)], np.append(cuts, -1)[: len(end)]
    joined: Int64Array = np.stack([begin[firsts], end[lasts], row[lasts]])
    return joined


def rewrite_gaps(root: Path, schema: Schema, present: npt.NDArray[np.bool_]) -> None:
    """Write all heap bytes in which no present row lies once more, as they are in memory.

    Checksums are those of whole heaps, and after a failed sync the disk may have other bytes than the memory. Readers
    of these rows may be at work, so the bytes stay. Only while no writer is inside a write.
    """
    row_count = int(np.flatnonzero(present).max(initial=-1)) + 1
    for field in schema:
        if field.kind != "fixed":
            used = used_heap_ranges(root, field, row_count, present[:row_count])
            heap = ragged_files(root, field).heap
            with files.opened(heap) as fd:
                size = os.fstat(fd).st_size
                for first, last in _gaps(np.concatenate([used, [[size, size]]])).tolist():
                    _write_again(fd, heap, first, last)


def _write_again(fd: int, heap: Path, first: int, last: int) -> None:
    """Write bytes ``first`` to ``last`` of an open heap again, as they are in memory; holes stay."""
    while first < last:
        try:
            first = os.lseek(fd, first, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # there are only holes
                return
            if error.errno not in files.NO_SUPPORT:
                raise files.refused(error, heap, "looking for data") from error
        if first < last:
            first += files.write_at(fd, os.pread(fd, min(files.COPY_BYTES, last - first), first), first)


def _gaps(used: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the bytes before each of these sorted ranges, (first, last + 1) int64 [k, 2], that lie in none."""
    found: npt.NDArray[np.int64] = np.stack([np.concatenate([[0], used[:-1, 1]]), used[:, 0]], axis=1)
    return found[found[:, 1] > found[:, 0]]


def trim_heap(
    root: Path, field: Field, row_count: int, present: npt.NDArray[np.bool_] | None = None, *, punch: bool = True
) -> int:
    """Cut a heap after its last row, give the disk the gaps between rows, and return its new size in bytes.

    Without ``punch`` gaps are kept: a writer of an older builder may be about to write there.
    """
    paths = ragged_files(root, field)
    _require_rows(root, field, row_count)
    used = used_heap_ranges(root, field, row_count, present)
    end = int(used[-1, 1]) if len(used) else 0
    size = paths.heap.stat().st_size
    if size < end:
        raise _damaged(paths.heap, size, end)
    if size > end:
        files.truncate(paths.heap, end)
    gaps = _gaps(used) if len(used) else used
    gaps = gaps[gaps[:, 1] - gaps[:, 0] >= files.BLOCK_BYTES]
    if punch and len(gaps):
        with files.opened(paths.heap) as fd:
            files.punch(fd, gaps.tolist())
    return end


def _require_rows(root: Path, field: Field, row_count: int) -> None:
    paths = ragged_files(root, field)
    for path, width in ((paths.start, 1), (paths.dims, dims_width(field))):
        size, expected = path.stat().st_size, row_count * width * INT64_BYTES
        if size < expected:
            raise _damaged(path, size, expected)


def _damaged(path: Path, size: int, expected: int) -> StoreError:
    return StoreError(
        f"{path}: found {size:,} bytes; expected at least {expected:,} for the rows that were written: the build is "
        "damaged; remove it to start over"
    )
