"""The rows of a store at an address: brought into a cache directory before they are read, as `RowSupply` says."""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from memfeed.building.unit_queue import UnitQueue
from memfeed.errors import StoreError
from memfeed.remote.caches import Remote, bounded
from memfeed.remote.children import ChildWait
from memfeed.remote.directory import CacheDirectory
from memfeed.remote.fetching import Fetching, RangeReader
from memfeed.remote.row_byte_ranges import RowByteRanges
from memfeed.remote.service import CacheService
from memfeed.schema.codec import Int64Array
from memfeed.store import format
from memfeed.store.backing import Backing, store_column
from memfeed.store.column import Column
from memfeed.store.manifest import CHUNK_BYTES
from memfeed.store.row_supply import FillProgress, ReadRequest
from memfeed.system.units import format_bytes

FINISH_CHUNKS = 256
ROOM_FACTOR = 1.5  # of a cache, over the bytes of the rows that an order mixes: measured, docs/notes/remote.md


class RemoteSupply:
    """Brings the rows of a store at an address. It ends with the last store that holds it."""

    in_caller = False

    def __init__(self, directory: CacheDirectory, objects: RangeReader) -> None:
        self.directory = directory
        manifest, size = directory.manifest, directory.settings.size
        self.keeps_rows = size is None
        self.column: Callable[[int], Column] = functools.cache(
            functools.partial(store_column, directory.root, manifest)
        )
        self._places = RowByteRanges(manifest.schema, manifest.rows, directory.table, self.column, directory.are_absent)
        ahead = None if size is None else max(1, size // CHUNK_BYTES)
        table, units_of = directory.table, self._places.chunks
        self._queue = UnitQueue(table.count, directory.are_absent, units_of=units_of, ahead=ahead, span_of=table.span)
        self._fetching = Fetching(directory, objects, self._queue)
        self._service = CacheService(directory, self._fetching)
        self._kept: dict[ReadRequest, set[int]] = {}  # the chunks of the rows that each reader reads now
        self._kept_pid = os.getpid()
        weakref.finalize(self, self._service.release).atexit = False  # `end_at_exit` does that

    def serves(self, remote: Remote, size: int | None) -> bool:
        """Return True if this brings the rows of that store into a cache of that size, and has not ended."""
        settings = self.directory.settings
        is_same = settings.digest == format.digest(remote.manifest)
        return is_same and settings.size == bounded(size, self.directory.manifest)

    # --- what readers ask for

    def want(self, reader: ReadRequest, rows: Int64Array) -> None:
        """See ``RowSupply``."""
        if not self._service.is_elsewhere() and not self._service.is_done.is_set():
            with self._fetching.changed:
                self._queue.want(reader, rows)
                self._service.start()
                self._fetching.changed.notify()

    def forget(self, reader: ReadRequest) -> None:
        """See ``RowSupply``."""
        if self._fetching.is_stopping:  # as when the interpreter ends, which takes modules apart
            return
        self._let_go(reader)
        if not self._service.is_elsewhere():
            with self._fetching.changed:
                self._queue.forget(reader)

    def wait(self, reader: ReadRequest, rows: Int64Array) -> npt.NDArray[np.bool_] | None:
        """See ``RowSupply``. Raises StoreError if the cache has no room for all these rows at once."""
        if self._service.is_done.is_set():
            return None
        if not self._service.is_elsewhere():
            with self._fetching.changed:
                self._queue.wait(reader, rows)
        self._let_go(reader)
        rows = rows.astype(np.int64, copy=False)
        if self.keeps_rows:
            self._await_rows(reader, rows)
        elif len(missing := self._missing(reader, self._places.record_chunks(reader, rows))) or (
            self._places.has_elements(reader)
            and len(missing := self._missing(reader, self._places.element_chunks(reader, rows)))
        ):
            self._require_room_at_once(reader, missing)
            self._let_go(reader)  # a reader that waits for room must not take the room that another one waits for
            self._ask(missing)(missing)
            with self.directory.waiting():
                self._await_rows(reader, rows)
        return None

    def _await_rows(self, reader: ReadRequest, rows: Int64Array) -> None:
        self._await(reader, self._places.record_chunks(reader, rows))
        if self._places.has_elements(reader):
            self._await(reader, self._places.element_chunks(reader, rows))

    def _await(self, reader: ReadRequest, chunks: Int64Array) -> None:
        """Return once all these chunks are there. In a small cache they then stay until the reader lets them go."""
        missing = self._missing(reader, chunks)
        if not len(missing):
            return
        self._require_room_at_once(reader, missing)
        check = self._ask(missing)
        while len(missing := self._missing(reader, missing)):
            check(missing)

    def _ask(self, chunks: Int64Array) -> Callable[[Int64Array], None]:
        """Ask for chunks before all others. Return a function that waits a moment, and raises what went wrong."""
        if self._service.is_elsewhere():
            return ChildWait(self._service.children)
        with self._fetching.changed:
            self._service.start()
        self._fetching.ask(chunks)
        return self._fetching.wait

    def _missing(self, reader: ReadRequest, chunks: Int64Array) -> Int64Array:
        """Return those of ``chunks`` that are not there, or that this reader could not keep."""
        if self.keeps_rows:
            return chunks[self.directory.are_absent(chunks)]
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
                f"expected room for {format_bytes(need)}: {advice}a larger size=, or none, for all "
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

    def follow(self, backing: Backing) -> None:
        """See ``RowSupply``."""
        self._service.follow(backing)

    def progress(self) -> FillProgress:
        """See ``RowSupply``: estimated from the bytes that are there, because rows lie in several chunks."""
        total, present = sum(self.directory.manifest.files.values()), self.directory.bytes_present
        rows = self.directory.manifest.rows
        return FillProgress(rows if present >= total else rows * present // max(total, 1), rows)

    def skipped(self) -> tuple[int, ...]:
        """See ``RowSupply``: those that the conversion of the store left out, which have no row in it."""
        return self.directory.manifest.skipped

    def finish(self) -> None:
        """See ``RowSupply``. Raises StoreError where the cache has no room for the whole store."""
        directory = self.directory
        if not self.keeps_rows:
            raise StoreError(
                f"{directory.root}: found a cache of {format_bytes(directory.settings.size or 0)} for a store of "
                f"{format_bytes(sum(directory.manifest.files.values()))}; expected room for all of it to finish: leave "
                "size= out"
            )
        every, reader = np.arange(directory.table.count), ReadRequest()
        while len(absent := every[directory.are_absent(every)]):
            self._await(reader, absent[:FINISH_CHUNKS])
        if not self._service.is_elsewhere():
            self._service.complete()
