"""The cache directory of a store at an address: sparse files, and which chunks of them are there.

Any number of processes share one. `Units` says which chunks are there, and which process brings or removes one. Beside
its files there are, in the work directory:

- ``taken`` is how many bytes the chunks take.
- ``used`` has for each chunk when it was used last, in seconds of the clock that all processes share.
- ``users`` is locked shared by each process that uses the directory; ``room`` while room is made; ``waiting`` by the
  reader that keeps chunks of a small cache while it waits for more.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from memfeed.building import commit
from memfeed.building.partial import ABSENT, HELD, WRITTEN, Units
from memfeed.errors import BuildError, MemfeedError
from memfeed.remote.layout import RANGES
from memfeed.remote.ranges import ChunkTable, aligned_steps
from memfeed.schema.codec import Int64Array
from memfeed.store import format
from memfeed.store.checksums import chunk_hash
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.manifest import Manifest
from memfeed.store.ragged import column_files
from memfeed.system import files, locks

MOST_VICTIMS = 256  # chunks that are found at once, to be removed
REMEDY = "remove the cache directory to start over"


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all users of a cache directory share.

    ``size`` is the most bytes that chunks may take; None for all of them.
    """

    address: str
    digest: str
    size: int | None


class CacheDirectory:
    """Chunks of the store of ``manifest`` in a directory. Make it with ``open_directory``."""

    def __init__(
        self, root: Path, settings: CacheSettings, manifest: Manifest, hashes: npt.NDArray[np.uint64], users: int = -1
    ) -> None:
        # after it other processes may use the directory with another size, and this object is of no use any more
        self.leave = weakref.finalize(self, _close, users)
        self.root, self.settings, self.manifest, self.hashes = root, settings, manifest, hashes
        is_aligned = (root / WORK_DIRECTORY / RANGES).exists()
        self.table = ChunkTable(manifest.files, aligned_steps(manifest) if is_aligned else None)
        work = root / WORK_DIRECTORY
        self.units = Units(work, self.table.count, may_drop=settings.size is not None)
        self.used = _map(work / "used", self.table.count, np.float64)
        self._taken_bytes = _map(work / "taken", 1, np.int64)  # by chunks that are not ABSENT; used where size counts
        self._offsets = [self.table.of_file(name) for name in offset_files(manifest)]
        self.offset_bytes = sum(manifest.files[name] for name in offset_files(manifest))
        self._victims = deque[int]()  # the chunks to remove next
        for name in ("room", "waiting"):
            with files.opened(work / name, os.O_CREAT):
                pass

    # --- what is there

    def are_absent(self, chunks: Int64Array | slice) -> npt.NDArray[np.bool_]:
        """Return which of these chunks are not there, bool [k]."""
        return ~self.units.are_present(chunks)

    def is_complete(self) -> bool:
        """Return True if all chunks are there."""
        return bool(self.units.are_present().all())

    @property
    def bytes_present(self) -> int:
        """The bytes of the chunks that are there."""
        return int(self.table.bytes_of(np.flatnonzero(self.units.are_present())).sum())

    # --- bytes

    def write(self, chunk: int, data: memoryview) -> None:
        """Write the bytes of a chunk that was taken, and mark it. Raises SpaceError if the disk is full."""
        place = self.table.at(chunk)
        try:
            with self.units.writing(), files.opened(self.root / place.name) as fd:
                # a full disk is found before a byte is written; and ext4 counts blocks twice that it allocates later
                files.preallocate(fd, len(data), place.start)
                files.write_at(fd, data, place.start)
                self.used[chunk] = time.monotonic()
                self.units.mark(chunk, 1, WRITTEN)
        except BaseException:
            if self.settings.size is not None:  # else the bytes of an older generation, which others map, may be there
                with contextlib.suppress(MemfeedError):  # report the first error
                    self.remove(chunk)
            raise

    def remove(self, chunk: int) -> None:
        """Give the disk the room of a chunk back that this process has taken."""
        with self._making_room():
            self._remove(chunk)

    def _remove(self, chunk: int) -> None:
        was_there, place = self.units.states[chunk] != ABSENT, self.table.at(chunk)
        self.units.drop(np.array([chunk]))
        if was_there:
            self._taken_bytes[0] -= place.stop - place.start
        with files.opened(self.root / place.name) as fd:
            files.punch(fd, [(place.start, -(-place.stop // files.BLOCK_BYTES) * files.BLOCK_BYTES)])

    def drop(self, chunk: int) -> None:
        """Release a chunk that was taken. If it was not written, give its room back."""
        if self.units.states[chunk] == HELD:
            with self._making_room():
                self.units.mark(chunk, 1, ABSENT)
                place = self.table.at(chunk)
                self._taken_bytes[0] -= place.stop - place.start
        self.units.release(chunk)

    # --- room

    def reserve(self, chunk: int, need: Callable[[Int64Array], npt.NDArray[np.float64]], *, urgent: bool) -> bool:
        """Make room for a chunk that was taken. Return False if only chunks that are needed sooner could go.

        ``need`` returns for chunks when this process needs each, infinity for not soon. An ``urgent`` chunk takes the
        place of any that nobody keeps.
        """
        size = self.settings.size
        if size is None:
            return True
        with self._making_room():
            if self.units.states[chunk] == HELD:  # held by a process that has died: this one has the lock now
                self._remove(chunk)
            own = int(self.table.bytes_of(np.array([chunk]))[0])
            wanted = int(self._taken_bytes[0]) + own - size
            if wanted > 0 and not self._make_room(chunk, wanted, need, urgent):
                return False
            self._taken_bytes[0] += own
            self.units.mark(chunk, 1, HELD)
            return True

    def _make_room(
        self, chunk: int, wanted: int, need: Callable[[Int64Array], npt.NDArray[np.float64]], urgent: bool
    ) -> bool:
        """Remove chunks of ``wanted`` bytes, those needed last first, then those used longest ago."""
        own, are_new = need(np.array([chunk]))[0], False
        while self._victims or not are_new:
            if not self._victims:
                self._victims, are_new = self._find_victims(need), True
                continue
            victim = self._victims.popleft()
            if not urgent and need(np.array([victim]))[0] <= own:
                self._victims.clear()  # look again: this one may be needed sooner than when it was found
            elif self.units.states[victim] != ABSENT and self.units.take(victim):
                try:  # a held one is that of a dead process
                    self.units.demote(np.array([victim, *self._victims]))
                    self._remove(victim)
                finally:
                    self.units.release(victim)
                wanted -= self.table.at(victim).stop - self.table.at(victim).start
                if wanted <= 0:
                    return True
        return False

    def _find_victims(self, need: Callable[[Int64Array], npt.NDArray[np.float64]]) -> deque[int]:
        """Return the next chunks to remove. Many at once: a cache of a terabyte has 300,000, which takes 30 ms."""
        there = np.flatnonzero(self.units.states)  # none is ABSENT
        there = there[~self.are_offsets(there)]
        return deque(there[np.lexsort((self.used[there], -need(there)))][:MOST_VICTIMS].tolist())

    def are_offsets(self, chunks: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which of these chunks say where the rows of ragged columns lie, and so stay; bool [k]."""
        found = np.zeros(len(chunks), bool)
        for first, last in self._offsets:
            found |= (first <= chunks) & (chunks < last)
        return found

    def _making_room(self) -> contextlib.AbstractContextManager[int]:
        return locks.locked(self.root / WORK_DIRECTORY / "room")

    def waiting(self) -> contextlib.AbstractContextManager[int]:
        """Let one reader at a time, of all processes, keep chunks while it waits for more: two could wait for ever."""
        return locks.locked(self.root / WORK_DIRECTORY / "waiting")

    # --- the whole store

    def commit(self, *, read_only: bool = False) -> None:
        """Turn the complete cache into a finished store. Several processes may do so at the same time.

        ``read_only``: the directory will not be a cache any more, which can grow.
        """
        with self._making_room():
            if (self.root / format.MANIFEST).exists():
                return
            self.sync()
            if not self.is_complete():  # another process got the error of a failed sync
                raise BuildError(
                    f"{self.root}: found that the disk lost bytes that were written; expected the write to succeed: "
                    "check the disk and run this again"
                )
            commit.write_metadata(self.root, self.manifest.schema, self.manifest.rows)
            work = self.root / WORK_DIRECTORY
            files.write_file(self.root / format.CHECKSUMS, (work / format.CHECKSUMS).read_bytes())
            content = (work / format.MANIFEST).read_bytes()
            if read_only:
                commit.seal(self.root, self.manifest, content)
                return
            commit.sync_small(self.root)
            files.write_atomically(self.root / format.MANIFEST, content)

    # --- what survives a power loss

    def sync(self) -> None:
        """Make all chunks written so far durable.

        If a sync fails, no chunk is there that was not durable.
        """
        self.units.sync(self._sync_files)

    def _sync_files(self, chunks: Int64Array) -> None:
        for name in self.manifest.files:
            first, last = self.table.of_file(name)
            if ((first <= chunks) & (chunks < last)).any():
                files.sync_data(self.root / name)

    def recover(self) -> None:
        """Let no chunk count that a process was writing or syncing when it was killed, or that a power loss may damage.

        Only while no other process uses the directory.
        """
        self.units.recover(self._is_right)
        for chunk in np.flatnonzero(self.units.states == HELD).tolist():
            self.remove(chunk)

    def _is_right(self, chunk: int) -> bool:
        place = self.table.at(chunk)
        found = chunk_hash(self.root / place.name, place.start, place.stop - place.start)
        return found == int(self.hashes[chunk])

    def recount(self) -> None:
        """Add up the bytes of all chunks. Only while no other process is here."""
        self._taken_bytes[0] = self.table.bytes_of(np.flatnonzero(self.units.states)).sum()

    def shrink(self) -> None:
        """Remove the chunks that were used longest ago, beyond ``size``. Only while no other process is here."""
        if self.settings.size is None:
            return
        there = np.flatnonzero(self.units.states)
        newest = there[np.lexsort((-self.used[there], ~self.are_offsets(there)))]
        total = np.cumsum(self.table.bytes_of(newest))
        surplus = newest[total > self.settings.size]
        self.units.demote(surplus)
        for chunk in surplus.tolist():
            self.remove(chunk)


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def offset_files(manifest: Manifest) -> list[str]:
    """Return the files that say where the rows of ragged columns lie."""
    ragged = [field for field in manifest.schema if field.kind != "fixed"]
    return [name for field in ragged for name, size in column_files(field, 0).items() if size is not None]


def _map(path: Path, count: int, dtype: Any) -> npt.NDArray[Any]:
    if not count:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r+", shape=(count,))
