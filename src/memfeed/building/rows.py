"""Write runs of rows into a build's files. Many processes may do so at once: each run belongs to one of them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from memfeed.building.partial import SKIPPED, WRITTEN, Units
from memfeed.building.space import Extents, Wanted
from memfeed.errors import BuildError
from memfeed.schema.codec import Packed
from memfeed.schema.fields import Field, Schema
from memfeed.schema.values import Bytes
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.ragged import INT64_BYTES, consecutive_starts, element_counts, fixed_file, ragged_files
from memfeed.system import files
from memfeed.system.descriptors import FileHandles


class Placed(NamedTuple):
    """The first byte of a run of rows in a heap, and how many bytes it has."""

    at: int
    size: int


class RowWriter:
    """Writes packed rows of one schema to their positions in a build. Each process that writes makes its own.

    With ``rewrites`` rows may exist already. While they are written again they are absent, so that neither a killed
    process nor a power loss leaves a mixture of old and new.
    """

    def __init__(self, root: Path, schema: Schema, generation: int, units: Units, *, rewrites: bool = False) -> None:
        self.root, self.schema, self.generation, self.rewrites = root, schema, generation, rewrites
        self._units, self.extents, self._handles = units, Extents(root), FileHandles(write=True)
        self.mark: Callable[[int, int, int], object] = units.mark  # sets the presence of rows

    def check_generation(self) -> None:
        """Raise BuildError if another builder has taken over: a write now could damage its work."""
        try:
            current = int.from_bytes((self.root / WORK_DIRECTORY / "generation").read_bytes(), "little")
        except FileNotFoundError:
            raise BuildError(
                f"{self.root}: found that the build was removed while its rows were written; expected it to stay until "
                "its commit: another process removed or finished it; run this again"
            ) from None
        if current != self.generation:
            raise BuildError(
                f"{self.root}: found builder {current} at work; expected to be it ({self.generation}): "
                "another process has taken this build over, or finished it"
            )

    @contextlib.contextmanager
    def _as_builder(self) -> Iterator[None]:
        """Check the generation, and let no other builder take heap space back within the block."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._units.writing())
            finally:
                self.check_generation()  # also after an error: the build may have been removed
            yield

    def write(self, first: int, count: int, columns: Sequence[Packed]) -> int:
        """Write rows ``first`` to ``first + count`` of every field, then their presence; return the bytes written."""
        return self.write_runs([(first, count)], columns)

    def write_runs(self, runs: Sequence[tuple[int, int]], columns: Sequence[Packed], number: int | None = None) -> int:
        """Write several runs of rows, (first, count) each, then their presence; return the bytes written.

        ``columns`` has the rows of all runs, one run after another. ``number`` is that of a list that has asked for its
        space. If it is not placed, it is written out of order.
        """
        if self.rewrites:
            self.check_generation()
            self._units.drop(np.concatenate([np.arange(first, first + count) for first, count in runs]))
        with self._as_builder():
            placed, written = self._place(runs, columns, number), 0
            for field, packed, of_field in zip(self.schema.fields, columns, placed, strict=True):
                if field.kind != "fixed":
                    written += self._write_ragged(field, runs, packed, of_field)
                elif field.row_bytes:
                    written += self._write_fixed(field, runs, packed)
            for first, count in runs:
                self.mark(first, count, WRITTEN)
        return written

    def skip(self, row: int) -> None:
        """Set the presence of a row to skipped."""
        with self._as_builder():
            self.mark(row, 1, SKIPPED)

    def _write_fixed(self, field: Field, runs: Sequence[tuple[int, int]], packed: Packed) -> int:
        fd, size = self._handles(fixed_file(self.root, field)), field.row_bytes
        parts = [packed.buffers] if len(runs) == 1 else _cut(packed.buffers, [count * size for _, count in runs])
        return sum(
            files.write_all_at(fd, buffers, first * size) for (first, _), buffers in zip(runs, parts, strict=True)
        )

    def ask(self, number: int, runs: Sequence[tuple[int, int]], columns: Sequence[Packed], *, is_last: bool) -> None:
        """Ask for the heap space of a list of rows, which `write_runs` writes once it ``is_placed``.

        It is, once all lists with smaller numbers have asked. With ``is_last`` no list after it is placed.
        """
        with self._as_builder():
            self.extents.ask(number, self._wanted(runs, columns), is_last=is_last)

    def _place(
        self, runs: Sequence[tuple[int, int]], columns: Sequence[Packed], number: int | None
    ) -> list[list[Placed]]:
        """Return where each run goes in the heap of each field; nothing for a fixed one."""
        placed: list[list[Placed]] = [[] for _ in columns]
        wanted, firsts = self._wanted(runs, columns), list[int]()
        if number is not None:
            firsts = self.extents.take(number)
        elif wanted:
            firsts = self.extents.place(wanted)
        for one, at in zip(wanted, firsts, strict=True):
            placed[one.field_index].append(Placed(at, one.size))
        return placed

    def _wanted(self, runs: Sequence[tuple[int, int]], columns: Sequence[Packed]) -> list[Wanted]:
        wanted: list[Wanted] = []
        if not runs:  # no row of a list could be read: there are no columns
            return wanted
        for index, (field, packed) in enumerate(zip(self.schema.fields, columns, strict=True)):
            if field.kind != "fixed":
                assert packed.dims is not None
                counts, heap, done = element_counts(packed.dims), ragged_files(self.root, field).heap, 0
                for first, count in runs:
                    size = int(counts[done : done + count].sum()) * field.itemsize
                    wanted.append(Wanted(index, heap, first, first + count, size))
                    done += count
        return wanted

    def _write_ragged(
        self, field: Field, runs: Sequence[tuple[int, int]], packed: Packed, placed: Sequence[Placed]
    ) -> int:
        assert packed.dims is not None
        counts, paths = element_counts(packed.dims), ragged_files(self.root, field)
        ranges = _joined(placed)
        parts = [packed.buffers] if len(ranges) == 1 else _cut(packed.buffers, [one.size for one in ranges])
        for one, buffers in zip(ranges, parts, strict=True) if ranges else ():
            files.write_all_at(self._handles(paths.heap), buffers, one.at)
        done, start_bytes, dims_bytes = 0, INT64_BYTES, packed.dims[:1].nbytes
        for (first, count), one in zip(runs, placed, strict=True):
            rows = slice(done, done + count)
            starts = consecutive_starts(counts[rows], one.at // field.itemsize)
            files.write_at(self._handles(paths.dims), packed.dims[rows], first * dims_bytes)
            files.write_at(self._handles(paths.start), starts, first * start_bytes)
            done += count
        return sum(one.size for one in ranges) + done * (start_bytes + dims_bytes)

    def close(self) -> None:
        """Close its files."""
        self._handles.close()


def _joined(placed: Sequence[Placed]) -> list[Placed]:
    """Join ranges of bytes that follow one another, and leave out those without bytes."""
    found: list[Placed] = []
    for one in placed:
        if found and found[-1].at + found[-1].size == one.at:
            found[-1] = Placed(found[-1].at, found[-1].size + one.size)
        elif one.size:
            found.append(one)
    return found


def _cut(buffers: Sequence[Bytes], sizes: Sequence[int]) -> Iterator[list[Bytes]]:
    """Cut byte buffers, one after another, into parts of so many bytes. Yield the buffers of each part."""
    rest = deque(buffers)
    for size in sizes:
        part = []
        while size:
            buffer = rest.popleft()
            part.append(buffer[:size])
            if len(buffer) > size:
                rest.appendleft(buffer[size:])
            size -= len(part[-1])
        yield part
