"""Fill a store while it is read: send rows to workers, in the order in which loaders want them, and commit at the end.

`DatasetSupply` is what the store holds. `_Filling` does its work, in a thread that ends when the store is dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memfeed.building.build import Build
from memfeed.building.claim import ClaimedError, claim, unshare
from memfeed.building.partial import ABSENT, SKIPPED
from memfeed.convert.conversion import Conversion
from memfeed.convert.driver import mark_skipped
from memfeed.convert.fill_job import REREAD, FillJob, FillReport, FillWorker
from memfeed.convert.processes import WorkerDied, WorkerInterrupted, run_job
from memfeed.convert.readback import require_probed
from memfeed.convert.row_queue import MOST_ROWS_A_LIST, RowQueue
from memfeed.convert.write_run import Report
from memfeed.errors import BuildError, MemfeedError
from memfeed.schema.codec import Int64Array
from memfeed.store import format
from memfeed.store.backing import Backing, switch_to_committed
from memfeed.store.row_supply import FillProgress, ReadRequest
from memfeed.system.progress import Progress, write_line
from memfeed.system.threads import end_at_exit

LISTS_AHEAD = 2  # lists of rows that a worker has: it reads one while its report of another is sent
POLL_SECONDS = 0.003  # between two looks whether rows are there: each takes a few microseconds of the workers' CPU
RESEND_SECONDS = 0.25  # after which rows that readers wait for are sent again, if no worker has them
TICK_SECONDS = 0.5
MOST_INTERRUPTS = 8  # interrupts of workers without a report between them, before the filling fails
INTERRUPT_SECONDS = 0.5  # in which a program that Ctrl-C ends stops the filling, so that no workers are started for it
MOST_DEATHS = 2  # of workers that read one sample, before it is skipped
JOIN_SECONDS = 5.0
QUIET_SECONDS = 2.0  # that the end may wait for a commit without a message
COMMIT_SECONDS = 60.0  # that the end of a process waits for a commit; the next run makes up for what is left


class DatasetSupply:
    """Brings the rows of a build, as ``RowSupply`` says. It ends with the last store that holds it."""

    def __init__(self, work: _Filling) -> None:
        self._work = work
        self.in_caller, self.keeps_rows = not work.worker_count, True
        weakref.finalize(self, work.release).atexit = False  # `end_at_exit` does that

    def start(self, backing: Backing) -> None:
        """Start the workers and the thread. ``backing`` reads the finished store once there is one."""
        self._work.start(backing)

    def follow(self, backing: Backing) -> None:
        """Let another view of the same columns read the finished store, too."""
        self._work.follow(backing)

    def want(self, reader: ReadRequest, rows: Int64Array) -> None:
        """See ``RowSupply``."""
        self._work.want(reader, rows)

    def forget(self, reader: ReadRequest) -> None:
        """See ``RowSupply``."""
        self._work.forget(reader)

    def wait(self, reader: ReadRequest, rows: Int64Array) -> npt.NDArray[np.bool_] | None:
        """See ``RowSupply``."""
        return self._work.wait(reader, rows)

    def require_room(self, mixed_rows: int) -> None:
        """See ``RowSupply``: there is room for all rows."""

    def substitute_row(self) -> int:
        """See ``RowSupply``."""
        return self._work.substitute_row()

    def has(self, row: int) -> bool:
        """Return True if a row can be read."""
        return self._work.has(row)

    def progress(self) -> FillProgress:
        """See ``RowSupply``."""
        return self._work.progress()

    def skipped(self) -> tuple[int, ...]:
        """See ``RowSupply``."""
        return self._work.skipped()

    def finish(self) -> None:
        """See ``RowSupply``."""
        self._work.finish()


class _Filling:
    """The state of one filling process. ``lead`` holds the claim of the build, if this process has it.

    Rows go to workers in lists, which ``queue`` makes.
    """

    def __init__(
        self, conversion: Conversion, build: Build, lead: contextlib.ExitStack | None, shared: int, owner: object
    ) -> None:
        self.conversion, self.build, self.worker_count = conversion, build, conversion.worker_count
        self._lead, self._shared, self._owner, self._pid = lead, shared, owner, os.getpid()
        self._queue = RowQueue(build.units.states, conversion.result.probed.seconds)
        self._tick_due = 0.0
        self._lists: list[int] = []  # lists that each worker has
        self._deaths: dict[int, int] = {}
        self._interrupts = 0
        self._error: BaseException | None = None
        self._reread = False  # True once rows were compared with the dataset, before the commit
        self._reread_asked = False
        self._stopping, self._done, self._lock = threading.Event(), threading.Event(), threading.RLock()
        self._caller_lock, self._wake = threading.Lock(), threading.Event()
        self._job = self._new_job()
        self._in_caller: FillWorker | None = None
        self._thread: threading.Thread | None = None
        self._backings: weakref.WeakSet[Backing] = weakref.WeakSet()
        self._jobs = contextlib.ExitStack()
        self._bar = contextlib.ExitStack()

    # --- life

    def _new_job(self) -> FillJob:
        conversion = self.conversion
        init = conversion.options.worker_init_fn
        return FillJob(conversion.given.dataset, self.build, conversion.plan, self.worker_count, init)

    def start(self, backing: Backing) -> None:
        self.follow(backing)
        reports = self._start_workers()
        self._thread = threading.Thread(target=self._run, args=(reports,), name="memfeed-filler", daemon=True)
        _filling.add(self)
        end_at_exit(self)
        self._thread.start()

    def follow(self, backing: Backing) -> None:
        with self._lock:
            self._backings.add(backing)
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

    def _start_workers(self) -> Iterator[Report]:
        if not self.worker_count:
            return self._ticks()
        reports = self._jobs.enter_context(run_job(self._job, self.worker_count))
        with self._lock:
            self._lists = [0] * self.worker_count
            self._feed()
        return reports

    def _ticks(self) -> Iterator[Report]:
        while True:
            self._wake.wait(TICK_SECONDS)
            self._wake.clear()
            yield Report()

    def stop(self) -> None:
        """Let workers and thread end. Rows that were written stay."""
        if os.getpid() == self._pid:
            self._stopping.set()
            self._wake.set()
            self._send_all(None)

    def release(self) -> None:
        """Stop workers and thread: after the commit if all rows are there, else now."""
        if not self._will_commit():
            self.stop()

    def _will_commit(self) -> bool:
        is_ours = os.getpid() == self._pid and self._lead is not None and not self.conversion.is_temporary
        is_running = self._thread is not None and self._thread.is_alive() and not self._is_over()
        return is_ours and is_running and self._queue.is_complete() and (self._reread or bool(self.worker_count))

    def join(self) -> None:
        """Wait for the commit if all rows are there; else stop, and wait a few seconds for the thread."""
        if self._thread is None or not self._thread.is_alive() or self._thread is threading.current_thread():
            self.stop()  # Ctrl-C may come before the thread is started
            return
        if self._will_commit():
            self._thread.join(QUIET_SECONDS)
            if self._thread.is_alive():
                write_line(f"memfeed: {self.conversion.target}: all rows are there; writing checksums before the end")
            self._thread.join(COMMIT_SECONDS)
        self.stop()
        self._thread.join(JOIN_SECONDS)

    def _run(self, reports: Iterator[Report]) -> None:
        bar = self._bar.enter_context(self._new_bar())
        try:
            while not self._is_over():
                try:
                    for report in reports:
                        self._receive(report)
                        self._tick(bar)
                        if self._is_over():
                            self._send_all(None)
                            break
                except WorkerDied as death:
                    self._note_death(death)
                except (OSError, MemfeedError) as error:
                    self._await_commit(error)
                self._jobs.close()
                self._renew_job()
                if not self._is_over():
                    reports = self._start_workers()
        except BaseException as error:
            self._error = error
        finally:
            for close in (self._jobs.close, self._close_here, self._bar.close, self._keep, self._leave):
                with contextlib.suppress(Exception):  # the first error is the one that readers get
                    close()
            self._owner = None

    def _renew_job(self) -> None:
        """Close the pipes to workers that have ended, which no other thread may be writing to. Make new ones."""
        with self._lock:
            self._job.close()
            self._lists, self._reread_asked = [], False
            if not self._is_over():
                self._job = self._new_job()
                self._queue.take_back_all()

    def _await_commit(self, error: Exception) -> None:
        """Wait until another process has committed the store. Raise the error of a worker if there can be none.

        The files of a build that is committed vanish, also while workers of a process that has joined it start.
        """
        if self._lead is not None or not self._queue.is_complete():
            raise error
        while not self._is_over() and self._lead is None:
            self._try_to_lead()
            time.sleep(POLL_SECONDS)

    def _keep(self) -> None:
        if self._done.is_set() or self._lead is None or self.conversion.is_temporary:
            return
        self.build.sync()
        if self.conversion.options.progress:
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

    def _is_over(self) -> bool:
        return self._done.is_set() or self._stopping.is_set()

    def _note_death(self, death: WorkerDied) -> None:
        """Skip a sample that killed two workers. Raise the death of a worker for which no sample is to blame.

        Ctrl-C ends the workers, but the program may go on, as a notebook does.
        """
        if isinstance(death, WorkerInterrupted) and self._interrupts < MOST_INTERRUPTS:
            self._interrupts += 1
            self._stopping.wait(INTERRUPT_SECONDS)
            return
        if not self.conversion.plan.skip_errors or death.reading is None:
            raise death
        for row in death.reading:
            self._deaths[row] = self._deaths.get(row, 0) + 1
            if self._deaths[row] == MOST_DEATHS:
                mark_skipped(self.build, [row])
                write_line(
                    f"memfeed: sample {row} is left out: {MOST_DEATHS} worker processes died while they read it "
                    f"({death.how})"
                )

    def _new_bar(self) -> Progress:
        found = self.progress()
        name, shown = self.conversion.target.name, self.conversion.options.progress
        done = found.present + found.skipped
        return Progress(name, found.total, unit=" rows", shown=shown, done=done, delay_seconds=1.0)

    # --- rows to workers

    def _receive(self, report: Report) -> None:
        if not isinstance(report, FillReport):
            return
        self._reread, self._interrupts = self._reread or report.is_reread, 0
        with self._lock:
            self._lists[report.worker] -= 1
            self._queue.give_back(report.rows, dict(report.failed), report.seconds)
            self._feed()
            if not any(self._lists):
                self._tick_due = 0.0  # it may be complete

    def _feed(self) -> None:
        """Send rows to workers that have too few. The caller has the lock."""
        lists = LISTS_AHEAD * len(self._lists)
        for _ in range(LISTS_AHEAD):
            for worker, count in enumerate(self._lists):
                if count < LISTS_AHEAD and not self._is_over() and (rows := self._queue.take(lists)):
                    self._lists[worker] += 1
                    self._job.senders[worker].send(rows)

    def _send_all(self, request: Any) -> None:
        with self._lock:
            for sender in self._job.senders:
                with contextlib.suppress(OSError):
                    sender.send(request)

    # --- what loaders ask for

    def want(self, reader: ReadRequest, rows: Int64Array) -> None:
        if self._is_elsewhere() or not self.worker_count:
            return
        with self._lock:
            self._queue.want(reader, rows)
            self._feed()

    def forget(self, reader: ReadRequest) -> None:
        if not self._is_elsewhere():
            with self._lock:
                self._queue.forget(reader)

    def wait(self, reader: ReadRequest, rows: Int64Array) -> npt.NDArray[np.bool_] | None:
        due = 0.0
        while len(absent := self._queue.absent(rows)):
            self._raise_for(absent)
            if not self.worker_count:
                self._compute(absent)
                continue
            if time.monotonic() >= due and not self._is_elsewhere():
                due = time.monotonic() + RESEND_SECONDS
                with self._lock:
                    self._queue.prioritise(reader, absent)
                    self._feed()
            time.sleep(POLL_SECONDS)
        if not self.worker_count and not self._reread:
            self._reread_here()
        is_present = self._queue.presence[rows] != SKIPPED
        return None if is_present.all() else is_present

    def _is_elsewhere(self) -> bool:
        """Return True in a forked child, which has neither the thread nor the workers."""
        return os.getpid() != self._pid

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
                    report = self._here().fill(absent[first : first + MOST_ROWS_A_LIST].tolist())
                except (OSError, MemfeedError):
                    if len(self._queue.absent(absent)):
                        raise
                    return  # other processes have written them, and committed the store
                self._queue.failed.update(report.failed)
                self._raise_for(np.array([row for row, _ in report.failed], np.int64))
        if len(self._queue.absent(absent)):
            time.sleep(POLL_SECONDS)  # another process has them

    def _here(self) -> FillWorker:
        if self._in_caller is None or self._is_elsewhere():
            self._in_caller = FillWorker(self._new_job(), 0).__enter__()
        return self._in_caller

    def _close_here(self) -> None:
        with self._caller_lock:
            if self._in_caller is not None:
                self._in_caller.__exit__(None, None, None)
                self._in_caller = None

    def _reread_here(self) -> None:
        if self._lead is not None and not self._is_elsewhere() and self._queue.is_complete():
            self._here().reread()
            self._reread = True
            self._wake.set()

    def substitute_row(self) -> int:
        row = self._queue.a_present_row()
        if row is None:
            raise BuildError(
                f"{self.build.root}: found no row that can be read ({self.progress().skipped} raised); expected one"
            )
        return row

    def has(self, row: int) -> bool:
        return int(self._queue.presence[row]) not in (ABSENT, SKIPPED)

    def progress(self) -> FillProgress:
        return self._queue.progress()

    def skipped(self) -> tuple[int, ...]:
        return tuple(np.flatnonzero(self._queue.presence == SKIPPED).tolist())

    def finish(self) -> None:
        every, reader = np.arange(len(self._queue.presence)), ReadRequest()
        while not self._done.wait(POLL_SECONDS):
            if not self._queue.is_complete():  # at first; and again after rows were lost: `Units.lose_unsynced`
                for first in range(0, len(every), 1 << 16):
                    self.wait(reader, every[first : first + (1 << 16)])
                self.forget(reader)
            if not self.worker_count and not self._reread:
                self._reread_here()  # the process that was to commit it may have ended since
            if self._error is not None or self._is_over():
                self._raise_for(every[:0])
        with self._lock:  # until the columns are those of the store
            pass

    # --- the store at the end

    def _tick(self, bar: Progress) -> None:
        """Do what is due: rows to try again, a sync, the claim of a process that has died, the commit."""
        now = time.monotonic()
        with self._lock:
            self._queue.retry_lost()
            if self._queue.is_idle_due():
                self._feed()
        if now < self._tick_due and not self._reread:
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

    def _try_to_lead(self) -> None:
        """Take the claim of the build if the process that had it has ended. Without a build, open the store."""
        target = self.conversion.target
        if (target / format.MANIFEST).exists():
            self._settle()
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
            self._settle()
            return
        self._lead = lead
        self.build.units.lose_unsynced()  # of the process that has died

    def _commit(self) -> None:
        if not self._reread:
            if self.worker_count and not self._reread_asked:
                self._reread_asked = True
                with self._lock:
                    self._lists[0] += 1
                    self._job.senders[0].send(REREAD)
            return
        require_probed(self.build)
        self.build.commit(self.conversion.target, kept=self.conversion.kept_now())
        self._settle()

    def _settle(self) -> None:
        with self._lock:
            self._done.set()
            for backing in list(self._backings):
                switch_to_committed(backing)


_filling: weakref.WeakSet[_Filling] = weakref.WeakSet()


def backing_at(target: Path) -> Backing | None:
    """Return the columns of the store at `target`, as new ones, if this process fills it."""
    for work in list(_filling):
        found = work.another_backing() if work.conversion.target.absolute() == target else None
        if found is not None:
            return found
    return None
