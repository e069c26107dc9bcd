"""Serve a partial store in one process: what its readers and forked children want, its thread, errors, and the end.

Units for forked children of the process that brings them: neither threads nor connections survive a fork.

A child writes the numbers of units into a pipe; its parent brings them into the partial store, which both see.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import mmap
import os
import select
import struct
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np

from memfeed import errors
from memfeed.building.unit_queue import NONE, UnitQueue
from memfeed.errors import BuildError, MemfeedError, StoreError
from memfeed.schema.codec import Int64Array
from memfeed.store.backing import Backing
from memfeed.store.row_supply import ReadRequest
from memfeed.system.progress import write_line
from memfeed.system.threads import end_at_exit

_HEAD = struct.Struct("<qi?")  # how many errors there were, the bytes of the last one's text, whether it is the last
_OTHER_COLUMNS = -1  # the last byte of the page: 1 once columns have changed
_LARGEST = 4000
_NO_UNIT = struct.pack("q", -1)
_NUMBERS_AT_ONCE = 256  # a write of so many is one piece to the pipe (PIPE_BUF)


class ChildRequests:
    """A pipe from children to this process, and a page of memory that both share, for an error."""

    def __init__(self) -> None:
        self._receiver, self._sender = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._shared = mmap.mmap(-1, 4096)
        self._pid = os.getpid()
        for fd in (self._receiver, self._sender):
            weakref.finalize(self, os.close, fd)

    # --- in the process that brings units

    def receive(self, seconds: float) -> Int64Array:
        """Return the units that children want, int64 [k], after at most so many seconds."""
        try:
            if not select.select([self._receiver], [], [], seconds)[0]:
                return np.empty(0, np.int64)
            found = np.unique(np.frombuffer(os.read(self._receiver, 1 << 16), np.int64))
            return found[found >= 0]
        except (OSError, ValueError):  # it is closed
            return np.empty(0, np.int64)

    def wake(self) -> None:
        """Let `receive` return now."""
        with contextlib.suppress(OSError):  # it is full, or closed
            os.write(self._sender, _NO_UNIT)

    def report(self, error: BaseException, *, is_last: bool = False) -> None:
        """Let children raise an error that wait now. With ``is_last`` nothing is brought any more: later ones too."""
        text = f"{type(error).__name__} {error}".encode()[:_LARGEST]
        self._shared[_HEAD.size : _HEAD.size + len(text)] = text
        _HEAD.pack_into(self._shared, 0, self.error_count() + 1, len(text), is_last)

    def columns_change(self) -> None:
        """Let children raise an error that read columns from now on: they have those of before."""
        self._shared[_OTHER_COLUMNS] = 1

    # --- in a child

    def require_same_columns(self) -> None:
        """Raise StoreError if the columns have changed since this process was forked."""
        if self._shared[_OTHER_COLUMNS]:
            raise errors.StoreError(
                "found that a column has changed while the store was filled, because a row had another shape; expected "
                "the columns of when this process was forked: start its workers again, as the next epoch does"
            )

    def ask(self, units: Int64Array) -> None:
        """Ask the process that brings units for some. Raises an error if it has ended, or brings nothing any more."""
        if _HEAD.unpack_from(self._shared, 0)[2]:
            self.raise_new(0)
        if not _is_alive(self._pid):
            raise errors.StoreError(
                f"found that process {self._pid} has ended, which brought the rows that its children read; expected it "
                "to live as long as they do: open the store in each process"
            )
        for first in range(0, len(units), _NUMBERS_AT_ONCE):
            try:
                os.write(self._sender, units[first : first + _NUMBERS_AT_ONCE].astype(np.int64).tobytes())
            except BlockingIOError:
                return  # it is full: asked again soon

    def error_count(self) -> int:
        """Return how many errors there were so far."""
        count: int = _HEAD.unpack_from(self._shared, 0)[0]
        return count

    def raise_new(self, count: int) -> None:
        """Raise the last error, if there were not just ``count`` of them."""
        found, size, _ = _HEAD.unpack_from(self._shared, 0)
        if found != count:
            name, _, text = self._shared[_HEAD.size : _HEAD.size + size].decode(errors="replace").partition(" ")
            raise getattr(errors, name, errors.BuildError)(text)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True


POLL_SECONDS = 0.003  # between two looks whether units are there: each takes a few microseconds of the workers' CPU
ASK_SECONDS = 0.1  # after which units that are waited for are offered again to whoever brings them
JOIN_SECONDS = 5.0
QUIET_SECONDS = 2.0  # that the end may wait for a commit without a message
COMMIT_SECONDS = 60.0  # that the end of a process waits for a commit; the next run makes up for what is left


class Service(ABC):
    """Brings the units of a partial store, as ``RowSupply`` says. It ends with its last backing.

    A derived class has the supplier: threads or processes that bring the units of the queue.

    Args:
        root: the directory of the partial store.
        queue: which units are wanted, and which failed; it is used under ``changed``.
        changed: notified when units were brought, or failed.
        switch: lets a backing read the committed store.
    """

    in_caller = False
    finish_units: ClassVar[int]  # that `finish` waits for at once
    retries: ClassVar[bool]  # units that failed, when a reader asks for them again

    def __init__(
        self,
        root: Path,
        queue: UnitQueue,
        changed: threading.Condition,
        switch: Callable[[Backing], object],
    ) -> None:
        self.root, self.queue, self.changed, self._switch = root, queue, changed, switch
        self._children, self._pid = ChildRequests(), os.getpid()
        self._stopping, self._done = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._backings: weakref.WeakSet[Backing] = weakref.WeakSet()

    # --- the supplier, and the store

    @abstractmethod
    def _feed(self) -> None:
        """Let the supplier take units of the queue. The caller has ``changed``."""

    @abstractmethod
    def _serve(self) -> None:
        """Do what the thread of the service does, until ``_is_over``."""

    @abstractmethod
    def _end(self) -> list[Callable[[], object]]:
        """Return what the thread does at its end, also after an error."""

    @abstractmethod
    def _stop_supplier(self) -> None:
        """Let the supplier bring nothing more."""

    @abstractmethod
    def _will_commit(self) -> bool:
        """Return True if a commit is under way, for which the end of the process waits."""

    @abstractmethod
    def _await_commit(self) -> bool:
        """Return True once the store is committed; False if units were lost meanwhile. All were there."""

    # --- life

    def start(self) -> None:
        """Start the thread, unless it runs. The caller has ``changed``."""
        if self._thread is None and not self._stopping.is_set():
            self._thread = threading.Thread(target=self._run, name="memfeed-service", daemon=True)
            end_at_exit(self, self._thread)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._error = error
        finally:
            self._children.report(self._ending(), is_last=True)
            for close in self._end():
                with contextlib.suppress(Exception):  # the first error is the one that readers get
                    close()

    def follow(self, backing: Backing) -> None:
        """See ``RowSupply``."""
        if self.is_elsewhere():
            return
        with self.changed:
            self._backings.add(backing)
            weakref.finalize(backing, _dropped, weakref.ref(self)).atexit = False  # `end_at_exit` does that
            if self._done.is_set():
                self._switch(backing)

    def another_backing(self) -> Backing | None:
        """Return one more view of the columns; None if no more is brought."""
        backing = next(iter(self._backings), None)
        if backing is None or self._stopping.is_set():
            return None
        backing = dataclasses.replace(backing)
        self.follow(backing)
        return backing

    def stop(self) -> None:
        """Let the supplier and the thread end. Units that were written stay."""
        if not self.is_elsewhere():
            self._stopping.set()
            self._stop_supplier()
            self._children.wake()

    def release(self, *, at_exit: bool = False) -> None:
        """Let the supplier and the thread end soon, without waiting for them."""
        self.stop()

    def join(self) -> None:
        """Wait for a commit that is under way; else stop, and wait a few seconds for the thread."""
        thread = self._thread
        if self.is_elsewhere() or thread is None or thread is threading.current_thread() or not thread.is_alive():
            self.stop()  # Ctrl-C may come before the thread is started
            return
        if self._will_commit():
            thread.join(QUIET_SECONDS)
            if thread.is_alive():
                write_line(f"memfeed: {self.root}: all rows are there; writing checksums before the end")
            thread.join(COMMIT_SECONDS)
        self.stop()
        thread.join(JOIN_SECONDS)

    def is_elsewhere(self) -> bool:
        """Return True in a forked child, which has neither the thread nor the supplier."""
        return os.getpid() != self._pid

    def _is_over(self) -> bool:
        return self._done.is_set() or self._stopping.is_set()

    def _switch_backings(self) -> None:
        """Note that the store is committed."""
        with self.changed:
            self._done.set()
            self._stop_supplier()
            self._children.wake()
            for backing in list(self._backings):
                self._switch(backing)

    # --- what readers ask for

    def absent(self, units: Int64Array) -> Int64Array:
        """Return the units of ``units`` that are not there."""
        found: Int64Array = units[self.queue.are_absent(units)]
        return found

    def want(self, reader: ReadRequest, rows: Int64Array) -> None:
        """See ``RowSupply``."""
        if not self.is_elsewhere() and not self._is_over():
            with self.changed:
                self.queue.want(reader, rows)
                self.start()
                self._feed()

    def forget(self, reader: ReadRequest) -> None:
        """See ``RowSupply``."""
        if not self.is_elsewhere() and not self._is_over():
            with self.changed:
                self.queue.forget(reader)

    def note_wait(self, reader: ReadRequest, rows: Int64Array) -> None:
        """Note that a reader waits for these rows now, before their units are brought."""
        if not self.is_elsewhere():
            with self.changed:
                self.queue.wait(reader, rows)

    def ask(self, units: Int64Array, asked: Int64Array = NONE) -> None:
        """Let units be brought before all others. Those that failed are tried again, without those ``asked`` before."""
        if self.is_elsewhere():
            self._children.ask(units)
            return
        with self.changed:
            if self.retries:
                self.queue.retry(units[~np.isin(units, asked)])
            self.queue.prioritise(units)
            self.start()
            self._feed()

    def bring(
        self,
        units: Int64Array,
        missing: Callable[[Int64Array], Int64Array] | None = None,
        asked: Int64Array = NONE,
    ) -> None:
        """Return once none of ``units`` is missing: absent, unless ``missing`` says other. Raise what keeps it so.

        What failed since the caller ``asked`` for some of them is raised, and not tried again.
        """
        missing = missing or self.absent
        if not len(units := missing(units)):
            return
        errors, due = self._children.error_count(), time.monotonic() + ASK_SECONDS
        self.ask(units, asked)
        while len(units := missing(units)):
            if is_due := time.monotonic() >= due:
                due += ASK_SECONDS
            if self.is_elsewhere():
                self._children.raise_new(errors)
                if is_due:
                    self._children.ask(units)
                time.sleep(POLL_SECONDS)
                continue
            self._raise_for(units)
            with self.changed:
                if self.queue.prioritise(units) or is_due:  # they may have been dropped again
                    self._feed()
                self.changed.wait(POLL_SECONDS)  # another process may bring them, which notifies nobody here

    def _raise_for(self, units: Int64Array) -> None:
        """Raise what keeps one of these units from being brought."""
        failed = self.queue.failed  # another reader may let one be tried again meanwhile
        error = next(filter(None, map(failed.get, units.tolist())), None) if failed else None
        if error is None and (self._error is not None or self._stopping.is_set()):
            error = self._ending()
        if error is not None:
            raise error

    def _ending(self) -> MemfeedError:
        """Return what keeps all units from being brought, once the service has ended."""
        if isinstance(self._error, MemfeedError):
            return self._error
        if self._error is None:
            return StoreError(
                f"{self.root}: found that its rows come no more; expected the store to be in use: open it again"
            )
        error = BuildError(
            f"{self.root}: found that the store cannot be filled any more ({self._error!r}); expected its rows: the "
            "rows that were written are kept, and the same call goes on from there"
        )
        error.__cause__ = self._error
        return error

    def finish(self, brought: Callable[[], object] = lambda: None) -> None:
        """See ``RowSupply``. ``brought`` is called after each part."""
        every, is_committed = np.arange(self.queue.count), False
        while not is_committed:
            for first in range(0, self.queue.count, self.finish_units):
                self.bring(every[first : first + self.finish_units])
                brought()
            is_committed = self.is_elsewhere() or self._await_commit()

    # --- forked children

    def serve_children(self, seconds: float = 0.0) -> None:
        """Ask for the units that forked children want, and tell them what failed; wait at most so many seconds."""
        units = self._children.receive(seconds)
        if len(units):
            with self.changed:
                failed = [self.queue.failed[unit] for unit in units.tolist() if unit in self.queue.failed]
            for error in failed:
                self._children.report(error)
            self.ask(self.absent(units))


def _dropped(found: weakref.ref[Service]) -> None:
    """End the service whose last backing is gone."""
    service = found()
    if service is not None and not any(True for _ in service._backings):
        service.release()
