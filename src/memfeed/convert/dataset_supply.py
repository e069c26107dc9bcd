"""Fill a store while it is read: bring the rows in the order in which loaders want them, and commit at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memfeed.building.build import Build
from memfeed.building.claim import ClaimedError, claim, unshare
from memfeed.building.partial import ABSENT, SKIPPED
from memfeed.convert.conversion import Conversion
from memfeed.convert.processes import open_processes
from memfeed.convert.readback import require_probed
from memfeed.convert.row_engine import MOST_ROWS_A_LIST, RowEngine
from memfeed.convert.row_worker import REREAD, RowWorker
from memfeed.convert.watchdog import Watchdog
from memfeed.errors import BuildError, MemfeedError
from memfeed.schema.codec import Int64Array
from memfeed.store import format
from memfeed.store.backing import Backing, switch_to_committed
from memfeed.store.row_supply import FillProgress, ReadRequest
from memfeed.system.progress import Progress, write_line
from memfeed.system.threads import end_at_exit

POLL_SECONDS = 0.003  # between two looks whether rows are there: each takes a few microseconds of the workers' CPU
RESEND_SECONDS = 0.25  # after which rows that readers wait for are sent again, if no worker has them
TICK_SECONDS = 0.5
JOIN_SECONDS = 5.0
QUIET_SECONDS = 2.0  # that the end may wait for a commit without a message
COMMIT_SECONDS = 60.0  # that the end of a process waits for a commit; the next run makes up for what is left


class DatasetSupply:
    """Brings the rows of a build, as ``RowSupply`` says, with workers and a thread. It ends with the last backing.

    Args:
        lead: holds the claim of the build, if this process has it.
        shared: the descriptor that says to others that this process fills the build.
        owner: lives until the end, as a temporary directory must.
    """

    keeps_rows = True

    def __init__(
        self, conversion: Conversion, build: Build, lead: contextlib.ExitStack | None, shared: int, owner: object
    ) -> None:
        self.conversion, self.build, self.in_caller = conversion, build, not conversion.worker_count
        self._lead, self._shared, self._owner, self._pid = lead, shared, owner, os.getpid()
        open_pool = partial(
            open_processes,
            conversion.given.dataset,
            build,
            conversion.plan,
            conversion.worker_count,
            conversion.options.worker_init_fn,
        )
        self._engine = RowEngine(build, conversion.plan, open_pool, conversion.result.probed.seconds)
        self._queue, self._states = self._engine.queue, self._engine.states
        self._tick_due = 0.0
        self._error: BaseException | None = None
        self._stopping, self._done = threading.Event(), threading.Event()
        self._caller_lock, self._wake = threading.Lock(), threading.Event()
        self._here: RowWorker | None = None  # in the caller's thread
        self._thread = threading.Thread(target=self._run, name="memfeed-filler", daemon=True)
        self._backings: weakref.WeakSet[Backing] = weakref.WeakSet()

    # --- life

    def start(self, backing: Backing) -> None:
        """Start the workers and the thread. ``backing`` reads the finished store once there is one."""
        self.follow(backing)
        if not self.in_caller:
            self._engine.start()
        _filling.add(self)
        end_at_exit(self)
        self._thread.start()

    def follow(self, backing: Backing) -> None:
        """Let another view of the same columns read the finished store, too."""
        with self._engine.lock:
            self._backings.add(backing)
            weakref.finalize(backing, _dropped, weakref.ref(self)).atexit = False  # `end_at_exit` does that
            if self._done.is_set():
                switch_to_committed(backing)

    def another_backing(self) -> Backing | None:
        """Return one more view of the columns; None in another process, or if this one does not fill any more."""
        backing = next(iter(self._backings), None)
        if backing is None or self._is_elsewhere() or self._stopping.is_set():
            return None
        backing = dataclasses.replace(backing)
        self.follow(backing)
        return backing

    def stop(self) -> None:
        """Let workers and thread end. Rows that were written stay."""
        if not self._is_elsewhere():
            self._stopping.set()
            self._wake.set()
            self._engine.stop()

    def join(self) -> None:
        """Wait for the commit if all rows are there; else stop, and wait a few seconds for the thread."""
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            self.stop()  # Ctrl-C may come before the thread is started
            return
        if self._will_commit():
            self._thread.join(QUIET_SECONDS)
            if self._thread.is_alive():
                write_line(f"memfeed: {self.conversion.target}: all rows are there; writing checksums before the end")
            self._thread.join(COMMIT_SECONDS)
        self.stop()
        self._thread.join(JOIN_SECONDS)

    def release(self) -> None:
        """Stop workers and thread: after the commit if all rows are there, else now."""
        if not self._will_commit():
            self.stop()

    def has_backing(self) -> bool:
        """Return True if a store still reads the rows."""
        return any(True for _ in self._backings)

    def _will_commit(self) -> bool:
        is_ours = not self._is_elsewhere() and self._lead is not None and not self.conversion.is_temporary
        is_running = self._thread.is_alive() and not self._is_over()
        return is_ours and is_running and self._is_complete() and (self._engine.is_reread or not self.in_caller)

    def _is_over(self) -> bool:
        return self._done.is_set() or self._stopping.is_set()

    def _is_elsewhere(self) -> bool:
        """Return True in a forked child, which has neither the thread nor the workers."""
        return os.getpid() != self._pid

    # --- the thread

    def _run(self) -> None:
        bar = contextlib.ExitStack()
        try:
            shown = bar.enter_context(self._new_bar())
            while not self._is_over():
                try:
                    self._fill(shown)
                except (OSError, MemfeedError) as error:
                    self._await_commit(error)
        except BaseException as error:
            self._error = error
        finally:
            for close in (self._engine.close, self._close_here, bar.close, self._keep, self._leave):
                with contextlib.suppress(Exception):  # the first error is the one that readers get
                    close()
            self._owner = None

    def _fill(self, bar: Progress) -> None:
        if self.in_caller:
            while not self._is_over():
                self._wake.wait(TICK_SECONDS)
                self._wake.clear()
                self._tick(bar)
            return
        for _ in self._engine.reports():
            if self._engine.is_idle:
                self._tick_due = 0.0  # it may be complete
            self._tick(bar)

    def _tick(self, bar: Progress) -> None:
        """Do what is due: a sync, the claim of a process that has died, the commit."""
        now = time.monotonic()
        if now < self._tick_due and not self._engine.is_reread:
            return
        self._tick_due = now + TICK_SECONDS
        found = self.progress()
        bar.advance_to(found.present + found.skipped, found.total)
        if self._lead is None:
            self._try_to_lead()
        if self._lead is not None and not self._done.is_set():
            self.build.sync_if_due()
            if found.present + found.skipped == found.total:
                self._commit()

    def _await_commit(self, error: Exception) -> None:
        """Wait until another process has committed the store. Raise the error of a worker if there can be none.

        The files of a build that is committed vanish, also while workers of a process that has joined it start.
        """
        if self._lead is not None or not self._is_complete():
            raise error
        self._engine.close()
        while not self._is_over() and self._lead is None:
            self._try_to_lead()
            time.sleep(POLL_SECONDS)

    def _keep(self) -> None:
        if self._done.is_set() or self._lead is None or self.conversion.is_temporary:
            return
        self.build.sync()
        if self.conversion.options.says:
            found = self.progress()
            write_line(
                f"memfeed: {self.conversion.target}: {found.present:,} of {found.total:,} rows are kept; the same call "
                "goes on from there"
            )

    def _leave(self) -> None:
        if self._shared >= 0:
            unshare(self._shared)
            self._shared = -1
        if self._lead is not None:
            self._lead.close()

    def _new_bar(self) -> Progress:
        found = self.progress()
        name, progress = self.conversion.target.name, self.conversion.options.progress
        done = found.present + found.skipped
        return Progress(name, found.total, unit=" rows", progress=progress, done=done, delay_seconds=1.0)

    # --- what loaders ask for

    def want(self, reader: ReadRequest, rows: Int64Array) -> None:
        """See ``RowSupply``."""
        if not self._is_elsewhere() and not self.in_caller:
            self._engine.want(reader, rows)

    def forget(self, reader: ReadRequest) -> None:
        """See ``RowSupply``."""
        if not self._is_elsewhere():
            self._engine.forget(reader)

    def wait(self, reader: ReadRequest, rows: Int64Array) -> npt.NDArray[np.bool_] | None:
        """See ``RowSupply``."""
        due = 0.0
        if not self._is_elsewhere():
            self._engine.wait(reader, rows)
        while len(absent := self._absent(rows)):
            self._raise_for(absent)
            if self.in_caller:
                self._compute(absent)
                continue
            if time.monotonic() >= due and not self._is_elsewhere():
                due = time.monotonic() + RESEND_SECONDS
                self._engine.prioritise(absent)
            time.sleep(POLL_SECONDS)
        self._reread_here()
        is_present = self._states[rows] != SKIPPED
        return None if is_present.all() else is_present

    def _raise_for(self, absent: Int64Array) -> None:
        """Raise what keeps one of these rows from being filled."""
        failed = self._queue.failed
        failure = next((failed[row] for row in absent.tolist() if row in failed), None) if failed else None
        if failure is not None:
            raise failure.error from failure.cause
        if self._error is not None:
            if isinstance(self._error, MemfeedError):
                raise self._error
            raise BuildError(
                f"{self.build.root}: found that the store cannot be filled any more ({self._error!r}); expected its "
                "rows: the rows that were written are kept, and the same call goes on from there"
            ) from self._error
        if self._stopping.is_set() and not self._is_elsewhere():
            raise BuildError(f"{self.build.root}: found that filling was stopped; expected the store to be in use")

    def _compute(self, absent: Int64Array) -> None:
        """Read and write rows in the caller's thread."""
        with self._caller_lock:
            for first in range(0, len(absent), MOST_ROWS_A_LIST):
                try:
                    report = self._worker_here().write(absent[first : first + MOST_ROWS_A_LIST].tolist())
                except (OSError, MemfeedError):
                    if len(self._absent(absent)):
                        raise
                    return  # other processes have written them, and committed the store
                self._queue.failed.update(report.failed)
                self._raise_for(np.array([row for row, _ in report.failed], np.int64))
        if len(self._absent(absent)):
            time.sleep(POLL_SECONDS)  # another process has them

    def _worker_here(self) -> RowWorker:
        if self._here is None or self._is_elsewhere():
            conversion = self.conversion
            self._here = RowWorker(conversion.given.dataset, self.build, conversion.plan, Watchdog(0), 0)
        return self._here

    def _close_here(self) -> None:
        with self._caller_lock:
            if self._here is not None:
                self._here.close()
                self._here = None

    def _reread_here(self) -> None:
        """Compare some rows with the dataset before the commit, where the caller's thread is the one that reads it."""
        is_due = self.in_caller and self._lead is not None and not self._engine.is_reread
        if is_due and not self._is_elsewhere() and self._is_complete():
            self._worker_here().do(REREAD)
            self._engine.is_reread = True
            self._wake.set()

    def require_room(self, mixed_rows: int) -> None:
        """See ``RowSupply``: there is room for all rows."""

    def substitute_row(self) -> int:
        """See ``RowSupply``."""
        present = np.flatnonzero((self._states != ABSENT) & (self._states != SKIPPED))
        if not len(present):
            raise BuildError(
                f"{self.build.root}: found no row that can be read ({self.progress().skipped} raised); expected one"
            )
        return int(present[0])

    def has(self, row: int) -> bool:
        """Return True if a row can be read."""
        return int(self._states[row]) not in (ABSENT, SKIPPED)

    def progress(self) -> FillProgress:
        """See ``RowSupply``."""
        counts = np.bincount(self._states, minlength=SKIPPED + 1)
        total = len(self._states)
        return FillProgress(total - int(counts[ABSENT] + counts[SKIPPED]), total, int(counts[SKIPPED]))

    def _is_complete(self) -> bool:
        return not (self._states == ABSENT).any()

    def _absent(self, rows: Int64Array) -> Int64Array:
        found: Int64Array = rows[self._states[rows] == ABSENT]
        return found

    def skipped(self) -> tuple[int, ...]:
        """See ``RowSupply``."""
        return tuple(np.flatnonzero(self._states == SKIPPED).tolist())

    def finish(self) -> None:
        """See ``RowSupply``."""
        every, reader = np.arange(len(self._states)), ReadRequest()
        while not self._done.wait(POLL_SECONDS):
            if not self._is_complete():  # at first; and again after rows were lost: `Units.lose_unsynced`
                for first in range(0, len(every), 1 << 16):
                    self.wait(reader, every[first : first + (1 << 16)])
                self.forget(reader)
            self._reread_here()  # the process that was to commit it may have ended since
            if self._error is not None or self._is_over():
                self._raise_for(every[:0])
        with self._engine.lock:  # until the columns are those of the store
            pass

    # --- the store at the end

    def _try_to_lead(self) -> None:
        """Take the claim of the build if the process that had it has ended. Without a build, open the store."""
        target = self.conversion.target
        if (target / format.MANIFEST).exists():
            self._switch_backings()
            return
        lead = contextlib.ExitStack()
        try:
            root = lead.enter_context(claim(target, wait=False))
        except ClaimedError:
            return
        if (target / format.MANIFEST).exists() or not Build.is_begun(root):
            lead.close()
            if not (target / format.MANIFEST).exists():
                raise BuildError(f"{root}: found that the build was removed while it was filled; run this again")
            self._switch_backings()
            return
        self._lead = lead
        self.build.units.lose_unsynced()  # of the process that has died

    def _commit(self) -> None:
        if not self._engine.is_reread:
            self._engine.request_reread()
            return
        require_probed(self.build)
        self.build.commit(self.conversion.target, kept=self.conversion.kept_now())
        self._switch_backings()

    def _switch_backings(self) -> None:
        with self._engine.lock:
            self._done.set()
            self._engine.stop()
            for backing in list(self._backings):
                switch_to_committed(backing)


_filling: weakref.WeakSet[DatasetSupply] = weakref.WeakSet()


def _dropped(found: weakref.ref[DatasetSupply]) -> None:
    """End the supply whose last backing is gone."""
    supply = found()
    if supply is not None and not supply.has_backing():
        supply.release()


def backing_at(target: Path) -> Backing | None:
    """Return the columns of the store at `target`, as new ones, if this process fills it."""
    for supply in list(_filling):
        found = supply.another_backing() if supply.conversion.target.absolute() == target else None
        if found is not None:
            return found
    return None
