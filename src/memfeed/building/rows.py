"""Write runs of rows into a build's files. Many processes may do so at once: each run belongs to one of them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from memfeed.errors import BuildError
from memfeed.schema.codec import Packed
from memfeed.schema.fields import Field, Schema
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.ragged import INT64_BYTES, consecutive_starts, element_counts, fixed_file, ragged_files
from memfeed.system import files
from memfeed.system.descriptors import FileHandles

ABSENT, WRITTEN, DURABLE, SKIPPED = 0, 1, 2, 3
FIRST_EXTENT, LARGEST_EXTENT = 64 << 10, 64 << 20
ALIGN = 64
_RECORD = np.dtype([("field", "<i8"), ("start", "<i8"), ("size", "<i8")])


class Extents:
    """Heap space, granted in extents that are recorded before use; a writer writes only inside its own.

    A writer of a killed builder can live on, so new space is granted after everything recorded.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / WORK_DIRECTORY / "extents"
        self._free: dict[int, tuple[int, int]] = {}  # field index -> first and last + 1 free byte of its extent
        self._next_size: dict[int, int] = {}

    def place(self, field_index: int, size: int, heap: Path) -> int:
        """Return the byte of the field's heap where the next ``size`` bytes go."""
        at, end = self._free.get(field_index, (0, 0))
        if at + size > end:
            extent = self._next_size.get(field_index, FIRST_EXTENT)
            self._next_size[field_index] = min(2 * extent, LARGEST_EXTENT)
            extent = max(extent, size)
            at = self.grant(field_index, extent)
            end = at + extent
            with files.opened(heap, os.O_CREAT) as fd:
                files.preallocate(fd, extent, at)
        self._free[field_index] = (at + size, end)
        return at

    def grant(self, field_index: int, size: int) -> int:
        """Record ``size`` more bytes of a heap as taken and return where they begin."""
        with files.opened(self._path, os.O_CREAT) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                length = os.fstat(fd).st_size // _RECORD.itemsize * _RECORD.itemsize
                records = np.frombuffer(os.pread(fd, length, 0), _RECORD)
                taken = records[records["field"] == field_index]
                start = int((taken["start"] + taken["size"]).max(initial=0))
                start = -(-start // ALIGN) * ALIGN
                files.write_at(fd, np.array([(field_index, start, size)], _RECORD).tobytes(), length)
                return start
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # to close it is not enough: a child forked now has it too


class RowWriter:
    """Writes packed rows of one schema to their positions in a build. Each process that writes makes its own.

    With ``rewrites`` rows may exist already. While they are written again they are absent, so that neither a killed
    process nor a power loss leaves a mixture of old and new.
    """

    def __init__(self, root: Path, schema: Schema, generation: int, *, rewrites: bool = False) -> None:
        self.root, self.schema, self.generation, self.rewrites = root, schema, generation, rewrites
        self._presence = root / WORK_DIRECTORY / "presence"
        self._extents = Extents(root)
        self._handles = FileHandles(write=True)

    def check_generation(self) -> None:
        """Raise BuildError if another builder has taken over: a write now could damage its work."""
        try:
            current = int.from_bytes((self.root / WORK_DIRECTORY / "generation").read_bytes(), "little")
        except FileNotFoundError:
            current = -1
        if current != self.generation:
            raise BuildError(
                f"{self.root}: found builder {current} at work; expected to be it ({self.generation}): "
                "another process has taken this build over, or finished it"
            )

    def write(self, first: int, count: int, columns: Sequence[Packed]) -> int:
        """Write rows ``first`` to ``first + count`` of every field, then their presence; return the bytes written."""
        self.check_generation()
        if self.rewrites:
            self._make_absent(first, count)
        written = 0
        for index, (field, packed) in enumerate(zip(self.schema.fields, columns, strict=True)):
            if field.kind != "fixed":
                written += self._write_ragged(index, field, first, packed)
            elif field.row_bytes:
                fd = self._handles(fixed_file(self.root, field))
                written += files.write_all_at(fd, packed.buffers, first * field.row_bytes)
        self.mark(first, count, WRITTEN)
        return written

    def write_fixed(self, field: Field, first: int, packed: Packed) -> int:
        """Write rows from ``first`` of one fixed column, without their presence. Threads may call this at once."""
        with files.opened(fixed_file(self.root, field)) as fd:
            return files.write_all_at(fd, packed.buffers, first * field.row_bytes)

    def _write_ragged(self, field_index: int, field: Field, first: int, packed: Packed) -> int:
        assert packed.dims is not None
        counts, paths = element_counts(packed.dims), ragged_files(self.root, field)
        size = int(counts.sum()) * field.itemsize
        at = self._extents.place(field_index, size, paths.heap) if size else 0
        starts = consecutive_starts(counts, at // field.itemsize)
        if size:
            files.write_all_at(self._handles(paths.heap), packed.buffers, at)
        files.write_at(self._handles(paths.dims), packed.dims, first * packed.dims.shape[1] * INT64_BYTES)
        files.write_at(self._handles(paths.start), starts, first * INT64_BYTES)
        return size + starts.nbytes + packed.dims.nbytes

    def _make_absent(self, first: int, count: int) -> None:
        fd = self._handles(self._presence)
        states = os.pread(fd, count, first)
        if any(states):
            files.write_at(fd, bytes([ABSENT]) * count, first)
        if DURABLE in states:
            files.sync(fd)

    def mark(self, first: int, count: int, state: int) -> None:
        """Set the presence of rows ``first`` to ``first + count``."""
        files.write_at(self._handles(self._presence), bytes([state]) * count, first)

    def close(self) -> None:
        """Close its files."""
        self._handles.close()
