"""Writing runs of rows into a build's files. Many processes may do so at once: each run is somebody's own."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from memfeed.errors import BuildError
from memfeed.schema.codec import Packed
from memfeed.schema.fields import HEAP_OF_BYTES, Field, Schema
from memfeed.store.format import WORK
from memfeed.system import files
from memfeed.system.descriptors import FileHandles

ABSENT, WRITTEN, DURABLE, SKIPPED = 0, 1, 2, 3
FIRST_EXTENT, LARGEST_EXTENT = 64 << 10, 64 << 20
ALIGN = 64
_RECORD = np.dtype([("field", "<i8"), ("start", "<i8"), ("size", "<i8")])


def heap_path(root: Path, field: Field) -> Path:
    """The heap of a ragged column."""
    return root / field.stem / "heap.bin"


def element_bytes(field: Field) -> int:
    """The unit of a ragged column's ``start``."""
    return 1 if field.kind in HEAP_OF_BYTES else field.itemsize


class Extents:
    """Heap space, granted in extents that are recorded before use; a writer writes only inside its own.

    A writer of a killed builder can live on, so a new one is granted space beyond everything recorded.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / WORK / "extents"
        self._at: dict[int, tuple[int, int]] = {}
        self._next: dict[int, int] = {}

    def place(self, number: int, size: int, heap: Path) -> int:
        """The byte in field ``number``'s heap where the next ``size`` bytes go."""
        at, end = self._at.get(number, (0, 0))
        if at + size > end:
            want = self._next.get(number, FIRST_EXTENT)
            self._next[number] = min(2 * want, LARGEST_EXTENT)
            at = self.grant(number, max(want, size))
            end = at + max(want, size)
            fd = files.open_write(heap, os.O_CREAT)
            try:
                files.preallocate(fd, end - at, at)
            finally:
                os.close(fd)
        self._at[number] = (at + size, end)
        return at

    def grant(self, number: int, size: int) -> int:
        """Records ``size`` more bytes of a heap as taken and returns where they begin."""
        fd = files.open_write(self._path, os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            length = os.fstat(fd).st_size // _RECORD.itemsize * _RECORD.itemsize
            taken = np.frombuffer(os.pread(fd, length, 0), _RECORD)
            mine = taken[taken["field"] == number]
            start = int((mine["start"] + mine["size"]).max(initial=0))
            start = -(-start // ALIGN) * ALIGN
            files.write_at(fd, np.array([(number, start, size)], _RECORD).tobytes(), length)
            return start
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # not by closing it alone: a child that was forked now has it too
            os.close(fd)


class Rows:
    """Writes packed rows of one schema at their places in a build. Made anew in each process that writes.

    With ``rewrites`` rows may be there already: while they are written again they are absent, so that no death and no
    power loss leaves half of the old and half of the new.
    """

    def __init__(self, root: Path, schema: Schema, generation: int, *, rewrites: bool = False) -> None:
        self.root, self.schema, self.generation, self.rewrites = root, schema, generation, rewrites
        self._extents = Extents(root)
        self._handles = FileHandles(write=True)

    def check_generation(self) -> None:
        """Raises BuildError if another builder has taken over: what this one writes now could harm its work."""
        try:
            current = int.from_bytes((self.root / WORK / "generation").read_bytes(), "little")
        except FileNotFoundError:
            current = -1
        if current != self.generation:
            raise BuildError(
                f"{self.root}: found builder {current} at work; expected to be it ({self.generation}): "
                "another process has taken this build over, or finished it"
            )

    def write(self, first: int, count: int, columns: Sequence[Packed]) -> int:
        """Rows ``first`` to ``first + count`` of every field, then their presence; returns the bytes written."""
        self.check_generation()
        if self.rewrites:
            self._withdraw(first, count)
        written = 0
        for number, (field, packed) in enumerate(zip(self.schema.fields, columns, strict=True)):
            if field.kind != "fixed":
                written += self._write_ragged(number, field, first, packed)
            elif field.row_bytes:
                fd = self._handles(self.root / f"{field.stem}.memmap")
                written += files.write_all_at(fd, packed.buffers, first * field.row_bytes)
        self.mark(first, count, WRITTEN)
        return written

    def write_fixed(self, field: Field, first: int, packed: Packed) -> int:
        """Rows from ``first`` of one fixed column, without their presence. Threads may call this at once."""
        fd = files.open_write(self.root / f"{field.stem}.memmap")
        try:
            return files.write_all_at(fd, packed.buffers, first * field.row_bytes)
        finally:
            os.close(fd)

    def _write_ragged(self, number: int, field: Field, first: int, packed: Packed) -> int:
        assert packed.dims is not None
        unit = element_bytes(field)
        elements = np.where(packed.dims[:, 0] < 0, 0, packed.dims.prod(axis=1))
        size = int(elements.sum()) * unit
        heap = heap_path(self.root, field)
        at = self._extents.place(number, size, heap) if size else 0
        starts = np.zeros(len(elements), np.int64)
        np.cumsum(elements[:-1], out=starts[1:])
        starts = np.where(elements > 0, starts + at // unit, 0)
        if size:
            files.write_all_at(self._handles(heap), packed.buffers, at)
        width = packed.dims.shape[1]
        files.write_at(self._handles(self.root / field.stem / "dims.memmap"), packed.dims, first * width * 8)
        files.write_at(self._handles(self.root / field.stem / "start.memmap"), starts, first * 8)
        return size + starts.nbytes + packed.dims.nbytes

    def _withdraw(self, first: int, count: int) -> None:
        presence = self._handles(self.root / WORK / "presence")
        states = os.pread(presence, count, first)
        if any(states):
            files.write_at(presence, bytes([ABSENT]) * count, first)
        if DURABLE in states:
            files.sync(presence)

    def mark(self, first: int, count: int, state: int) -> None:
        """Sets the presence of some rows."""
        files.write_at(self._handles(self.root / WORK / "presence"), bytes([state]) * count, first)

    def close(self) -> None:
        """Closes its files."""
        self._handles.close()
