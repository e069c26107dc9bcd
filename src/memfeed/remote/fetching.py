"""Fetch chunks of a store at an address into its cache directory: as many requests at once as the link is worth."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import xxhash

from memfeed.building.unit_queue import UnitQueue
from memfeed.errors import CorruptStoreError, MemfeedError, StoreError
from memfeed.remote.directory import CacheDirectory
from memfeed.remote.layout import other_bytes
from memfeed.remote.ranges import MOST_CHUNKS, ByteRange
from memfeed.schema.codec import Int64Array
from memfeed.store.checksums import Chunk
from memfeed.system.messages import format_bytes

LEAST_IN_FLIGHT, MOST_IN_FLIGHT = 4, 32
WORTH = 1.1  # twice as many requests have to bring so much more
ELSEWHERE_SECONDS = 0.02  # after which a chunk that another process fetches is looked at again
TICK_SECONDS = 0.25
JOIN_SECONDS = 5.0
ROOM_SECONDS = 60.0  # in which readers may give room back to a chunk that another one waits for


class RangeReader(Protocol):
    """The reader of the files of a store at an address."""

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
        queue: which chunks are wanted; it is used under ``changed``.
    """

    def __init__(self, directory: CacheDirectory, objects: RangeReader, queue: UnitQueue) -> None:
        self.directory, self.queue, self._objects = directory, queue, objects
        self.changed = threading.Condition()
        self.in_flight = InFlight()
        self._without_room: dict[int, float] = {}  # chunks that are waited for, and since when no room is found
        self._threads: list[threading.Thread] = []
        self._working = 0
        self._stopping = False

    def start(self) -> None:
        """Start threads, as many as there may be requests. The caller has ``changed``."""
        while len(self._threads) < self._most_at_once() and not self._stopping:
            thread = threading.Thread(target=self._work, name="memfeed-fetch", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _most_at_once(self) -> int:
        """Return how many requests may be under way: what readers wait for is asked for at once, not in rounds."""
        return max(self.in_flight.count, min(len(self.queue.urgent), MOST_IN_FLIGHT))

    def stop(self) -> None:
        """Let the threads end after the request that they wait for."""
        with self.changed:
            self._stopping = True
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
                    while not self._stopping and (job := self._next()) is None:
                        self.changed.wait(ELSEWHERE_SECONDS if self.queue.returned else TICK_SECONDS)
                except BaseException:
                    self._stopping = True  # else readers would wait without end
                    raise
                if job is None:
                    return
                self.start()
            job()

    def _fetch_claimed(self, fetched: ByteRange) -> None:
        failure: MemfeedError | None = None
        try:
            self._fetch(fetched)
        except MemfeedError as error:
            failure = error
        except BaseException as error:  # a thread that ends without a word would let readers wait for ever
            failure = StoreError(f"{self.directory.settings.address}: found {error!r} while fetching")
            raise
        finally:
            self._end(fetched, failure)

    def _next(self) -> Callable[[], None] | None:
        """Return what fetches chunks that this process has taken now, and that have room in the cache."""
        now = time.monotonic()
        most = self._most_at_once()
        if self._working >= most:
            return None
        # requests share the link: if readers wait for many chunks, the longest request ends last, and has to be short
        joined = MOST_CHUNKS if most == self.in_flight.count else 1
        while len(found := self.queue.next_units(now, joined, most)):
            run = self._claim(found, now)
            if run:
                self._working += 1
                return partial(self._fetch_claimed, self.directory.table.range_of(run[0], run[-1] + 1))
        return None

    def _claim(self, found: Int64Array, now: float) -> list[int]:
        """Take consecutive chunks of ``found`` that have room; return them. The others are looked at again later."""
        run, is_full, urgent = list[int](), False, found[self.queue.ranks(found) < 0]
        for chunk in found.tolist():
            unit = np.array([chunk])
            if is_full or (run and run[-1] != chunk - 1):
                self.queue.put_off(unit) if is_full else self.queue.give_back(unit, now)
                continue
            try:
                if not self.directory.units.take(chunk):
                    self.queue.give_back(unit, now + ELSEWHERE_SECONDS)
                    continue
                if self.directory.units.is_present(chunk):  # another process may have brought it meanwhile
                    self.directory.units.release(chunk)
                    self.queue.give_back(unit, now)
                    continue
                if self.directory.reserve(chunk, self.queue.ranks, urgent=chunk in urgent):
                    run.append(chunk)
                    self._without_room.pop(chunk, None)
                    continue
            except MemfeedError as error:  # the disk refused a lock, or to give room back
                self.directory.units.release(chunk)
                self._fail(chunk, now, error)
                continue
            self.directory.units.release(chunk)
            if chunk in urgent:
                self._wait_for_room(chunk, now)
            else:
                is_full = True
                self.queue.put_off(unit)
        return run

    def _wait_for_room(self, chunk: int, now: float) -> None:
        """Look again soon for room for a chunk that a reader waits for. It fails if there is none for long."""
        if now - self._without_room.setdefault(chunk, now) > ROOM_SECONDS:
            del self._without_room[chunk]
            size = format_bytes(self.directory.settings.size or 0)
            error = StoreError(
                f"{self.directory.root}: found a cache of {size} that is all in use by readers that wait for more "
                f"rows, for {ROOM_SECONDS:.0f} s; expected room for the rows of each: a larger size=, or fewer loaders "
                "and processes at a time"
            )
            self._fail(chunk, now + ELSEWHERE_SECONDS, error)
            return
        self.queue.give_back(np.array([chunk]), now + ELSEWHERE_SECONDS)

    def _fail(self, chunk: int, now: float, error: MemfeedError) -> None:
        """Let those who wait for a chunk see why it does not come. The caller has ``changed``."""
        self.queue.give_back(np.array([chunk]), now, {chunk: error})
        self.changed.notify_all()

    def _fetch(self, fetched: ByteRange) -> None:
        chunks = [self.directory.table.at(fetched.chunk + at) for at in range(fetched.size)]
        done = 0
        try:
            began = time.monotonic()
            data = self._read(fetched, chunks)
            with self.changed:
                self.in_flight.note(len(data), time.monotonic() - began, self._working)
            for chunk in chunks:
                self.directory.write(chunk.chunk, data[chunk.start - fetched.start : chunk.stop - fetched.start])
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

    def _end(self, fetched: ByteRange, error: MemfeedError | None) -> None:
        with self.changed:
            self._working -= 1
            units = np.arange(fetched.chunk, fetched.chunk + fetched.size)
            failed = {} if error is None else dict.fromkeys(units[self.directory.are_absent(units)].tolist(), error)
            self.queue.give_back(units, time.monotonic(), failed)
            self.changed.notify_all()
