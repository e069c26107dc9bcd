"""The units of a partial store: which of them are there, who brings one, and what survives a kill or a power loss.

A unit is what is brought at once: a row of a build, or a chunk of the cache of a store at an address. Any number of
processes and threads share a partial store. All that they share is in files of its work directory, which the kernel
keeps right when a process is killed:

- ``presence`` has the state of each unit, one byte. It is mapped to be read, and locked while bytes are synced.
- ``locks`` is locked by bytes: a process that brings or drops a unit has its byte alone, processes that copy the unit
  share it. Such a lock ends with its process, so a unit that is brought is ABSENT, and stays so if that process dies.
- ``writers`` is locked shared by each process that is inside a write.
- ``syncing`` is there during a sync. If it is left over, its process was killed, and no other one knows how it ended.
- ``boot`` says in which start of the machine units were written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memfeed.errors import MemfeedError, StoreError
from memfeed.schema.codec import Int64Array
from memfeed.system import files, locks, machine
from memfeed.system.descriptors import close_all
from memfeed.system.signals import defer_signals

SYNCING = "syncing"
_POLL_SECONDS = 0.005
ABSENT, WRITTEN, DURABLE, SKIPPED, HELD = range(5)
"""DURABLE: on the disk. SKIPPED: a sample that raised. HELD: absent, but its room is reserved; see ``may_drop``."""


class Units:
    """The units of the partial store whose work directory is ``work``.

    Args:
        count: how many there are; None if that is not known yet: marks make the map longer.
        may_drop: any process may drop units that it has alone. Then those that a sync makes durable are kept meanwhile,
            and those that are lost become HELD, because their bytes still take room.
        when_lost: called with the states [n] after units were lost, while no process is inside a write.
    """

    def __init__(
        self,
        work: Path,
        count: int | None,
        *,
        may_drop: bool = False,
        when_lost: Callable[[npt.NDArray[np.uint8]], object] = len,
    ) -> None:
        self._work, self._count, self._may_drop, self._when_lost = work, count, may_drop, when_lost
        self._lost = HELD if may_drop else ABSENT
        self._presence = os.fspath(work / "presence")
        self._map: npt.NDArray[np.uint8] | None = None
        self._fds: dict[str, int] = {}
        weakref.finalize(self, close_all, self._fds)
        _every.add(self)
        self._begin_process()

    def _begin_process(self) -> None:
        """Hold nothing: locks belong to the process that took them."""
        close_all(self._fds)
        self._mutex, self._writing_mutex, self._opening = threading.Lock(), threading.Lock(), threading.Lock()
        self._alone: set[int] = set()
        self._kept: dict[int, int] = {}  # how often this process keeps a unit
        self._writing = 0  # threads of this process that are inside a write

    def __reduce__(self) -> tuple[object, ...]:
        return partial(Units, self._work, self._count, may_drop=self._may_drop, when_lost=self._when_lost), ()

    @staticmethod
    def create(work: Path, count: int, states: npt.NDArray[np.uint8] | None = None) -> None:
        """Make the files for so many units, which are absent if ``states`` [n] is not given. The map is synced."""
        files.write_file(work / "presence", b"" if states is None else states.tobytes())
        with files.opened(work / "presence") as fd:
            files.preallocate(fd, count)
            files.sync(fd)  # units will be called durable: the map must exist then
        for name in ("locks", "writers"):
            files.write_file(work / name, b"")
        files.write_file(work / "boot", _boot())

    def close(self) -> None:
        """Close the files, and release what is held."""
        with self._mutex, self._writing_mutex:
            self._begin_process()

    def _fd(self, name: str) -> int:
        with self._opening:
            if name not in self._fds:
                self._fds[name] = files.open_write(self._work / name)
            return self._fds[name]

    # --- states

    @property
    def states(self) -> npt.NDArray[np.uint8]:
        """The state of each unit, uint8 [n]. It is mapped: it changes when a process marks a unit. Do not write to it.

        Raises StoreError if the map has another length.
        """
        if self._map is None or self._count is None:
            path = self._presence  # text, because a path of pathlib takes as long as the rest
            size = os.stat(path).st_size
            if self._count is not None and size != self._count:  # else units out of range would count as written
                raise StoreError(
                    f"{path}: found {size:,} bytes; expected {self._count:,}, one a row or chunk: the map is damaged; "
                    f"remove {self._work.parent} to start over"
                )
            if self._map is None or len(self._map) != size:  # indexing a memmap itself takes ten times as long
                self._map = np.asarray(np.memmap(path, np.uint8, "r")) if size else np.zeros(0, np.uint8)
        return self._map

    def are_present(self, units: Int64Array | slice = slice(None)) -> npt.NDArray[np.bool_]:
        """Return which of these units, or of all, have bytes that can be read; bool [k]."""
        states = self.states[units]
        return np.asarray((states == WRITTEN) | (states == DURABLE))

    def is_present(self, unit: int) -> bool:
        """Return True if the bytes of a unit can be read; False for one behind the end of the map."""
        states = self._map
        if self._count is not None or states is None or unit >= len(states):
            states = self.states
        return unit < len(states) and int(states[unit]) in (WRITTEN, DURABLE)

    def mark(self, first: int, count: int, state: int) -> None:
        """Set the state of ``count`` units from ``first``. Call it within `writing` for bytes that were written."""
        files.write_at(self._fd("presence"), bytes([state]) * count, first)

    def _mark(self, units: Int64Array, state: int) -> None:
        for first, count in runs(units):
            self.mark(first, count, state)

    # --- locks

    def take(self, unit: int) -> bool:
        """Return True if this caller alone has the unit now: no other one brings, drops or keeps it."""
        with self._mutex:
            is_free = unit not in self._alone and unit not in self._kept and self._lock(fcntl.F_WRLCK, unit)
            if is_free:
                self._alone.add(unit)
            return is_free

    def release(self, unit: int) -> None:
        """Release a unit that was taken."""
        with self._mutex:
            if unit in self._alone:  # not in a child that was forked meanwhile
                self._alone.remove(unit)
                self._lock(fcntl.F_UNLCK, unit)

    def keep(self, unit: int) -> bool:
        """Let no process drop a unit until ``let_go``. Return False, and keep nothing, if it is not present."""
        with self._mutex:
            found = unit not in self._alone and (unit in self._kept or self._lock(fcntl.F_RDLCK, unit))
            if found:
                self._kept[unit] = self._kept.get(unit, 0) + 1
        if found and not self.is_present(unit):
            self.let_go(unit)
            return False
        return found

    def let_go(self, unit: int) -> None:
        """End one ``keep``."""
        with self._mutex:
            count = self._kept.pop(unit, 0)
            if count > 1:
                self._kept[unit] = count - 1
            elif count:
                self._lock(fcntl.F_UNLCK, unit)

    @contextlib.contextmanager
    def hold(self, units: Iterable[int]) -> Iterator[list[int]]:
        """Take those of ``units`` that are absent and that nobody has, for the block. Yields them, each once."""
        held = list[int]()
        try:
            for unit in units:
                if self.states[unit] == ABSENT and self.take(unit):
                    held.append(unit)
            # another process may have written a unit just before it released it
            yield [unit for unit in held if self.states[unit] == ABSENT]
        finally:
            for unit in held:
                self.release(unit)

    def _lock(self, kind: int, unit: int) -> bool:
        """Lock or unlock the byte of a unit; return False if another process has it."""
        # a lock of this descriptor where the system has such locks: that of a process would end when the process closes
        # any other descriptor of the file
        command = getattr(fcntl, "F_OFD_SETLK", fcntl.F_SETLK)
        try:
            fcntl.fcntl(self._fd("locks"), command, struct.pack("hhqqi", kind, os.SEEK_SET, unit, 1, 0))
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                action = "locking a part of it: some network file systems have no locks"
                raise files.refused(error, self._work / "locks", action) from error
            return False
        return True

    # --- writes

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Write bytes of units and mark them WRITTEN within the block. A sync that fails waits for its end.

        Without that, a unit could be marked after its bytes were lost.
        """
        with self._writing_mutex:
            if not self._writing:
                fcntl.flock(self._fd("writers"), fcntl.LOCK_SH)
            self._writing += 1
        try:
            yield
        finally:
            with self._writing_mutex:
                self._writing -= 1
                if not self._writing:  # to close the file is not enough: a child forked now has it too
                    fcntl.flock(self._fd("writers"), fcntl.LOCK_UN)

    def is_quiet(self, wait_seconds: float = 0.0) -> bool:
        """Return True if no process is inside a write, or none is within so many seconds."""
        end = time.monotonic() + wait_seconds
        with files.opened(self._work / "writers") as fd:
            while True:
                try:
                    locks.lock(fd, self._work / "writers")
                    fcntl.flock(fd, fcntl.LOCK_UN)
                    return True
                except BlockingIOError:
                    if time.monotonic() >= end:
                        return False
                    time.sleep(_POLL_SECONDS)

    def drop(self, units: Int64Array) -> None:
        """Set units to absent, because their bytes will change or go. Only for those that no other process uses.

        A power loss leaves none of them durable. Raises BuildError if the disk refuses to note that.
        """
        states = self.states
        units = units[units < len(states)]
        units = units[states[units] != ABSENT]
        if len(units):
            # a sync that is under way must not call them durable afterwards
            with contextlib.nullcontext() if self._may_drop else locks.locked(self._work / "presence"):
                self.demote(units)
                with self.writing():
                    self._mark(units, ABSENT)

    def demote(self, units: Int64Array) -> None:
        """Let none of these units be durable: later they can be dropped without a sync for each. They stay present."""
        durable = units[self.states[units] == DURABLE]
        if len(durable):
            self._mark(durable, WRITTEN)
            try:
                files.sync(self._fd("presence"))
            except BaseException:
                with defer_signals():
                    self._mark(durable, DURABLE)  # the next try syncs it again
                raise

    # --- syncs, and what they lose

    def sync(self, sync_bytes: Callable[[Int64Array], object]) -> None:
        """Make the units that are WRITTEN now durable. ``sync_bytes`` gets them, and waits until they are on the disk.

        If that fails, no unit is there that is not durable, because the system reports a lost page only once.
        """
        with self._alone_in_sync(), contextlib.ExitStack() as kept:
            written = np.flatnonzero(self.states == WRITTEN)
            if self._may_drop:
                written = np.array([unit for unit in written.tolist() if self.keep(unit)], np.int64)
                for unit in written.tolist():
                    kept.callback(self.let_go, unit)
            with self._syncing():
                sync_bytes(written)
            if len(written):
                self._mark(written, DURABLE)
                files.sync(self._fd("presence"))

    @contextlib.contextmanager
    def lost_if_unsynced(self) -> Iterator[None]:
        """Lose the units that are not durable if a sync within the block fails, or the process is killed within it."""
        with self._alone_in_sync(), self._syncing():
            yield

    def lose_unsynced(self) -> None:
        """Lose the units that are not durable if a process was killed while it synced them."""
        with self._alone_in_sync():
            pass

    @contextlib.contextmanager
    def _alone_in_sync(self) -> Iterator[None]:
        """Keep other syncs out: only one process is told of a failure, and another could call lost units durable."""
        with locks.locked(self._work / "presence"):
            if (self._work / SYNCING).exists():
                self._lose()
                files.remove(self._work / SYNCING)
            yield

    @contextlib.contextmanager
    def _syncing(self) -> Iterator[None]:
        """Lose the units that are not durable if a sync of the block fails, and raise its error.

        The system reports a failed sync once, drops the bytes that it could not write, and lets the next sync succeed.
        Until they are dropped from memory too, they can still be read, so their hashes show nothing. The mark is there
        during the block. It stays if the process is killed meanwhile, or if the disk does not let the units be lost.
        """
        outer, mark = sys.exc_info()[1], self._work / SYNCING
        with files.opened(mark, os.O_CREAT):
            pass
        try:
            yield
        except BaseException as error:
            with defer_signals(), contextlib.suppress(MemfeedError, OSError):  # report the first error
                if _tells_of_sync(error, outer):
                    self._lose()
                files.remove(mark)
            raise
        files.remove(mark)

    def _lose(self) -> None:
        """Let no unit be there that is not durable, once no process is inside a write, whose bytes may be lost too.

        That has not to be synced: after a power loss no unit counts that is not durable.
        """
        with locks.locked(self._work / "writers"):
            self._mark(np.flatnonzero(self.states == WRITTEN), self._lost)
            self._when_lost(self.states)

    def recover(self, is_right: Callable[[int], bool] | None = None) -> None:
        """Lose the units that a power loss may have damaged, or that a killed process was syncing.

        Of those that were written before the last start of the machine, the ones stay for which ``is_right`` returns
        True, by their hash. Only while no other process brings units.
        """
        self.lose_unsynced()
        path, boot = self._work / "boot", _boot()
        if not machine.boot_id() or not path.exists() or path.read_bytes() != boot:
            lost = np.flatnonzero(self.states == WRITTEN)
            if is_right is not None:
                lost = np.array([unit for unit in lost.tolist() if not is_right(unit)], np.int64)
            self._mark(lost, self._lost)
            files.write_atomically(path, boot)


def runs(numbers: npt.NDArray[np.int64] | Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, count) of each run of consecutive numbers, for sorted ``numbers``."""
    array = np.asarray(numbers, np.int64)
    if not len(array):
        return []
    cuts = np.flatnonzero(np.diff(array) != 1) + 1
    firsts = array[np.concatenate([[0], cuts])]
    counts = np.diff(np.concatenate([[0], cuts, [len(array)]]))
    return list(zip(firsts.tolist(), counts.tolist(), strict=True))


def _tells_of_sync(error: BaseException | None, outer: BaseException | None) -> bool:
    """Return True if a sync failed before ``error`` was raised, but after ``outer`` was.

    Ctrl-C during a sync takes the place of the error of the sync, which is its context then.
    """
    is_signal = not isinstance(error, Exception)
    while error is not None and error is not outer:
        if getattr(error, "unsynced", False) or (is_signal and isinstance(error, OSError)):
            return True
        error = error.__context__
    return False


def _boot() -> bytes:
    return f"{machine.host_name()} {machine.boot_id()}".encode()


_every: weakref.WeakSet[Units] = weakref.WeakSet()


def _after_fork() -> None:
    # a lock lives as long as any copy of its descriptor: a child that outlives its parent would keep it
    for units in list(_every):
        units._begin_process()


os.register_at_fork(after_in_child=_after_fork)
