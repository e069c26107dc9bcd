"""The cache directory of a store at an address: sparse files, and which chunks of them are there.

Any number of processes share one. All that they share is in files, which the kernel keeps right when one is killed:

- ``presence`` has a byte per chunk: absent, held (room is reserved for it), written, durable. Each process maps it.
- ``locks`` is locked by bytes (record locks of Linux, which end with their process): a process that writes or removes
  chunk i has byte i alone, processes that read its rows share it.
- ``taken`` is how many bytes the chunks take.
- ``used`` has for each chunk when it was used last, in seconds of the clock that all processes share.
- ``syncing`` is there while a process syncs chunks; who finds it left knows that this process was killed meanwhile.
- ``users`` is locked shared by each process that uses the directory; ``room`` while room is made; ``waiting`` by the
  reader that keeps chunks of a small cache while it waits for more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from memfeed.building import commit
from memfeed.errors import BuildError, MemfeedError
from memfeed.remote.layout import RANGES
from memfeed.remote.ranges import ChunkTable, aligned_steps
from memfeed.schema.codec import Int64Array
from memfeed.store import format
from memfeed.store.checksums import chunk_hash
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.manifest import Manifest
from memfeed.store.ragged import column_files
from memfeed.system import files
from memfeed.system.unsynced import SYNCING, forget_marked, if_unsynced

ABSENT, HELD, WRITTEN, DURABLE = 0, 1, 2, 3
MOST_VICTIMS = 256  # chunks that are found at once, to be removed
REMEDY = "remove the cache directory to start over"


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What all users of a cache directory share.

    ``size`` is the most bytes that chunks may take; None for all of them. ``boot_id`` is that of the machine's start
    in which chunks were written.
    """

    address: str
    digest: str
    size: int | None
    host: str = ""
    boot_id: str = ""


class CacheDirectory:
    """Chunks of the store of ``manifest`` in a directory. Make it with ``open_directory``.

    Locks belong to a process, so each process has one of these for a directory, and ``reopen`` it after a fork.
    """

    def __init__(
        self, root: Path, settings: CacheSettings, manifest: Manifest, hashes: npt.NDArray[np.uint64], users: int = -1
    ) -> None:
        self._leave = weakref.finalize(self, _close, users)
        self.root, self.settings, self.manifest, self.hashes = root, settings, manifest, hashes
        is_aligned = (root / WORK_DIRECTORY / RANGES).exists()
        self.table = ChunkTable(manifest.files, aligned_steps(manifest) if is_aligned else None)
        work = root / WORK_DIRECTORY
        self._syncing = work / SYNCING
        self.presence = _map(work / "presence", self.table.count, np.uint8)
        self.used = _map(work / "used", self.table.count, np.float64)
        self._taken_bytes = _map(work / "taken", 1, np.int64)  # by chunks that are not ABSENT; used where size counts
        self._offsets = [self.table.of_file(name) for name in offset_files(manifest)]
        self.offset_bytes = sum(manifest.files[name] for name in offset_files(manifest))
        self.reopen()

    def reopen(self) -> None:
        """Open the files again: a forked child has the descriptors of its parent, but not its locks."""
        work = self.root / WORK_DIRECTORY
        self._lock = files.open_write(work / "locks", os.O_CREAT)
        self._room = files.open_write(work / "room", os.O_CREAT)
        self._waiting = files.open_write(work / "waiting", os.O_CREAT)
        self._closer = weakref.finalize(self, _close, self._lock, self._room, self._waiting)
        _open_directories.add(self)
        self._files_lock, self._room_lock, self._waiting_lock = (threading.Lock() for _ in range(3))
        self._shared: dict[int, int] = {}  # how often this process keeps a chunk
        self._alone: set[int] = set()  # chunks that this process writes or removes
        self._victims = deque[int]()  # the chunks to remove next

    def close(self) -> None:
        """Close the files."""
        self._closer()

    def leave(self) -> None:
        """Leave the directory: other processes may then use it with another size. Do not use this object afterwards."""
        self._leave()

    # --- what is there

    def is_written(self, chunk: int) -> bool:
        """Return True if a chunk is there."""
        return bool(self.presence[chunk] >= WRITTEN)

    def are_absent(self, chunks: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which of these chunks are not there, bool [k]."""
        return np.asarray(self.presence[chunks] < WRITTEN)

    def is_complete(self) -> bool:
        """Return True if all chunks are there."""
        return bool((self.presence >= WRITTEN).all())

    @property
    def bytes_present(self) -> int:
        """The bytes of the chunks that are there."""
        return int(self.table.bytes_of(np.flatnonzero(self.presence >= WRITTEN)).sum())

    # --- claims

    def take(self, chunk: int) -> bool:
        """Return True if this process alone has the chunk now: nobody else writes, removes or reads it."""
        with self._files_lock:
            if chunk in self._alone or chunk in self._shared:
                return False
            if not self._try_lock(fcntl.F_WRLCK, chunk):
                return False
            self._alone.add(chunk)
            return True

    def free(self, chunk: int) -> None:
        """Release a chunk that was taken."""
        with self._files_lock:
            self._alone.discard(chunk)
            _lock_byte(self._lock, fcntl.F_UNLCK, chunk)

    def keep(self, chunk: int) -> bool:
        """Keep a chunk from being removed until ``let_go``. Return False, and keep nothing, if it is not there."""
        with self._files_lock:
            found = chunk not in self._alone and (
                chunk in self._shared or self._try_lock(fcntl.F_RDLCK, chunk)
            )  # a process that holds the exclusive lock writes or removes it
            if found:
                self._shared[chunk] = self._shared.get(chunk, 0) + 1
        if found and not self.is_written(chunk):
            self.let_go(chunk)
            return False
        return found

    def let_go(self, chunk: int) -> None:
        """End one ``keep``."""
        with self._files_lock:
            self._shared[chunk] -= 1
            if not self._shared[chunk]:
                del self._shared[chunk]
                _lock_byte(self._lock, fcntl.F_UNLCK, chunk)

    def _try_lock(self, kind: int, chunk: int) -> bool:
        try:
            _lock_byte(self._lock, kind, chunk)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                action = "locking a part of it: some network file systems have no locks"
                raise files.refused(error, self.root, action) from error
            return False
        return True

    # --- bytes

    def write(self, chunk: int, data: memoryview) -> None:
        """Write the bytes of a chunk that was taken, and mark it. Raises SpaceError if the disk is full."""
        place = self.table.at(chunk)
        try:
            with files.locked(self.root / place.name, shared=True) as fd:  # see `_forget`
                # a full disk is found before a byte is written; and ext4 counts blocks twice that it allocates later
                files.preallocate(fd, len(data), place.start)
                files.write_at(fd, data, place.start)
                self.used[chunk] = time.monotonic()
                self.presence[chunk] = WRITTEN
        except BaseException:
            if self.settings.size is not None:  # else the bytes of an older generation, which others map, may be there
                with contextlib.suppress(MemfeedError):  # report the first error
                    self.remove(chunk)
            raise

    def remove(self, chunk: int) -> None:
        """Give the disk the room of a chunk back that this process has taken."""
        with self._making_room():
            self._demote(np.array([chunk]))
            self._remove(chunk)

    def _remove(self, chunk: int) -> None:
        was_there, place = self.presence[chunk] != ABSENT, self.table.at(chunk)
        self.presence[chunk] = ABSENT
        if was_there:
            self._taken_bytes[0] -= place.stop - place.start
        with files.opened(self.root / place.name) as fd:
            files.punch(fd, [(place.start, -(-place.stop // files.BLOCK_BYTES) * files.BLOCK_BYTES)])

    def drop(self, chunk: int) -> None:
        """Release a chunk that was taken. If it was not written, give its room back."""
        if self.presence[chunk] == HELD:
            with self._making_room():
                self.presence[chunk] = ABSENT
                place = self.table.at(chunk)
                self._taken_bytes[0] -= place.stop - place.start
        self.free(chunk)

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
            if self.presence[chunk] == HELD:  # held by a process that has died: this one has the lock now
                self._remove(chunk)
            own = int(self.table.bytes_of(np.array([chunk]))[0])
            wanted = int(self._taken_bytes[0]) + own - size
            if wanted > 0 and not self._make_room(chunk, wanted, need, urgent):
                return False
            self._taken_bytes[0] += own
            self.presence[chunk] = HELD
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
            elif self.presence[victim] != ABSENT and self.take(victim):  # a held one is that of a dead process
                try:
                    self._demote(np.array([victim, *self._victims]))
                    self._remove(victim)
                finally:
                    self.free(victim)
                wanted -= self.table.at(victim).stop - self.table.at(victim).start
                if wanted <= 0:
                    return True
        return False

    def _find_victims(self, need: Callable[[Int64Array], npt.NDArray[np.float64]]) -> deque[int]:
        """Return the next chunks to remove. Many at once: a cache of a terabyte has 300,000, which takes 30 ms."""
        there = np.flatnonzero(self.presence)  # none is ABSENT
        there = there[~self.are_offsets(there)]
        return deque(there[np.lexsort((self.used[there], -need(there)))][:MOST_VICTIMS].tolist())

    def are_offsets(self, chunks: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which of these chunks say where the rows of ragged columns lie, and so stay; bool [k]."""
        found = np.zeros(len(chunks), bool)
        for first, last in self._offsets:
            found |= (first <= chunks) & (chunks < last)
        return found

    def _making_room(self) -> contextlib.AbstractContextManager[None]:
        return _alone(self._room_lock, self._room)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Let one reader at a time, of all processes, keep chunks while it waits for more: two could wait for ever."""
        return _alone(self._waiting_lock, self._waiting)

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

        If a sync fails, the chunks of that file that were not durable are not there any more.
        """
        # one process at a time: only one is told of a failure, and another could call the same chunks durable
        with files.locked(self.root / WORK_DIRECTORY / "presence"):
            self._forget_unsynced()
            for name in self.manifest.files:
                self._sync_file(name)

    def _sync_file(self, name: str) -> None:
        chunks = self._written(name)
        if self.settings.size is not None:  # nobody writes other bytes of a chunk meanwhile
            chunks = np.array([chunk for chunk in chunks.tolist() if self.keep(chunk)], np.int64)
        try:
            if len(chunks):
                with if_unsynced(lambda: self._forget(name), self._syncing):
                    files.sync_data(self.root / name)
                self.presence[chunks] = DURABLE
        finally:
            for chunk in chunks.tolist() if self.settings.size is not None else ():
                self.let_go(chunk)

    def _written(self, name: str) -> Int64Array:
        first, last = self.table.of_file(name)
        found: Int64Array = first + np.flatnonzero(self.presence[first:last] == WRITTEN)
        return found

    def _forget_unsynced(self) -> None:
        """Let no chunk be there that is not durable if a process was killed while it synced some.

        A sync may have failed for it, and no other process is told. Their checksums show nothing: see `if_unsynced`.
        """

        def forget() -> None:
            for name in self.manifest.files:
                self._forget(name)

        forget_marked(forget, self._syncing)

    def _forget(self, name: str) -> None:
        """Let no chunk of a file be there that is not durable, once no process is inside `write`."""
        with files.locked(self.root / name):
            if self.settings.size is None:
                self.presence[self._written(name)] = ABSENT
                return
            with self._making_room():  # they keep their room: other processes may be reading them
                self.presence[self._written(name)] = HELD

    def _demote(self, chunks: Int64Array) -> None:
        """Let no chunk be durable whose room may be given back: a power loss could leave it so without its bytes."""
        durable = chunks[self.presence[chunks] == DURABLE]

        def undo() -> None:  # the next try syncs it again
            self.presence[durable] = DURABLE

        if len(durable):
            self.presence[durable] = WRITTEN
            with if_unsynced(undo):
                files.sync_data(self.root / WORK_DIRECTORY / "presence")

    def recover(self, *, is_new_boot: bool) -> None:
        """Let no chunk count that a process was writing or syncing when it was killed, or that a power loss may damage.

        Only while no other process uses the directory.
        """
        self._forget_unsynced()
        for chunk in np.flatnonzero(self.presence == HELD).tolist():
            self.remove(chunk)
        for chunk in np.flatnonzero(self.presence == WRITTEN).tolist() if is_new_boot else ():
            place = self.table.at(chunk)
            if chunk_hash(self.root / place.name, place.start, place.stop - place.start) != self.hashes[chunk]:
                self.remove(chunk)

    def recount(self) -> None:
        """Add up the bytes of all chunks. Only while no other process is here."""
        self._taken_bytes[0] = self.table.bytes_of(np.flatnonzero(self.presence)).sum()

    def shrink(self) -> None:
        """Remove the chunks that were used longest ago, beyond ``size``. Only while no other process is here."""
        if self.settings.size is None:
            return
        there = np.flatnonzero(self.presence != ABSENT)
        newest = there[np.lexsort((-self.used[there], ~self.are_offsets(there)))]
        total = np.cumsum(self.table.bytes_of(newest))
        surplus = newest[total > self.settings.size]
        self._demote(surplus)
        for chunk in surplus.tolist():
            self.remove(chunk)


def _lock_byte(fd: int, kind: int, at: int) -> None:
    """Lock or unlock a byte of an open file; the lock is that of this descriptor where the system has such locks.

    A lock of the process would end when the process closes any other descriptor of the file.
    """
    command = getattr(fcntl, "F_OFD_SETLK", fcntl.F_SETLK)
    fcntl.fcntl(fd, command, struct.pack("hhqqi", kind, os.SEEK_SET, at, 1, 0))


@contextlib.contextmanager
def _alone(lock: threading.Lock, fd: int) -> Iterator[None]:
    """Let one thread at a time, of all processes, run the block."""
    with lock:
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)


def _after_fork() -> None:
    # a lock lives as long as any copy of its descriptor: a child that outlives its parent would keep it
    for directory in list(_open_directories):
        directory.close()


_open_directories: weakref.WeakSet[CacheDirectory] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)


def _close(*descriptors: int) -> None:
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)


def offset_files(manifest: Manifest) -> list[str]:
    """Return the files that say where the rows of ragged columns lie."""
    ragged = [field for field in manifest.schema if field.kind != "fixed"]
    return [name for field in ragged for name, size in column_files(field, 0).items() if size is not None]


def _map(path: Path, count: int, dtype: Any, mode: Literal["r", "r+"] = "r+") -> npt.NDArray[Any]:
    if not count:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode, shape=(count,))
