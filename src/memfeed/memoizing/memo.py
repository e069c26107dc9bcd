"""A directory of memoized results: a partial store whose units are rows, one for each key, that any process adds."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from memfeed.building.build import Build
from memfeed.building.partial import Units
from memfeed.building.rows import RowWriter
from memfeed.building.space import take_back
from memfeed.errors import BuildError, CorruptStoreError, StoreError
from memfeed.memoizing.keys import Digests
from memfeed.schema.codec import Packed
from memfeed.store import memo_format
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.memo_format import ALIGN, BLOB, FOOTER_BYTES, MARKER, SCHEMA, VERSION, Blob, Bytes, read_footer
from memfeed.store.ragged import INT64_BYTES, ragged_files
from memfeed.system import files, locks, trust
from memfeed.system.descriptors import open_read
from memfeed.system.files import open_write

RUN = "MEMFEED_RUN"  # an id of a run, which its processes inherit
_FULL = 15 / 16  # of ``size``: how much is left after rows were dropped
_LARGE = 1 << 22
_PARTS = 256  # the room is measured again after a process wrote this part of ``size``


class Marker(msgspec.Struct, frozen=True):
    """The content of ``memo.json``."""

    format: str = "memfeed memo"
    version: int = VERSION


class Found(NamedTuple):
    """A result that was read: its blob, and the memory of its leaves, uint8 [n]."""

    blob: Blob
    data: Bytes


class Memo:
    """The results at ``path``, which is made if it is not there.

    Raises StoreError for another thing at the path, or for a directory into which others may write.

    Args:
        path: the directory.
        size: the most bytes of results that are kept, about; None keeps all. The rows that were used last stay.
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        self.path, self.size = path, size
        _make(path)
        trust.require_own_directory(path)
        trust.require_own_files(path)
        _require_known(path)
        self._work = path / WORK_DIRECTORY
        self._build = Build.join(path)
        if self._build.schema != SCHEMA:
            raise StoreError(_not_a_memo(path))
        self._build.units = self._units = Units(self._work, None, may_drop=True)
        self._digests = Digests(self._work / "digests")
        columns = ragged_files(path, BLOB)
        self._start, self._dims, self._heap = map(open_read, columns)
        self._heap_end = 0  # of what was seen
        self._used = self._attached = -1
        with contextlib.suppress(BuildError):  # of a file system that cannot be written: then results are only read
            self._used = open_write(self._work / "used")
            self._attached = open_write(self._work / "attached")
            self._recover()
        for fd in (self._start, self._dims, self._heap, self._used, self._attached):
            if fd != -1:
                weakref.finalize(self, os.close, fd)
        self.begin_process()
        _every.add(self)

    def begin_process(self) -> None:
        """Begin in a forked child: a writer and its locks belong to one process."""
        self._lock = threading.RLock()
        self._writer: RowWriter | None = None
        self._unmeasured = 0  # bytes that this process may write before it measures the room again

    def _recover(self) -> None:
        """Lose what a power loss may have damaged, if no other process is here, and give unused space back."""
        try:
            locks.lock(self._attached, self._work / "attached")
        except BlockingIOError:
            locks.lock(self._attached, self._work / "attached", wait=True, is_shared=True)
            return
        remove_counts_of_others(self._work)
        self._units.recover(self._is_right)
        if self._units.is_quiet():
            present = self._units.are_present()
            rows = os.fstat(self._start).st_size // INT64_BYTES
            take_back(self.path, SCHEMA, present[:rows])
        # until this process and its children have ended
        locks.lock(self._attached, self._work / "attached", wait=True, is_shared=True)

    def _is_right(self, row: int) -> bool:
        start, size = self._place(row)
        return memo_format.is_right(self._bytes(start, size))

    # --- reading

    def find(self, digest: bytes) -> int | None:
        """Return the row of a key, or None."""
        with self._lock:
            return self._digests.find(digest)

    def read(self, row: int, digest: bytes, *, mapped: bool = False) -> Found | None:
        """Return the result of a row, or None if it is not there, or belongs to another key.

        Its memory belongs to the caller; with ``mapped`` it is a private map of the file.
        Raises CorruptStoreError for a row that does not fit into its file.
        """
        if not self._units.is_present(row):
            return None
        start, size = self._place(row)
        data = self._map(row, start, size) if mapped else None
        if data is None:
            data = self._bytes(start, size)
            # a row is dropped before its bytes go, and other bytes of it would have another place
            if not self._units.is_present(row) or self._start_of(row) != start:
                return None
        blob = read_footer(data, size, self.path)
        if blob.digest != digest:
            return None
        if self.size is not None and self._used != -1:
            files.write_at(self._used, np.uint32(time.time()).tobytes(), row * 4)
        return Found(blob, data)

    def _start_of(self, row: int) -> int:
        return int.from_bytes(os.pread(self._start, INT64_BYTES, row * INT64_BYTES), "little", signed=True)

    def _place(self, row: int) -> tuple[int, int]:
        """Return the first byte of a row in the heap, and its size. Raises CorruptStoreError if it is not inside."""
        start = self._start_of(row)
        size = int.from_bytes(os.pread(self._dims, INT64_BYTES, row * INT64_BYTES), "little", signed=True)
        if (end := self._heap_end) < start + size:
            end = self._heap_end = os.fstat(self._heap).st_size
        if start < 0 or size < FOOTER_BYTES or start + size > end or start % ALIGN:
            raise CorruptStoreError(
                f"{self.path}: found row {row} of {size:,} bytes at byte {start:,}; expected it inside {end:,} bytes: "
                "the directory is damaged; remove it, and the results are computed again"
            )
        return start, size

    def _bytes(self, start: int, size: int) -> Bytes:
        """Return bytes of the heap in new memory, uint8 [size]."""
        data, done = _new_memory(size), 0
        while done < size:
            count = os.preadv(self._heap, [data.data[done:]], start + done)
            if not count:
                raise CorruptStoreError(f"{self.path}: found the end of the heap at byte {start + done:,}: it was cut")
            done += count
        return data

    def _map(self, row: int, start: int, size: int) -> Bytes | None:
        """Map bytes of the heap privately, and keep the row until the map is freed.

        Return None if the row is being dropped, or if there are too many maps.
        """
        if self._used == -1 or not self._units.keep(row):
            return None
        try:
            skipped = start % mmap.ALLOCATIONGRANULARITY
            mapped = mmap.mmap(
                self._heap, size + skipped, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE,
                offset=start - skipped,
            )  # fmt: skip
        except OSError:
            self._units.let_go(row)
            return None
        weakref.finalize(mapped, self._units.let_go, row).atexit = False
        return np.frombuffer(mapped, np.uint8)[skipped:]

    # --- writing

    @contextlib.contextmanager
    def taken(self, digest: bytes) -> Iterator[int | None]:
        """Take the row of a key for the block, so that no other process computes it. Yields None if one has it now.

        A row that is new is made. Raises SpaceError or BuildError if the disk refuses.
        """
        row = self.find(digest)
        if row is None:
            with self._lock, locks.locked(self._work / "reserve"):
                row = self._digests.append(digest)
        if not self._units.take(row):
            yield None
            return
        try:
            yield row
        finally:
            self._units.release(row)

    def write(self, row: int, key: bytes, blob: Bytes) -> None:
        """Write the result of a row that is taken. Raises SpaceError or BuildError if the disk refuses."""
        size = len(blob)
        with self._lock:
            if self.size is not None and not self._make_room(size):
                return
            if self._units.is_present(row):
                self._units.drop(np.array([row]))  # of another key
            if self._writer is None:
                self._writer = self._build.writer()
            columns = np.frombuffer(key, np.uint8), blob
            self._writer.write(row, 1, [Packed([data], np.array([[len(data)]])) for data in columns])
            if self.size is not None:
                files.write_at(self._used, np.uint32(time.time()).tobytes(), row * 4)
            if self._build.is_sync_due():
                self._sync()

    def _sync(self) -> None:
        """Make the rows written so far durable, and their digests with them."""
        files.sync_data(self._work / "digests")
        self._build.sync()

    def _make_room(self, needed: int) -> bool:
        """Drop the rows that were not used for longest until ``needed`` bytes fit. Return False if they never can."""
        assert self.size is not None
        if needed > self.size:
            return False
        self._unmeasured -= needed
        if self._unmeasured >= 0:
            return True
        with locks.locked(self._work / "room"):
            states = np.array(self._units.states)
            rows = np.flatnonzero(self._units.are_present()[: len(states)])
            sizes = np.fromfile(ragged_files(self.path, BLOB).dims, np.int64)[rows]
            total = int(sizes.sum())
            if total + needed > self.size:
                used = np.fromfile(self._work / "used", np.uint32)
                used = np.concatenate([used, np.zeros(len(states), np.uint32)])[rows]
                order = np.argsort(used, kind="stable")
                excess = total + needed - int(self.size * _FULL)
                count = int(np.searchsorted(np.cumsum(sizes[order]), excess)) + 1
                total -= self._drop(rows[order].tolist(), count, sizes[order].tolist())
            self._unmeasured = max(0, min(self.size // _PARTS, self.size - total - needed))
            return True

    def _drop(self, rows: list[int], count: int, sizes: list[int]) -> int:
        """Drop the first ``count`` of these rows that nobody uses, and give their space back. Return their bytes."""
        dropped, freed = list[int](), 0
        for row, size in zip(rows, sizes, strict=True):
            if len(dropped) == count:
                break
            if self._units.take(row):
                dropped.append(row)
                freed += size
        try:
            places = [self._place(row) for row in dropped]
            self._units.drop(np.array(dropped, np.int64))
            with files.opened(ragged_files(self.path, BLOB).heap) as fd:
                files.punch(fd, [(start, start + size) for start, size in places])
        finally:
            for row in dropped:
                self._units.release(row)
        return freed

    # --- the function's results are compared for its first keys

    def proven(self, function: str) -> int:
        """Return for how many keys of a function two results were found equal."""
        try:
            return os.stat(self._proofs(function)).st_size
        except FileNotFoundError:
            return 0

    def add_proof(self, function: str) -> None:
        """Record that two results of a function were equal."""
        with files.opened(self._proofs(function), os.O_CREAT | os.O_APPEND) as fd:
            os.write(fd, b"=")

    def _proofs(self, function: str) -> Path:
        return self._work / f"proven-{function}"


def remove_counts_of_others(directory: Path) -> None:
    """Remove the counts of other runs, which did not end by themselves. Only while none of them is there."""
    for path in directory.glob("counts-*"):
        if f"-{os.environ.get(RUN, '')}-" not in path.name:
            files.remove(path)


def _new_memory(size: int) -> Bytes:
    """Return memory that nobody else has, uint8 [size].

    For 4 MiB and more numpy asks for huge pages, which torch does not: 36 MB are read in 4.6 ms and in 21. Memory that
    does not begin at a multiple of 64 takes 6.7.
    """
    if size < _LARGE:
        return np.empty(size, np.uint8)
    memory = np.empty(size + ALIGN, np.uint8)
    skipped = -memory.ctypes.data % ALIGN
    return memory[skipped : skipped + size]


def _make(path: Path) -> None:
    """Make an empty directory of results at ``path``, unless something is there. It appears complete, or not at all."""
    if os.path.lexists(path) and not (path.is_dir() and not path.is_symlink() and not os.listdir(path)):
        return
    files.make_directory(path.parent)
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        files.make_directory(new / WORK_DIRECTORY)
        Build.begin(new, SCHEMA, None, None)
        for name in ("digests", "reserve", "room", "attached", "used"):
            files.write_file(new / WORK_DIRECTORY / name, b"")
        files.write_file(new / MARKER, msgspec.json.encode(Marker()) + b"\n")
        with contextlib.suppress(BuildError):  # another process was first
            files.rename(new, path)
    finally:
        files.remove_tree(new)


def _require_known(path: Path) -> None:
    """Raise StoreError unless the results at ``path`` are of this version."""
    try:
        found = msgspec.json.decode((path / MARKER).read_bytes(), type=Marker)
    except (OSError, ValueError):
        raise StoreError(_not_a_memo(path)) from None
    if found != Marker():
        raise StoreError(
            f"{path}: found results of format {found.format!r}, version {found.version}; expected version {VERSION}: "
            "use the memfeed that wrote them, or another path"
        )


def _not_a_memo(path: Path) -> str:
    return (
        f"{path}: found something else than memoized results; expected a directory of memfeed.memoize, or nothing: "
        "choose another path"
    )


_every: weakref.WeakSet[Memo] = weakref.WeakSet()


def _after_fork() -> None:
    for memo in list(_every):
        memo.begin_process()


os.register_at_fork(after_in_child=_after_fork)
