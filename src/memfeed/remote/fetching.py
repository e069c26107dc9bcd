"""Fetch chunks of a store at an address into its cache directory: as many requests at once as the link is worth."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import xxhash

from memfeed.errors import CorruptStoreError, MemfeedError, StoreError
from memfeed.remote.chunks import other_bytes
from memfeed.remote.demand import Demand
from memfeed.remote.directory import CacheDirectory
from memfeed.remote.ranges import MOST_CHUNKS, ByteRange
from memfeed.schema.codec import Int64Array
from memfeed.store.checksums import Chunk

LEAST_IN_FLIGHT, MOST_IN_FLIGHT = 4, 32
WORTH = 1.1  # twice as many requests have to bring so much more
ELSEWHERE_SECONDS = 0.02  # after which a chunk that another process fetches is looked at again
TICK_SECONDS = 0.25
POLL_SECONDS = 0.001
JOIN_SECONDS = 5.0
CHUNKS_A_PART = 64  # 256 MiB


class Reading(Protocol):
    """What reads the files of a store at an address."""

    def read(self, name: str, first: int, size: int, accept: Callable[[memoryview], bool] | None = None) -> memoryview:
        """Return ``size`` bytes of a file from byte ``first``, once ``accept`` has returned True for them."""


class InFlight:
    """How many requests are under way at once: twice as many, as long as that brings more bytes a second.

    The bytes a second of all are those of one request, on average, times their number. If the link is full, twice as
    many requests take twice as long each.
    """

    def __init__(self) -> None:
        self.count = LEAST_IN_FLIGHT
        self._best = 0.0
        self._requests, self._bytes, self._seconds = 0, 0, 0.0

    def note(self, size: int, seconds: float, working: int) -> None:
        """Note a request that brought ``size`` bytes while ``working`` requests were under way."""
        self._requests, self._bytes = self._requests + 1, self._bytes + size
        self._seconds += seconds / working
        if self._requests < 2 * self.count:
            return
        rate = self._bytes / max(self._seconds, 1e-9)
        if rate > WORTH * self._best:
            self._best = rate
            self.count = min(2 * self.count, MOST_IN_FLIGHT)
        self._requests, self._bytes, self._seconds = 0, 0, 0.0


class Fetching:
    """The threads of this process that fetch chunks, and what they are to fetch.

    Args:
        directory: where chunks go.
        objects: where they come from.
        demand: which chunks are wanted; it is used under ``changed``.
        arrived: called with a chunk and its bytes, under no lock.
    """

    def __init__(
        self,
        directory: CacheDirectory,
        objects: Reading,
        demand: Demand,
        arrived: Callable[[int, memoryview], None] = lambda chunk, data: None,
    ) -> None:
        self.directory, self.demand = directory, demand
        self._objects, self._arrived = objects, arrived
        self.changed = threading.Condition()
        self.in_flight = InFlight()
        self.failed: dict[int, MemfeedError] = {}
        self._elsewhere: dict[int, float] = {}  # chunks that other processes have, and when to look again
        self._threads: list[threading.Thread] = []
        self._working = self._working_singles = 0
        self._singles: deque[tuple[Future[memoryview], Callable[[], memoryview]]] = deque()
        self._stopping = False

    def start(self) -> None:
        """Start threads, as many as there may be requests. The caller has ``changed``."""
        while len(self._threads) < self._most_at_once() and not self._stopping:
            thread = threading.Thread(target=self._work, name="memfeed-fetch", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _most_at_once(self) -> int:
        """Return how many requests may be under way: what readers wait for is asked for at once, not in rounds."""
        waited_for = max(self.demand.urgent_count, len(self._singles) + self._working_singles)
        return max(self.in_flight.count, min(waited_for, MOST_IN_FLIGHT))

    def ask(self, chunks: Int64Array) -> None:
        """Fetch chunks before all others, also those that failed before."""
        with self.changed:
            for chunk in chunks.tolist():
                self.failed.pop(chunk, None)
            self.demand.prioritise(chunks)
            self.start()
            self.changed.notify_all()

    def wait(self, absent: Int64Array) -> None:
        """Wait a moment for chunks that were asked for. Raises what keeps one of them from being fetched."""
        with self.changed:
            error = next((self.failed[chunk] for chunk in absent.tolist() if chunk in self.failed), None)
            if error is not None:
                raise error
            if self._stopping:
                raise StoreError(f"{self.directory.settings.address}: found that fetching was stopped; open it again")
            self.demand.prioritise(absent)
            self.changed.wait(POLL_SECONDS)  # another process may bring them, who notifies nobody here

    def bring(self, chunks: Int64Array, brought: Callable[[int], None] = lambda size: None) -> None:
        """Fetch chunks, and wait until all are there. ``brought`` is called with the bytes of each part of them."""
        for first in range(0, len(chunks), CHUNKS_A_PART):
            part = left = chunks[first : first + CHUNKS_A_PART]
            self.ask(left[self.directory.are_absent(left)])
            while len(left := left[self.directory.are_absent(left)]):
                self.wait(left)
            brought(int(self.directory.table.bytes_of(part).sum()))

    def submit(self, reads: Iterable[Callable[[], memoryview]]) -> list[Future[memoryview]]:
        """Run these reads in the threads, in order, before chunks that nobody waits for; return what they will give."""
        jobs = [(Future[memoryview](), read) for read in reads]
        with self.changed:
            self._singles.extend(jobs)
            self.start()
            self.changed.notify_all()
        return [future for future, _ in jobs]

    @property
    def is_stopping(self) -> bool:
        """True once nothing is fetched any more: the interpreter may be ending."""
        return self._stopping

    def stop(self) -> None:
        """Let the threads end after the request that they wait for."""
        with self.changed:
            self._stopping = True
            while self._singles:
                self._singles.popleft()[0].cancel()
            self.changed.notify_all()

    def join(self) -> None:
        """Wait a few seconds for the threads."""
        until = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self.changed:
                job: Callable[[], None] | None = None
                try:
                    while not self._stopping and (job := self._next_single() or self._next()) is None:
                        self.changed.wait(ELSEWHERE_SECONDS if self._elsewhere else TICK_SECONDS)
                except BaseException:
                    self._stopping = True  # else readers would wait without end
                    raise
                if job is None:
                    return
                self.start()
            job()

    def _next_single(self) -> Callable[[], None] | None:
        """Return a read that was submitted, unless a chunk is waited for."""
        while self._singles and not self.demand.urgent_count and self._working < MOST_IN_FLIGHT:
            future, read = self._singles.popleft()
            if future.set_running_or_notify_cancel():
                self._working, self._working_singles = self._working + 1, self._working_singles + 1
                return partial(self._read_single, future, read)
        return None

    def _read_single(self, future: Future[memoryview], read: Callable[[], memoryview]) -> None:
        try:
            future.set_result(read())
        except BaseException as error:
            future.set_exception(error)
        finally:
            with self.changed:
                self._working, self._working_singles = self._working - 1, self._working_singles - 1

    def _fetch_claimed(self, fetched: ByteRange, kept: list[bool]) -> None:
        try:
            self._fetch(fetched, kept)
        except MemfeedError as error:
            self._fail(fetched, error)
        except BaseException as error:  # a thread that ends without a word would let readers wait for ever
            self._fail(fetched, StoreError(f"{self.directory.settings.address}: found {error!r} while fetching"))
            raise
        finally:
            self._end(fetched)

    def _next(self) -> Callable[[], None] | None:
        """Return what fetches chunks that this process has taken now, some of which have room in the cache."""
        now = time.monotonic()
        for chunk in [chunk for chunk, due in self._elsewhere.items() if due <= now]:
            del self._elsewhere[chunk]
            self.demand.put_back(self.directory.table.at(chunk))
        most = self._most_at_once()
        if self._working >= most:
            return None
        # requests share the link: if readers wait for many chunks, the longest request ends last, and has to be short
        joined = MOST_CHUNKS if most == self.in_flight.count else 1
        while not self.demand.is_full and (found := self.demand.take(most, joined)) is not None:
            run, kept = self._claim(found, now)
            if run:
                self._working += 1
                return partial(self._fetch_claimed, self.directory.table.range_of(run[0], run[-1] + 1), kept)
        return None

    def _claim(self, found: ByteRange, now: float) -> tuple[list[int], list[bool]]:
        """Take consecutive chunks of a range: which, and whether each has room."""
        run, kept, is_full = list[int](), list[bool](), False
        for chunk in range(found.chunk, found.chunk + found.size):
            is_ours = (not run or run[-1] == chunk - 1) and not is_full
            if is_ours:
                try:
                    if not self.directory.units.take(chunk):
                        self._elsewhere[chunk] = now + ELSEWHERE_SECONDS
                        continue
                    is_urgent = self.demand.is_urgent(chunk)
                    is_absent = not self.directory.is_written(chunk)
                    has_room = is_absent and self._reserve(chunk, is_urgent=is_urgent)
                except MemfeedError as error:  # the disk refused a lock, or to give room back
                    self.directory.units.release(chunk)
                    self._fail(self.directory.table.at(chunk), error)
                    self.demand.put_off(self.directory.table.at(chunk))
                    continue
                if is_absent and (has_room or is_urgent):
                    run.append(chunk)
                    kept.append(has_room)
                    continue
                is_full = is_absent  # others may have brought it meanwhile
                self.directory.units.release(chunk)
            back = self.demand.put_off if is_full else self.demand.put_back
            back(self.directory.table.at(chunk))
        return run, kept

    def _reserve(self, chunk: int, *, is_urgent: bool) -> bool:
        may_remove = self.demand.may_remove_others(chunk)
        return self.directory.reserve(chunk, self.demand.ranks, urgent=is_urgent, may_remove=may_remove)

    def _fetch(self, fetched: ByteRange, kept: list[bool]) -> None:
        chunks = [self.directory.table.at(fetched.chunk + at) for at in range(fetched.size)]
        done = 0
        try:
            began = time.monotonic()
            data = self._read(fetched, chunks)
            with self.changed:
                self.in_flight.note(len(data), time.monotonic() - began, self._working)
            for chunk, has_room in zip(chunks, kept, strict=True):
                part = data[chunk.start - fetched.start : chunk.stop - fetched.start]
                if self.directory.pieces is not None:
                    self.directory.pieces.learn(chunk, part)
                if has_room:
                    self.directory.write(chunk.chunk, part)
                self._arrived(chunk.chunk, part)
                self.directory.units.release(chunk.chunk)
                done += 1
        finally:
            for chunk in chunks[done:]:
                self.directory.drop(chunk.chunk)

    def _read(self, fetched: ByteRange, chunks: list[ByteRange]) -> memoryview:
        def is_right(data: memoryview) -> bool:
            return all(
                xxhash.xxh3_64_intdigest(data[chunk.start - fetched.start : chunk.stop - fetched.start])
                == self.directory.hashes[chunk.chunk]
                for chunk in chunks
            )

        size = fetched.stop - fetched.start
        try:
            return self._objects.read(fetched.name, fetched.start, size, accept=is_right)
        except CorruptStoreError:
            chunk = Chunk(fetched.name, fetched.start, size)
            raise other_bytes(self.directory.settings.address, self.directory.manifest, chunk) from None

    def _fail(self, fetched: ByteRange, error: MemfeedError) -> None:
        with self.changed:
            for chunk in range(fetched.chunk, fetched.chunk + fetched.size):
                if not self.directory.is_written(chunk):
                    self.failed[chunk] = error
                    self.demand.calm(chunk)

    def _end(self, fetched: ByteRange) -> None:
        with self.changed:
            self._working -= 1
            for chunk in range(fetched.chunk, fetched.chunk + fetched.size):
                self.demand.calm(chunk)
            self.demand.put_back(fetched)
            self.changed.notify_all()
