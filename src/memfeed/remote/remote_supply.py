"""The rows of a store at an address: brought into a cache directory before they are read, as `RowSupply` says.

It finds the byte ranges of rows in the files of a store, and their chunks.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from memfeed.building.service import Service
from memfeed.building.unit_queue import NONE, RowUnits, UnitQueue, first_uses
from memfeed.errors import MemfeedError, StoreError
from memfeed.remote.caches import Remote, bounded
from memfeed.remote.directory import CacheDirectory
from memfeed.remote.fetching import Fetching, RangeReader
from memfeed.remote.ranges import MOST_CHUNKS, ChunkTable
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field, Schema
from memfeed.store import format
from memfeed.store.backing import Backing, store_column
from memfeed.store.columns import Column
from memfeed.store.manifest import CHUNK_BYTES
from memfeed.store.ragged import column_files, record_sizes
from memfeed.store.row_supply import FillProgress, ReadRequest
from memfeed.system.messages import format_bytes
from memfeed.system.progress import write_line

Places = Iterator[tuple[str, Int64Array, Int64Array]]
"""Files, the byte at which each row begins, and the bytes of each row, int64 [k]."""


class RowByteRanges:
    """The places of rows. A ragged column says where its rows lie once the bytes of start and dims are there.

    Args:
        schema: the fields of the store.
        row_count: its rows.
        table: its chunks.
        column: returns the column of a field, by its index.
        are_absent: which of some chunks (int64 [k]) are not there, bool [k].
    """

    def __init__(
        self,
        schema: Schema,
        row_count: int,
        table: ChunkTable,
        column: Callable[[int], Column],
        are_absent: Callable[[Int64Array], npt.NDArray[np.bool_]],
    ) -> None:
        self._schema, self._table, self._column, self._are_absent = schema, table, column, are_absent
        self._names = [list(column_files(field, row_count)) for field in schema]

    def _fields(self, reader: ReadRequest) -> Iterator[tuple[int, Field]]:
        chosen: Sequence[int] = range(len(self._schema)) if reader.fields is None else reader.fields
        return ((index, self._schema.fields[index]) for index in chosen)

    def fixed(self, reader: ReadRequest, rows: Int64Array) -> Places:
        """Yield the places of rows in fixed columns."""
        for index, field in self._fields(reader):
            if field.kind == "fixed":
                yield self._names[index][0], rows * field.row_bytes, np.full(len(rows), field.row_bytes)

    def _offsets(self, reader: ReadRequest, rows: Int64Array) -> Places:
        """Yield the places of the start and dims of rows."""
        for _, field in self._fields(reader):
            for name, size in record_sizes(field).items():
                if size is not None and field.kind != "fixed":
                    yield name, rows * size, np.full(len(rows), size)

    def elements(self, reader: ReadRequest, rows: Int64Array) -> Places:
        """Yield the places of rows in heaps. Their start and dims must be there."""
        for index, field in self._fields(reader):
            if field.kind != "fixed":
                located = self._column(index).locate(rows)
                yield self._names[index][2], located.starts, located.lengths

    def offset_chunks(self, reader: ReadRequest, rows: Int64Array) -> Int64Array:
        """Return the chunks of the start and dims of rows, each once; small files are taken whole."""
        found = [np.empty(0, np.int64)]
        for name, starts, lengths in self._offsets(reader, rows):
            first, last = self._table.of_file(name)
            is_small = last - first <= MOST_CHUNKS
            found.append(np.arange(first, last) if is_small else self._table.of_places(name, starts, lengths))
        return first_uses(np.concatenate(found))

    def record_chunks(self, reader: ReadRequest, rows: Int64Array) -> Int64Array:
        """Return the chunks of what has one size in all rows: start and dims, and fixed columns; each once."""
        fixed = [self._table.of_places(*place) for place in self.fixed(reader, rows)]
        return np.concatenate([self.offset_chunks(reader, rows), *fixed])

    def element_chunks(self, reader: ReadRequest, rows: Int64Array) -> Int64Array:
        """Return the chunks of ``elements``, each once."""
        found = [self._table.of_places(*place) for place in self.elements(reader, rows)]
        return first_uses(np.concatenate([np.empty(0, np.int64), *found]))

    def chunks(self, reader: ReadRequest, rows: Int64Array) -> RowUnits:
        """Return the chunks of rows: those of their records, and as soon as these are there those of heaps."""
        rows = rows.astype(np.int64, copy=False)
        records = self.record_chunks(reader, rows)
        has_heaps = any(field.kind != "fixed" for _, field in self._fields(reader))
        if has_heaps and self._are_absent(records).any():
            return RowUnits(records, False)
        return RowUnits(np.concatenate([records, self.element_chunks(reader, rows)]), True)


TICK_SECONDS = 0.25
SYNC_SECONDS = 30.0
ROOM_FACTOR = 1.5  # of a cache, over the bytes of the rows that an order mixes: measured, docs/notes/remote.md


class RemoteSupply(Service):
    """Brings the rows of a store at an address. The cache becomes a store like any other once all of it is there.

    With ``read_only``, the directory will not be a cache any more, which can grow.
    """

    finish_units, retries = 64, True

    def __init__(self, directory: CacheDirectory, objects: RangeReader, *, read_only: bool = False) -> None:
        self.directory, self._read_only = directory, read_only
        manifest, size, table = directory.manifest, directory.settings.size, directory.table
        self.keeps_rows = size is None
        self.column: Callable[[int], Column] = functools.cache(
            functools.partial(store_column, directory.root, manifest)
        )
        self._places = RowByteRanges(manifest.schema, manifest.rows, table, self.column, directory.are_absent)
        ahead = None if size is None else max(1, size // CHUNK_BYTES)
        units_of = self._places.chunks
        queue = UnitQueue(table.count, directory.are_absent, units_of=units_of, ahead=ahead, span_of=table.span)
        self._fetching = Fetching(directory, objects, queue)
        super().__init__(directory.root, queue, self._fetching.changed, _switch)
        self._kept: dict[ReadRequest, set[int]] = {}  # the chunks of the rows that each reader reads now
        self._kept_pid = os.getpid()
        self._completing = threading.Lock()
        self._has_said = False  # why the cache is not completed

    def serves(self, remote: Remote, size: int | None) -> bool:
        """Return True if this brings the rows of that store into a cache of that size, and has not ended."""
        settings = self.directory.settings
        is_same = settings.digest == format.digest(remote.manifest)
        return is_same and settings.size == bounded(size, self.directory.manifest)

    # --- what readers ask for

    def forget(self, reader: ReadRequest) -> None:
        """See ``RowSupply``."""
        if not self._stopping.is_set():  # as when the interpreter ends, which takes modules apart
            self._let_go(reader)
            super().forget(reader)

    def wait(self, reader: ReadRequest, rows: Int64Array) -> npt.NDArray[np.bool_] | None:
        """See ``RowSupply``. Raises StoreError if the cache has no room for all these rows at once."""
        if self._done.is_set():
            return None
        self.note_wait(reader, rows)
        self._let_go(reader)
        rows = rows.astype(np.int64, copy=False)
        if self.keeps_rows:
            self._await_rows(reader, rows)
        elif len(missing := self._first_missing(reader, rows)):
            self._require_room_at_once(reader, missing)
            self._let_go(reader)  # a reader that waits for room must not take the room that another one waits for
            self.ask(missing)
            with self.directory.waiting():
                self._await_rows(reader, rows, missing)
        return None

    def ready(self, reader: ReadRequest, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """See ``RowSupply``."""
        if self._done.is_set():
            return np.ones(len(rows), bool)
        each = rows.astype(np.int64)[:, None]
        return np.array([not len(self._first_missing(reader, row)) for row in each], bool)

    def _first_missing(self, reader: ReadRequest, rows: Int64Array) -> Int64Array:
        """Return the missing chunks of records of rows; if there are none, those of heaps."""
        missing = self._missing(reader, self._places.record_chunks(reader, rows))
        return missing if len(missing) else self._missing(reader, self._places.element_chunks(reader, rows))

    def _await_rows(self, reader: ReadRequest, rows: Int64Array, asked: Int64Array = NONE) -> None:
        """Return once all these rows are there. In a small cache they then stay until the reader lets them go.

        The chunks ``asked`` for before are not tried again if they have failed since.
        """
        for chunks_of in (self._places.record_chunks, self._places.element_chunks):
            missing = self._missing(reader, chunks_of(reader, rows))
            self._require_room_at_once(reader, missing)
            self.bring(missing, lambda left: self._missing(reader, left), asked)

    def _missing(self, reader: ReadRequest, chunks: Int64Array) -> Int64Array:
        """Return those of ``chunks`` that are not there, or that this reader could not keep."""
        if self.keeps_rows:
            return self.absent(chunks)
        kept = self._kept.setdefault(reader, set())
        new = [chunk for chunk in chunks.tolist() if chunk not in kept and self.directory.units.keep(chunk)]
        kept.update(new)
        self.directory.used[new] = time.monotonic()
        return np.array([chunk for chunk in chunks.tolist() if chunk not in kept], np.int64)

    def _let_go(self, reader: ReadRequest) -> None:
        """Let the chunks be removed that a reader kept."""
        if self._kept_pid != os.getpid():  # a forked child has none of its parent's locks
            self._kept, self._kept_pid = {}, os.getpid()
        for chunk in self._kept.pop(reader, ()):
            self.directory.units.let_go(chunk)

    # --- a cache that is smaller than the store

    def require_room(self, mixed_rows: int) -> None:
        """See ``RowSupply``."""
        size, manifest = self.directory.settings.size, self.directory.manifest
        total, offsets = sum(manifest.files.values()), self.directory.offset_bytes
        need = min(total, offsets + int(ROOM_FACTOR * (total - offsets) * mixed_rows / max(manifest.rows, 1)))
        if size is not None and size < need:
            mixed, advice = f"{mixed_rows:,} rows", ""
            if mixed_rows >= manifest.rows:
                mixed, advice = "all rows", "shuffle=memfeed.Blocks(), or "
            raise StoreError(
                f"{self.directory.root}: found a cache of {format_bytes(size)} for an order that mixes {mixed}; "
                f"expected room for {format_bytes(need)} ({need:,} bytes): {advice}a larger size=, or none, for all "
                f"{format_bytes(total)}"
            )

    def _require_room_at_once(self, reader: ReadRequest, missing: Int64Array) -> None:
        size = self.directory.settings.size
        chunks = np.array([*self._kept.get(reader, ()), *missing.tolist()], np.int64)
        chunks = chunks[~self.directory.are_offsets(chunks)]
        need = int(self.directory.table.bytes_of(chunks).sum()) + self.directory.offset_bytes
        if size is not None and need > size:
            raise StoreError(
                f"{self.directory.root}: found a cache of {format_bytes(size)} for rows that lie in chunks of "
                f"{format_bytes(need)}; expected room for all rows that are read at once: read fewer rows at a time, "
                "or give a larger size="
            )

    # --- the store as a whole

    def substitute_row(self) -> int:
        """See ``RowSupply``; no row of such a store is skipped."""
        raise NotImplementedError

    def progress(self) -> FillProgress:
        """See ``RowSupply``: estimated from the bytes that are there, because rows lie in several chunks."""
        total, present = sum(self.directory.manifest.files.values()), self.directory.bytes_present
        rows = self.directory.manifest.rows
        return FillProgress(rows if present >= total else rows * present // max(total, 1), rows)

    def skipped(self) -> tuple[int, ...]:
        """See ``RowSupply``: those that the conversion of the store left out, which have no row in it."""
        return self.directory.manifest.skipped

    def finish(self, brought: Callable[[], object] = lambda: None) -> None:
        """See ``RowSupply``. Raises StoreError where the cache has no room for the whole store."""
        directory = self.directory
        if not self.keeps_rows:
            raise StoreError(
                f"{directory.root}: found a cache of {format_bytes(directory.settings.size or 0)} for a store of "
                f"{format_bytes(sum(directory.manifest.files.values()))}; expected room for all of it to finish: leave "
                "size= out"
            )
        super().finish(brought)

    # --- see `Service`

    def begin(self, backing: Backing) -> None:
        """Let ``backing`` read the cache. The thread starts now: a forked child may be the first to ask for a row."""
        self.follow(backing)
        with self.changed:
            super().start()

    def start(self) -> None:
        """Start the threads, unless they run. The caller has ``changed``."""
        self._fetching.start()
        super().start()

    def _feed(self) -> None:
        self.changed.notify_all()

    def _stop_supplier(self) -> None:
        self._fetching.stop()
        if self._thread is None:
            self.directory.leave()

    def _will_commit(self) -> bool:
        return self._completing.locked()

    def _await_commit(self) -> bool:
        with self._completing:
            if not self._is_over():
                self.directory.commit(read_only=self._read_only)
                self._switch_backings()
        return True

    def _serve(self) -> None:
        sync_due, complete_due = time.monotonic() + SYNC_SECONDS, 0.0
        may_commit = self.keeps_rows and not self._read_only
        while not self._is_over():
            self.serve_children(TICK_SECONDS)
            now = time.monotonic()
            try:
                if now > sync_due:
                    sync_due = now + SYNC_SECONDS
                    self.directory.sync()
                if now > complete_due and may_commit and self.directory.is_complete():
                    complete_due = now + SYNC_SECONDS
                    self._await_commit()
            except (MemfeedError, OSError) as error:  # rows are read all the same, and children need this thread
                self._say_once(error)

    def _end(self) -> list[Callable[[], object]]:
        sync = [] if self._done.is_set() else [self.directory.sync]
        return [self._fetching.stop, self._fetching.join, *sync, self.directory.leave]

    def _say_once(self, error: Exception) -> None:
        """Tell the user why the cache is no store yet, unless its directory was removed."""
        if not self._has_said and self.root.exists():
            self._has_said = True
            write_line(f"memfeed: {error}. The cache is used as it is; this is tried again every {SYNC_SECONDS:.0f} s")


def _switch(backing: Backing) -> None:
    backing.supply = backing.remake = None
