"""The heap space of a build: granted to its writers in extents, and given back where no row needs it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memfeed.errors import SpaceError, StoreError
from memfeed.schema.fields import Field, Schema
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.ragged import INT64_BYTES, dims_width, ragged_files, used_heap_ranges
from memfeed.system import files

FIRST_EXTENT, LARGEST_EXTENT = 64 << 10, 64 << 20
EXTENTS_A_HEAP = 64  # an extent takes no more than this part of what the heap has
ALIGN = 64
_RECORD = np.dtype([("field", "<i8"), ("start", "<i8"), ("size", "<i8")])


class Extents:
    """Heap space, granted in extents that are recorded before use; a writer writes only inside its own.

    A writer of a killed builder can live on, so new space is granted after everything recorded.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / WORK_DIRECTORY / "extents"
        self._free: dict[int, tuple[int, int]] = {}  # field index -> first and last + 1 free byte of its extent
        self._ends: dict[int, int] = {}  # field index -> the end of what is recorded
        self._read = 0  # bytes of the log that were read

    def place(self, field_index: int, size: int, heap: Path) -> int:
        """Return the byte of the field's heap where the next ``size`` bytes go, reserved on the disk."""
        at, end = self._free.get(field_index, (0, 0))
        if at + size > end:
            with files.opened(heap, os.O_CREAT) as fd:
                start, new_end = self.grant(field_index, size, fd)
                if start == _aligned(end):  # nobody else was granted space meanwhile: the rest can be used
                    start = at
                else:
                    files.punch(fd, [(at, end)])
            at, end = start, new_end
        self._free[field_index] = (at + size, end)
        return at

    def grant(self, field_index: int, size: int, heap_fd: int | None = None) -> tuple[int, int]:
        """Record ``size`` more bytes of a heap as taken, or more; return the first byte and the last + 1.

        With ``heap_fd`` they are reserved on the disk: more than ``size`` only if it has them.
        """
        with files.opened(self._path, os.O_CREAT) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                self._read_log(fd)
                start = self._ends.get(field_index, 0)
                if heap_fd is not None:
                    size = _reserve(heap_fd, start, size)
                files.write_at(fd, np.array([(field_index, start, size)], _RECORD).tobytes(), self._read)
                return start, start + size
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # to close it is not enough: a child forked now has it too

    def _read_log(self, fd: int) -> None:
        """Read what was recorded since the last time."""
        size = (os.fstat(fd).st_size - self._read) // _RECORD.itemsize * _RECORD.itemsize
        for field_index, start, taken in np.frombuffer(os.pread(fd, size, self._read), _RECORD).tolist():
            self._ends[field_index] = max(self._ends.get(field_index, 0), _aligned(start + taken))
        self._read += size


def _reserve(heap_fd: int, start: int, size: int) -> int:
    """Reserve an extent for ``size`` bytes of a heap; if the disk is nearly full, just these. Return its size."""
    extent = _aligned(max(size, min(max(start // EXTENTS_A_HEAP, FIRST_EXTENT), LARGEST_EXTENT)))
    try:
        files.preallocate(heap_fd, extent, start)
    except SpaceError:
        files.preallocate(heap_fd, size, start)
        files.punch(heap_fd, [(start + size, start + extent)])  # some file systems keep what they had found so far
        return size
    return extent


def _aligned(at: int) -> int:
    return -(-at // ALIGN) * ALIGN


def take_back(root: Path, schema: Schema, present: npt.NDArray[np.bool_]) -> None:
    """Give the disk all heap space in which no present row lies, and grant the space after the last one again.

    Only while no writer is inside a write, and before the new builder's first writer.
    """
    row_count = int(np.flatnonzero(present).max(initial=-1)) + 1
    taken = []
    for index, field in enumerate(schema.fields):
        if field.kind != "fixed":
            taken.append((index, 0, trim_heap(root, field, row_count, present[:row_count])))
    files.write_atomically(root / WORK_DIRECTORY / "extents", np.array(taken, _RECORD).tobytes())


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
    """Write what bytes ``first`` to ``last`` of an open heap are in memory; holes stay."""
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
