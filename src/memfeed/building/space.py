"""Heap space: what the writers of a build are granted, and space in which no row lies.

Space is granted by a log that all writers read alike. A run of rows goes after the bytes of the row before it if
nothing is there, else after everything recorded. So rows that get their space in ascending order lie in that order,
without gaps, also where rows were lost and written again.

Workers read lists of rows in any order. Each *asks* for the space of a list once its rows are read and their sizes are
known. A list is *placed* once all lists before it have asked: then all processes that read the log know where it goes.
A list that cannot wait so long gets other space.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memfeed.errors import SpaceError, StoreError
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

FIRST_EXTENT, LARGEST_EXTENT = 64 << 10, 64 << 20
EXTENTS_A_HEAP = 64  # an extent takes no more than this part of what the heap has
MOST_PARTS = 1 << 16  # of a heap whose ends are known; rows after others have no order
NO_LIST = -1
RECORD = np.dtype([("field", "<i8"), ("start", "<i8"), ("size", "<i8"), ("row", "<i8"), ("list", "<i8")])
"""Bytes of a heap: the first, how many, the row after the last that has some of them, and NO_LIST.

A list that asks has a record for each run of rows and field, whose ``start`` is the first row, and then one with the
field _ASKED. After it no list is placed if its size is 1. The record of _BEGUN has the number of the first list, that
of _WITHDRAWN the number of one that got other space.
"""
_ASKED, _BEGUN, _WITHDRAWN = -1, -2, -3
_LISTS = 1 << 30  # numbers of lists that belong together

_Record = tuple[int, int, int, int, int]


class Wanted(NamedTuple):
    """Space for the bytes of rows ``first`` to ``last`` (the last + 1) in the heap of a field."""

    field_index: int
    heap: Path
    first: int
    last: int
    size: int


class Extents:
    """The log. A writer writes only where it was granted space.

    A writer of a killed builder can live on: nothing recorded is granted again until a new log begins.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / WORK_DIRECTORY / "extents"
        self._heaps: dict[int, _Heap] = {}  # by field index
        self._read = 0  # bytes of the log that were read
        self._next = self._last = NO_LIST  # the list to be placed next, and the last one to be placed
        self._group: list[_Record] = []  # of a list that asks
        self._asked: dict[int, list[_Record]] = {}  # lists after the next one
        self._own: dict[int, Sequence[Wanted]] = {}  # lists of this process that were not granted space yet
        self._placed: dict[int, list[int]] = {}  # those of them that are placed

    def place(self, wanted: Sequence[Wanted]) -> list[int]:
        """Return the first byte for each of ``wanted`` in its heap, recorded, and reserved on the disk."""
        with self._locked() as fd:
            return self._place(fd, wanted)

    def _place(self, fd: int, wanted: Sequence[Wanted]) -> list[int]:
        placed, records = list[int](), list[_Record]()
        try:
            for one in wanted:
                heap = self._heap(one.field_index)
                at = heap.find(one.first, one.size)
                _reserve(one, at, heap)
                heap.note(at, one.size, one.last)
                placed.append(at)
                records.append((one.field_index, at, one.size, one.last, NO_LIST))
        finally:
            self._read += _append(fd, records)
        return placed

    def take_all(self, field_index: int, size: int, row_count: int) -> None:
        """Record the first ``size`` bytes of a heap as taken, by any of so many rows."""
        with self._locked() as fd:
            _append(fd, [(field_index, 0, size, row_count, NO_LIST)])

    # --- lists in order

    def begin_lists(self) -> int:
        """Return the number of the first list that will ask. Lists that asked before are forgotten."""
        first = secrets.randbits(31) * _LISTS  # a worker of a killed builder may still ask for its list
        with self._locked() as fd:
            _append(fd, [(_BEGUN, 0, 0, 0, first)])
        return first

    def ask(self, number: int, wanted: Sequence[Wanted], *, is_last: bool) -> None:
        """Ask for the space of a list. With ``is_last`` no list after it is placed."""
        self._own[number] = wanted
        records = [(one.field_index, one.first, one.size, one.last, number) for one in wanted]
        with self._locked() as fd:
            _append(fd, [*records, (_ASKED, 0, int(is_last), 0, number)])

    def is_placed(self, number: int) -> bool:
        """Return True if a list that has asked is placed."""
        self._look()
        return number in self._placed

    def is_left_out(self, number: int) -> bool:
        """Return True if a list will not be placed."""
        self._look()
        return self._last != NO_LIST and number > self._last

    def take(self, number: int) -> list[int]:
        """Return the first byte for each thing that a list wanted, reserved on the disk.

        If it is not placed, it is withdrawn, and its rows lie out of order.
        """
        with self._locked() as fd:
            wanted, placed = self._own.pop(number), self._placed.pop(number, None)
            if placed is None:
                self._read += _append(fd, [(_WITHDRAWN, 0, 0, 0, number)])
                self._asked[number] = []
                return self._place(fd, wanted)
            for one, at in zip(wanted, placed, strict=True):
                _reserve(one, at, self._heap(one.field_index))
        return placed

    # --- the log

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Lock the log for the block, and note what was recorded since the last time."""
        with files.opened(self._path, os.O_CREAT) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                size = (os.fstat(fd).st_size - self._read) // RECORD.itemsize * RECORD.itemsize
                for record in np.frombuffer(os.pread(fd, size, self._read), RECORD).tolist():
                    self._note(record)
                self._read += size
                yield fd
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # to close it is not enough: a child forked now has it too

    def _look(self) -> None:
        """Note what was recorded, if there is anything."""
        if self._path.stat().st_size != self._read:
            with self._locked():
                pass

    def _note(self, record: _Record) -> None:
        field_index, start, size, row, number = record
        if field_index == _BEGUN:
            self._next, self._last = number, NO_LIST
            self._asked.clear()
        elif field_index == _WITHDRAWN:
            if number in self._asked:
                self._asked[number] = []
        elif number == NO_LIST:
            self._heap(field_index).note(start, size, row)
        elif field_index == _ASKED:
            if 0 <= number - self._next < _LISTS:
                self._asked[number] = [one for one in self._group if one[-1] == number]
                if size and (self._last == NO_LIST or number < self._last):
                    self._last = number
            self._group.clear()
            while self._next in self._asked and (self._last == NO_LIST or self._next <= self._last):
                self._place_next()
        else:
            self._group.append(record)

    def _place_next(self) -> None:
        placed = []
        for field_index, first, size, row, _ in self._asked.pop(self._next):
            heap = self._heap(field_index)
            placed.append(heap.find(first, size))
            heap.note(placed[-1], size, row)
        if self._next in self._own:
            self._placed[self._next] = placed
        self._next += 1

    def _heap(self, field_index: int) -> _Heap:
        return self._heaps.setdefault(field_index, _Heap())


def _append(fd: int, records: Sequence[_Record]) -> int:
    """Write records after the last whole one. Return their size in bytes."""
    end = os.fstat(fd).st_size // RECORD.itemsize * RECORD.itemsize
    return files.write_at(fd, np.array(records, RECORD).tobytes(), end)


class _Heap:
    """The record of one heap: the end of all space that was taken, the holes before it, and where rows end."""

    def __init__(self) -> None:
        self.end = self.length = 0  # of what is recorded, and of the file as far as known
        self.had_holes = False
        self.holes: list[tuple[int, int]] = []  # first byte and last + 1, ascending
        self._rows: list[int] = []  # ascending: all rows recorded before this one ...
        self._ends: list[int] = []  # ... end at this byte

    def find(self, first: int, size: int) -> int:
        """Return the byte where ``size`` bytes of rows from ``first`` go."""
        before = bisect.bisect_right(self._rows, first) - 1
        at = self._ends[before] if before >= 0 else 0
        is_free = at == self.end or any(start <= at and at + size <= end for start, end in self.holes)
        return at if is_free or not size else self.end

    def note(self, start: int, size: int, last: int) -> None:
        """Note that ``size`` bytes from ``start`` are those of rows before ``last``."""
        if start > self.end:
            self.holes.append((self.end, start))
            self.had_holes = True
        elif start < self.end and size:
            parts = [((a, min(b, start)), (max(a, start + size), b)) for a, b in self.holes]
            self.holes = [(a, b) for part in parts for a, b in part if a < b]
        self.end = max(self.end, start + size)
        at = bisect.bisect_right(self._rows, last) - 1
        if at >= 0 and (self._rows[at] == last or self._ends[at] == start):
            self._rows[at], self._ends[at] = last, start + size
        elif len(self._rows) < MOST_PARTS:
            self._rows.insert(at + 1, last)
            self._ends.insert(at + 1, start + size)


def _reserve(wanted: Wanted, at: int, heap: _Heap) -> None:
    """Reserve the bytes of ``wanted`` on the disk.

    After the end of the file an extent is reserved, for the rows that follow too; if the disk is nearly full, just
    these bytes. So the length of the file says how much is reserved, but for holes.
    """
    end = at + wanted.size
    if not wanted.size or (end <= heap.length and not heap.had_holes):
        return
    with files.opened(wanted.heap, os.O_CREAT) as fd:
        heap.length = length = os.fstat(fd).st_size
        if end <= length:
            if heap.had_holes:
                files.preallocate(fd, wanted.size, at)
            return
        extent = max(end - length, min(max(at // EXTENTS_A_HEAP, FIRST_EXTENT), LARGEST_EXTENT))
        try:
            files.preallocate(fd, extent, length)
        except SpaceError:
            files.preallocate(fd, end - length, length)
            files.punch(fd, [(end, length + extent)])  # some file systems keep what they had found so far


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
