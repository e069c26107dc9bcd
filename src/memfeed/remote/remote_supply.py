"""The rows of a store at an address: brought into a cache directory before they are read, as `RowSupply` says."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from memfeed.errors import MemfeedError, StoreError
from memfeed.remote.caches import Remote, bounded
from memfeed.remote.children import ChildRequests
from memfeed.remote.demand import Demand, RowChunks
from memfeed.remote.directory import CacheDirectory
from memfeed.remote.fetching import Fetching, Reading
from memfeed.remote.row_byte_ranges import Places, RowByteRanges
from memfeed.remote.scratch import Piece, Scratch, scratch_columns, scratch_files
from memfeed.remote.single_rows import SingleRows
from memfeed.schema.codec import Int64Array
from memfeed.store import format
from memfeed.store.backing import Backing, store_column
from memfeed.store.column import Column
from memfeed.store.manifest import CHUNK_BYTES
from memfeed.store.row_supply import FillProgress, ReadRequest
from memfeed.system.progress import write_line
from memfeed.system.threads import end_at_exit
from memfeed.system.units import format_bytes

POLL_SECONDS = 0.001
ASK_SECONDS = 0.05  # after which a child asks again for what it waits for
TICK_SECONDS = 0.25
SYNC_SECONDS = 30.0
END_SECONDS = 60.0  # that the end of a process waits for a commit; the next process makes up for what is left
FINISH_CHUNKS = 256


class RemoteSupply:
    """Brings the rows of a store at an address. It ends with the last store that holds it."""

    in_caller = False

    def __init__(self, directory: CacheDirectory, objects: Reading) -> None:
        self._work = _RemoteWork(directory, objects)
        self.keeps_rows = directory.settings.size is None
        weakref.finalize(self, self._work.release).atexit = False  # `end_at_exit` does that

    @property
    def directory(self) -> CacheDirectory:
        """The cache."""
        return self._work.directory

    def serves(self, remote: Remote, size: int | None) -> bool:
        """Return True if this brings the rows of that store into a cache of that size, and has not ended."""
        settings = self.directory.settings
        is_same = settings.digest == format.digest(remote.manifest)
        return is_same and settings.size == bounded(size, self.directory.manifest)

    @property
    def column(self) -> Any:
        """A function that returns the column of a field, by its index."""
        return self._work.column

    def want(self, reader: ReadRequest, rows: Int64Array) -> None:
        """See ``RowSupply``."""
        self._work.want(reader, rows)

    def forget(self, reader: ReadRequest) -> None:
        """See ``RowSupply``."""
        self._work.forget(reader)

    def wait(self, reader: ReadRequest, rows: Int64Array) -> npt.NDArray[np.bool_] | None:
        """See ``RowSupply``."""
        self._work.wait(reader, rows)
        return None

    def refetched_bytes(self, shuffle_span: int) -> int:
        """See ``RowSupply``: what has no room, row by row. Chunks that come in whole are not counted."""
        size, total = self.directory.settings.size, sum(self.directory.manifest.files.values())
        return total - size if size is not None and self._work.is_scattered(ReadRequest(None, shuffle_span)) else 0

    def substitute_row(self) -> int:
        """See ``RowSupply``; no row of such a store is skipped."""
        raise NotImplementedError

    def follow(self, backing: Backing) -> None:
        """See ``RowSupply``."""
        self._work.follow(backing)

    def progress(self) -> FillProgress:
        """See ``RowSupply``."""
        return self._work.progress()

    def skipped(self) -> tuple[int, ...]:
        """See ``RowSupply``: those that the conversion of the store left out, which have no row in it."""
        return self._work.manifest.skipped

    def finish(self) -> None:
        """See ``RowSupply``. Raises StoreError where the cache has no room for the whole store."""
        self._work.finish()


class _RemoteWork:
    """The work of a `RemoteSupply`. Its threads hold this object, and not the supply, which can then be freed."""

    def __init__(self, directory: CacheDirectory, objects: Reading) -> None:
        manifest = directory.manifest
        self.directory, self.manifest, self._objects = directory, manifest, objects
        self._scratch = None if directory.settings.size is None else Scratch(scratch_files(manifest))
        self._columns: dict[int, Column] = {}
        self._bounded = [] if self._scratch is None else scratch_columns(directory.root, manifest, self._scratch)
        self.places = RowByteRanges(manifest.schema, manifest.rows, directory.table, self.column)
        self._pid, self._directory_pid = os.getpid(), os.getpid()
        self._children = ChildRequests()
        size = directory.settings.size
        ahead = None if size is None else max(1, size // CHUNK_BYTES)
        self._demand = Demand(directory.table, self._chunks_of, directory.are_absent, ahead, self.is_scattered)
        self._fetching = Fetching(directory, objects, self._demand, self._arrived)
        self._rows = SingleRows(directory, objects, self._fetching)
        self._awaited: list[dict[int, list[tuple[int, memoryview]]]] = []  # by chunk: where its bytes go in memory
        self._awaited_lock, self._completing = threading.Lock(), threading.Lock()
        self._backings: weakref.WeakSet[Backing] = weakref.WeakSet()
        self._done = threading.Event()
        self._stopping = threading.Event()
        self._service: threading.Thread | None = None
        self._has_said = False  # why the cache is not completed

    def column(self, field_index: int) -> Column:
        """Return the column of a field."""
        if self._bounded:
            return self._bounded[field_index]
        if field_index not in self._columns:
            self._columns[field_index] = store_column(self.directory.root, self.manifest, field_index)
        return self._columns[field_index]

    def release(self) -> None:
        """Let the threads end."""
        if os.getpid() == self._pid:
            self._stopping.set()
            self._fetching.stop()
            if self._service is None:
                self.directory.leave()

    def join(self) -> None:
        """Wait until the requests that are under way have ended, and a commit."""
        if os.getpid() == self._pid:
            self._fetching.join()
            if self._completing.acquire(timeout=END_SECONDS):
                self._completing.release()

    # --- what readers ask for

    def want(self, reader: ReadRequest, rows: Int64Array) -> None:
        if not self._is_elsewhere() and not self._done.is_set():
            with self._fetching.changed:
                self._demand.add(reader, rows)
                self._start()
                self._fetching.changed.notify()

    def forget(self, reader: ReadRequest) -> None:
        if self._fetching.is_stopping:  # as when the interpreter ends, which takes modules apart
            return
        if self._scratch is not None:
            self._scratch.release(reader)
        if not self._is_elsewhere():
            self._rows.forget(reader)
            with self._fetching.changed:
                self._demand.forget(reader)

    def wait(self, reader: ReadRequest, rows: Int64Array) -> None:
        if self._done.is_set():
            return
        if not self._is_elsewhere():
            with self._fetching.changed:
                self._demand.waits(reader, rows)
        rows = rows.astype(np.int64, copy=False)
        if self._scratch is not None:
            if self.is_scattered(reader):
                self._ask_for_rows_ahead(reader)
            self._bring(self._scratch, reader, rows)
            return
        self._await(self.places.record_chunks(reader, rows))
        if self.places.has_elements(reader):
            self._await(self.places.element_chunks(reader, rows))

    def _chunks_of(self, reader: ReadRequest, rows: Int64Array) -> RowChunks:
        return self.places.chunks(reader, rows.astype(np.int64, copy=False), self.directory.are_absent)

    def is_scattered(self, reader: ReadRequest) -> bool:
        """Return True if a reader reads rows from more chunks at a time than the cache has room for."""
        total, size = sum(self.manifest.files.values()), self.directory.settings.size
        return size is not None and reader.shuffle_span * total > size * self.manifest.rows

    def _is_elsewhere(self) -> bool:
        """Return True in a forked child, which has neither threads nor connections."""
        if (pid := os.getpid()) != self._directory_pid:
            self.directory.reopen()
            self._directory_pid = pid
        return pid != self._pid

    def _await(self, chunks: Int64Array) -> None:
        """Return once all these chunks are there."""
        absent = chunks[self.directory.are_absent(chunks)]
        if len(absent):
            with self._asking(absent) as check:
                while len(absent := absent[self.directory.are_absent(absent)]):
                    check(absent)

    @contextlib.contextmanager
    def _asking(self, chunks: Int64Array) -> Any:
        """Ask for chunks before all others. Yields a function that waits a moment, and raises what went wrong."""
        if self._is_elsewhere():
            yield _ChildWait(self._children)
            return
        with self._fetching.changed:
            self._start()
        self._fetching.ask(chunks)
        yield self._fetching.wait

    # --- a cache that has not room for all

    def _bring(self, scratch: Scratch, reader: ReadRequest, rows: Int64Array) -> None:
        """Copy rows into the memory that columns read."""
        scratch.release(reader)
        self._copy(scratch, reader, self.places.fixed(reader, rows))
        if self.places.has_elements(reader):
            self._await(self.places.offset_chunks(reader, rows))
            self._copy(scratch, reader, self.places.elements(reader, rows))

    def _copy(self, scratch: Scratch, reader: ReadRequest, places: Places) -> None:
        pieces = [piece for place in places for piece in merged_pieces(*place)]
        scratch.hold(reader, pieces)
        left: dict[int, list[tuple[int, memoryview]]] = {}
        for chunk, start, stop in self._cut(pieces):
            name = self.directory.table.at(chunk).name
            left.setdefault(chunk, []).append((start, scratch.part((name, start, stop))))
        if self._copied_from_cache(left):
            return
        if self.is_scattered(reader) and not self._is_elsewhere():
            self._rows.fill(reader, left)
            if not left:
                return
        with self._awaited_lock:
            self._awaited.append(left)
        try:
            with self._asking(np.array(list(left), np.int64)) as check:
                while not self._copied_from_cache(left):
                    check(np.array(list(left), np.int64))
        finally:
            with self._awaited_lock:
                self._awaited = [other for other in self._awaited if other is not left]

    def _cut(self, pieces: list[Piece]) -> Iterator[tuple[int, int, int]]:
        """Yield the chunk, the first byte and the one after the last of each part of pieces that lies in one chunk."""
        table = self.directory.table
        for name, start, stop in pieces:
            first, step = table.of_file(name)[0], table.steps[name]
            while start < stop:
                end = min(stop, (start // step + 1) * step)
                yield first + start // step, start, end
                start = end

    def _ask_for_rows_ahead(self, reader: ReadRequest) -> None:
        """Ask for the rows of the next batches of a scattered reader whose chunks have no room."""
        if self._is_elsewhere():
            return
        with self._fetching.changed:
            coming = list(islice(self._demand.coming(reader), SingleRows.batches_ahead))
        for rows in self._rows.not_asked(reader, coming):
            ids = rows.astype(np.int64, copy=False)
            if self.directory.are_absent(self.places.offset_chunks(reader, ids)).any():
                return  # where the rows lie is not known yet
            places = [*self.places.fixed(reader, ids), *self.places.elements(reader, ids)]
            pieces = [piece for place in places for piece in merged_pieces(*place)]
            self._rows.ask(reader, rows, list(self._cut(pieces)))

    def _copied_from_cache(self, left: dict[int, list[tuple[int, memoryview]]]) -> bool:
        """Copy what the cache has, and remove it from ``left``. Return True if nothing is left."""
        for chunk, pieces in list(left.items()):
            if self.directory.copy(chunk, *zip(*pieces, strict=True)):
                left.pop(chunk, None)
        return not left

    def _arrived(self, chunk: int, data: memoryview) -> None:
        """Give readers what they wait for, also if the cache has no room for it."""
        begin = self.directory.table.at(chunk).start
        with self._awaited_lock:
            for left in self._awaited:
                for start, out in left.pop(chunk, ()):
                    out[:] = data[start - begin : start - begin + len(out)]

    # --- the store as a whole

    def follow(self, backing: Backing) -> None:
        self._backings.add(backing)
        if self._done.is_set():
            self._settle(backing)

    def progress(self) -> FillProgress:
        """Return how many rows are there, from the bytes that are: rows lie in several chunks."""
        total, present = sum(self.manifest.files.values()), self.directory.bytes_present
        rows = self.manifest.rows
        return FillProgress(rows if present >= total else rows * present // max(total, 1), rows)

    def finish(self) -> None:
        if self._scratch is not None:
            directory = self.directory
            raise StoreError(
                f"{directory.root}: found a cache of {format_bytes(directory.settings.size or 0)} for a store of "
                f"{format_bytes(sum(self.manifest.files.values()))}; expected room for all of it to finish: leave "
                "size= out"
            )
        every = np.arange(self.directory.table.count)
        while len(absent := every[self.directory.are_absent(every)]):
            self._await(absent[:FINISH_CHUNKS])
        if not self._is_elsewhere():
            self._complete()

    def _start(self) -> None:
        """Start the threads. The caller has the lock of the fetching."""
        self._fetching.start()
        if self._service is None:
            end_at_exit(self)
            self._service = threading.Thread(target=self._serve, name="memfeed-cache", daemon=True)
            self._service.start()

    def _serve(self) -> None:
        """Fetch for children; let the cache survive a power loss; notice that it is complete."""
        try:
            self._serve_until_done()
        finally:
            self._fetching.join()
            with contextlib.suppress(MemfeedError, OSError):  # the directory may have been removed
                self.directory.sync()
            self.directory.leave()

    def _serve_until_done(self) -> None:
        sync_due, complete_due = time.monotonic() + SYNC_SECONDS, 0.0
        while not self._stopping.is_set() and not self._done.is_set():
            chunks = self._children.receive(TICK_SECONDS)
            if len(chunks):
                self._fetch_for_children(chunks)
            now = time.monotonic()
            try:
                if now > sync_due:
                    sync_due = now + SYNC_SECONDS
                    self.directory.sync()
                if now > complete_due and self._scratch is None and self.directory.is_complete():
                    complete_due = now + SYNC_SECONDS
                    self._complete()
            except (MemfeedError, OSError) as error:  # rows are read all the same, and children need this thread
                self._say_once(error)

    def _say_once(self, error: Exception) -> None:
        """Tell the user why the cache is no store yet, unless its directory was removed."""
        if not self._has_said and self.directory.root.exists():
            self._has_said = True
            write_line(f"memfeed: {error}. The cache is used as it is; this is tried again every {SYNC_SECONDS:.0f} s")

    def _fetch_for_children(self, chunks: Int64Array) -> None:
        with self._fetching.changed:
            for chunk in chunks.tolist():
                if chunk in self._fetching.failed:
                    self._children.report(self._fetching.failed.pop(chunk))
            absent = chunks[self.directory.are_absent(chunks)]
            self._demand.prioritise(absent, must_stay=True)
            self._fetching.changed.notify_all()

    def _complete(self) -> None:
        """Make the cache a store like any other, once all of it is there."""
        with self._completing:
            if not self._done.is_set() and not self._stopping.is_set():
                self.directory.commit()
                self._done.set()
                for backing in list(self._backings):
                    self._settle(backing)

    def _settle(self, backing: Backing) -> None:
        backing.supply = backing.remake = None


def merged_pieces(name: str, starts: Int64Array, lengths: Int64Array) -> Iterator[Piece]:
    """Yield the bytes of a file that rows take, those that touch as one piece."""
    there = lengths > 0
    order = np.argsort(starts[there], kind="stable")
    first, last = starts[there][order], np.maximum.accumulate((starts + lengths)[there][order])
    if len(first):
        cuts = np.flatnonzero(first[1:] > last[:-1]) + 1
        begins, ends = first[np.append(0, cuts)], last[np.append(cuts - 1, len(last) - 1)]
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            yield name, begin, end


class _ChildWait:
    """How a forked child waits for chunks that its parent fetches."""

    def __init__(self, children: ChildRequests) -> None:
        self._children, self._errors, self._due = children, children.error_count(), 0.0

    def __call__(self, absent: Int64Array) -> None:
        if self._children.error_count() != self._errors:
            raise self._children.last_error()
        if time.monotonic() >= self._due:
            self._children.ask(absent)
            self._due = time.monotonic() + ASK_SECONDS
        time.sleep(POLL_SECONDS)
