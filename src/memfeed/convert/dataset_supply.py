"""Fill a store while it is read: bring the rows in the order in which loaders want them, and commit at the end."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memfeed.building.build import Build
from memfeed.building.claim import ClaimedError, claim, ends_by_itself, is_shared_by, refusal_at
from memfeed.building.partial import ABSENT, SKIPPED
from memfeed.building.service import POLL_SECONDS, Service
from memfeed.building.unit_queue import NONE
from memfeed.convert.conversion import Conversion
from memfeed.convert.driver import MOST_ROWS_A_LIST, RowEngine
from memfeed.convert.fingerprint import require_probed
from memfeed.convert.processes import open_processes
from memfeed.convert.row_worker import REREAD, RowWorker
from memfeed.convert.watchdog import Watchdog
from memfeed.errors import BuildError, MemfeedError
from memfeed.schema.codec import Int64Array
from memfeed.store import format
from memfeed.store.backing import Backing, switch_to_committed
from memfeed.store.row_supply import FillProgress, ReadRequest
from memfeed.system.locks import close_lock
from memfeed.system.progress import Progress, write_line

TICK_SECONDS = 0.5


class DatasetSupply(Service):
    """Brings the rows of a build, with workers and a thread.

    Args:
        lead: holds the claim of the build, if this process has it.
        shared: the descriptor that says to others that this process fills the build.
        owner: lives until the end, as a temporary directory must.
    """

    keeps_rows = True
    finish_units, retries = 1 << 16, False

    def __init__(
        self, conversion: Conversion, build: Build, lead: contextlib.ExitStack | None, shared: int, owner: object
    ) -> None:
        self.conversion, self.build, self.in_caller = conversion, build, not conversion.worker_count
        self._lead, self._shared, self._owner = lead, shared, owner
        open_pool = partial(
            open_processes,
            conversion.given,
            build,
            conversion.plan,
            conversion.worker_count,
            conversion.options.worker_init_fn,
        )
        self._engine = RowEngine(build, conversion.plan, open_pool, conversion.result.probed.seconds)
        self._states = self._engine.states
        super().__init__(build.root, self._engine.queue, self._engine.changed, switch_to_committed)
        self._tick_due = 0.0
        self._caller_lock, self._wake = threading.Lock(), threading.Event()
        self._here: RowWorker | None = None  # in the caller's thread
        self._is_continued = False  # by another supply, of other columns
        self._maker = threading.get_ident()  # it would wait for itself if it built the store too

    # --- see `Service`

    def begin(self, backing: Backing) -> None:
        """Start the workers and the thread. ``backing`` reads the finished store once there is one."""
        self.follow(backing)
        if not self.in_caller:
            self._engine.start()
        _filling.add(self)
        with self.changed:
            self.start()

    def release(self, *, at_exit: bool = False) -> None:
        """Stop workers and thread: after the commit if all rows are there, else now."""
        if at_exit and not self._is_over() and not self.conversion.is_temporary:
            try:
                self._reread_here()  # another process may have brought the last rows after this one's last batch
            except (OSError, MemfeedError) as error:
                write_line(f"memfeed: {error}")
        if not self._will_commit():
            self.stop()
        if not self.is_elsewhere() and self._lead is not None:
            ends_by_itself(self.build.root)

    def withdraw(self) -> list[Backing]:
        """End, so that columns can change; return the backings that read them. [] in a process that cannot do that.

        Forked children that read the columns raise an error from now on.
        """
        if self.is_elsewhere() or self._lead is None or self._thread is None or self._is_over():
            return []
        found, self._is_continued = list(self._backings), True
        self._children.columns_change()
        self.stop()
        self._thread.join()
        return found

    def _feed(self) -> None:
        self._engine.feed()

    def _stop_supplier(self) -> None:
        self._wake.set()
        self._engine.stop()

    def _will_commit(self) -> bool:
        is_ours = not self.is_elsewhere() and self._lead is not None and not self.conversion.is_temporary
        is_running = self._thread is not None and self._thread.is_alive() and not self._is_over()
        return is_ours and is_running and self._is_complete() and (self._engine.is_reread or not self.in_caller)

    def _await_commit(self) -> bool:
        while self._is_complete():  # else rows were lost: `Units.lose_unsynced`
            self._reread_here()  # the process that was to commit it may have ended since
            if self._done.wait(POLL_SECONDS):
                with self.changed:  # until the columns are those of the store
                    return True
            if self._error is not None or self._stopping.is_set():
                self._raise_for(NONE)
        return False

    # --- the thread

    def _serve(self) -> None:
        found, progress = self.progress(), self.conversion.options.progress
        done, name = found.present + found.skipped, self.conversion.target.name
        with Progress(name, found.total, unit=" rows", progress=progress, done=done, delay_seconds=1.0) as bar:
            while not self._is_over():
                try:
                    self._fill(bar)
                except (OSError, MemfeedError) as error:
                    self._wait_for_others(error)

    def _end(self) -> list[Callable[[], object]]:
        return [self._engine.close, self._close_here, self._keep, self._leave]

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
        self.serve_children()
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

    def _wait_for_others(self, error: Exception) -> None:
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
        if self.conversion.options.says and not self._is_continued and not refusal_at(self.root).is_file():
            found = self.progress()
            why = f". The commit failed: {self._error}" if self._error is not None and self._is_complete() else ""
            write_line(
                f"memfeed: {self.conversion.target}: {found.present:,} of {found.total:,} rows are kept; the same call "
                f"goes on from there{why}"
            )

    def _leave(self) -> None:
        if self._shared >= 0:
            close_lock(self._shared)
            self._shared = -1
        if self._lead is not None:
            self._lead.close()
        self._owner = None

    # --- what loaders ask for

    def wait(self, reader: ReadRequest, rows: Int64Array) -> npt.NDArray[np.bool_] | None:
        """See ``RowSupply``."""
        if self.is_elsewhere():
            self._children.require_same_columns()
        self.note_wait(reader, rows)
        self.bring(rows)
        self._reread_here()
        is_present = self._states[rows] != SKIPPED
        return None if is_present.all() else is_present

    def bring(
        self,
        units: Int64Array,
        missing: Callable[[Int64Array], Int64Array] | None = None,
        asked: Int64Array = NONE,
    ) -> None:
        """Return once no row of ``units`` is absent."""
        if not self.in_caller:
            super().bring(units, missing, asked)
            return
        while len(units := self.absent(units)):
            self._raise_for(units)
            self._compute(units)

    def _compute(self, absent: Int64Array) -> None:
        """Read and write rows in the caller's thread."""
        with self._caller_lock:
            for first in range(0, len(absent), MOST_ROWS_A_LIST):
                try:
                    report = self._worker_here().write(absent[first : first + MOST_ROWS_A_LIST].tolist())
                except (OSError, MemfeedError):
                    if len(self.absent(absent)):
                        raise
                    return  # other processes have written them, and committed the store
                for row, failure in report.failed:
                    self.queue.failed[row] = failure.error
                    raise failure.error from failure.cause
        if len(self.absent(absent)):
            time.sleep(POLL_SECONDS)  # another process has them

    def _worker_here(self) -> RowWorker:
        if self._here is None or self.is_elsewhere():
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
        if is_due and not self.is_elsewhere() and self._is_complete():
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

    def ready(self, reader: ReadRequest, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """See ``RowSupply``."""
        if self.is_elsewhere():
            self._children.require_same_columns()
        states = self._states[rows]
        found: npt.NDArray[np.bool_] = (states != ABSENT) & (states != SKIPPED)
        return found

    def progress(self) -> FillProgress:
        """See ``RowSupply``."""
        counts = np.bincount(self._states, minlength=SKIPPED + 1)
        total = len(self._states)
        return FillProgress(total - int(counts[ABSENT] + counts[SKIPPED]), total, int(counts[SKIPPED]))

    def _is_complete(self) -> bool:
        return not (self._states == ABSENT).any()

    def skipped(self) -> tuple[int, ...]:
        """See ``RowSupply``."""
        return tuple(np.flatnonzero(self._states == SKIPPED).tolist())

    # --- the store at the end

    def _try_to_lead(self) -> None:
        """Take the claim of the build if the process that had it has ended. Without a build, open the store."""
        target = self.conversion.target
        if (target / format.MANIFEST).exists():
            self._switch_backings()
            return
        lead = contextlib.ExitStack()
        try:
            root = lead.enter_context(claim(target, wait=False, thread=self._maker))
        except ClaimedError:
            return
        if (target / format.MANIFEST).exists() or not Build.is_begun(root) or not is_shared_by(self._shared, root):
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


_filling: weakref.WeakSet[DatasetSupply] = weakref.WeakSet()


def backing_at(target: Path) -> Backing | None:
    """Return the columns of the store at `target`, as new ones, if this process fills it."""
    for supply in list(_filling):
        if supply.conversion.target.absolute() == target and not supply.is_elsewhere():
            found = supply.another_backing()
            if found is not None:
                return found
    return None
