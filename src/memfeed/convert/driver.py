"""Write the rows of a build: of a map-style dataset, an iterable, columns, and tables.

Rows of a map-style dataset are sent to workers, list after list, and also where the store is read while it is filled.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import numpy as np

from memfeed.building.build import Build
from memfeed.building.partial import ABSENT, WRITTEN, runs
from memfeed.building.unit_queue import UnitQueue
from memfeed.convert.jobs import StreamJob
from memfeed.convert.options import WorkerInit
from memfeed.convert.processes import Pool, WorkerDied, WorkerInterrupted, run_job
from memfeed.convert.row_worker import REREAD, Request
from memfeed.convert.write_run import WRITE_BYTES, Drifts, Report, RunWriter, WritePlan, mark_skipped
from memfeed.errors import SchemaError
from memfeed.schema import codec
from memfeed.schema.codec import Int64Array
from memfeed.store import ragged
from memfeed.store.checksums import ChunkHasher
from memfeed.system import files, machine
from memfeed.system.messages import warn
from memfeed.system.progress import write_line

LIST_SECONDS = 0.03  # of work in one list of rows that a worker is sent
MOST_ROWS_A_LIST = 64  # that a reader wants
MOST_IDLE_ROWS = 4096  # of a list that nobody wants
LOST_SECONDS = 0.25  # after which rows that another process had are sent again, if they are still absent
MOST_INTERRUPTS = 8  # interrupts of workers without a report between them, before the filling fails
INTERRUPT_SECONDS = 0.5  # in which a program that Ctrl-C ends stops the engine, so that no workers are started for it
MOST_DEATHS = 2  # of workers that read one sample, before it is skipped


class RowEngine:
    """Keeps workers busy with the rows of a queue. Threads may share it; one of them receives the reports.

    A sample is skipped, where the plan says so, after two workers have died while they read it. After a death, or a
    drift whose column is promoted, other workers go on.

    Args:
        open_pool: starts workers for the build as it is then, and ends them at the end of the block.
        seconds: that one sample takes, as far as known.
        list_seconds: of work in one list of rows.
        most_rows: of one list.
    """

    def __init__(
        self,
        build: Build,
        plan: WritePlan,
        open_pool: Callable[[], AbstractContextManager[Pool]],
        seconds: float,
        list_seconds: float = LIST_SECONDS,
        most_rows: int = MOST_IDLE_ROWS,
    ) -> None:
        self.states = build.units.states  # of each row, uint8 [n]: mapped, also after the commit has moved the file
        self.queue = UnitQueue(len(self.states), lambda rows: self.states[rows] == ABSENT, is_shared=plan.is_read)
        self._list_seconds, self._most_rows = list_seconds, most_rows
        self._read_count, self._read_seconds = 1, seconds
        self.changed, self.is_reread = threading.Condition(), False
        self._build, self._plan, self._open_pool = build, plan, open_pool
        self._workers = ExitStack()
        self._pool: Pool | None = None
        self._sent: list[deque[Request]] = []  # what each worker has
        self._read: list[int] = []  # how many lists each has read, which wait for their turn
        self._drifts = Drifts()
        self._deaths: dict[int, int] = {}
        self._interrupts = 0
        self._stopping = threading.Event()

    def start(self) -> None:
        """Start workers, and send them rows."""
        pool = self._workers.enter_context(self._open_pool())
        with self.changed:
            self._pool, self._sent = pool, [deque() for _ in range(pool.worker_count)]
            self._read = [0] * pool.worker_count
            self.feed()
            if self._stopping.is_set():
                self._end_workers()

    def reports(self) -> Iterator[Report]:
        """Yield a report for each list, after its rows were noted, and others now and then, until ``stop``."""
        while not self._stopping.is_set():
            if self._pool is None:
                self.start()
            assert self._pool is not None
            if self.is_idle:
                yield Report()  # nothing was absent: the caller may stop it
            try:
                for report in self._pool.reports:
                    self._receive(report)
                    yield report
                has_died = False
            except WorkerDied as death:
                self._note_death(death)
                has_died = True
            self.close()
            if has_died and not self._plan.is_read:
                self._build.take_back()  # what dead workers had: the same rows go there
            self._drifts.promote(self._build)

    def close(self) -> None:
        """End the workers. Rows that they had are sent again if they are absent."""
        with self.changed:  # no thread writes to a pipe that is closed below
            self._pool, self._sent = None, []
            self.queue.take_back_all()
        self._workers.close()

    def stop(self) -> None:
        """Let workers end after what they have, and ``reports`` after them."""
        self._stopping.set()
        self._end_workers()

    def feed(self) -> None:
        """Send rows to workers that have too few."""
        with self.changed:
            if self._pool is None or self._stopping.is_set() or self._drifts:
                return
            lists = self._pool.lists_ahead * len(self._sent)
            by_time = int(max(self._list_seconds * self._read_count / max(self._read_seconds, 1e-9), 1))
            most, most_rest = min(by_time, MOST_ROWS_A_LIST), min(by_time, self._most_rows)
            for _ in range(self._pool.lists_ahead):
                for worker, sent in enumerate(self._sent):
                    unread = len(sent) - self._read[worker]
                    if unread < self._pool.lists_ahead and len(
                        rows := self.queue.next_units(time.monotonic(), most, lists, most_rest)
                    ):
                        self._send(worker, _as_range(rows))

    def request_reread(self) -> None:
        """Let a worker compare some rows with the dataset, unless one does so; then ``is_reread`` is True."""
        with self.changed:
            if self._pool is not None and not any(REREAD in sent for sent in self._sent):
                self._send(0, REREAD)

    @property
    def is_idle(self) -> bool:
        """True if no worker has anything to do."""
        return not any(self._sent) and not self._drifts

    def _receive(self, report: Report) -> None:
        with self.changed:
            self._drifts.note(report)
            if report.drifts:
                self._end_workers()
            if report.worker >= 0:
                self._interrupts = 0
                request = self._sent[report.worker].popleft()
                self._read[report.worker] = max(self._read[report.worker] - 1, 0)  # the first it has was read first
                if isinstance(request, str):
                    self.is_reread = True
                else:
                    self._give_back(np.asarray(request, np.int64), report)
            if report.reader >= 0:
                self._read[report.reader] += 1
            if report.worker >= 0 or report.reader >= 0 or self.queue.is_rest_due(time.monotonic()):
                self.feed()

    def _give_back(self, rows: Int64Array, report: Report) -> None:
        for _, failure in report.failed:
            failure.error.__cause__ = failure.cause
        failed = {row: failure.error for row, failure in report.failed}
        self.queue.give_back(rows, time.monotonic() + LOST_SECONDS, failed)
        self.changed.notify_all()
        if report.seconds and not (self.states[rows] == ABSENT).any():
            self._read_count += len(rows)
            self._read_seconds += report.seconds

    def _send(self, worker: int, request: Request) -> None:
        assert self._pool is not None
        self._sent[worker].append(request)
        self._pool.send(worker, request)

    def _end_workers(self) -> None:
        with self.changed:
            if self._pool is not None:
                for worker in range(self._pool.worker_count):
                    with suppress(OSError):
                        self._pool.send(worker, None)

    def _note_death(self, death: WorkerDied) -> None:
        """Skip a sample that killed two workers. Raise the death of a worker for which no sample is to blame.

        Ctrl-C ends the workers, but the program may go on, as a notebook does.
        """
        if self._plan.is_read and isinstance(death, WorkerInterrupted) and self._interrupts < MOST_INTERRUPTS:
            self._interrupts += 1
            self._stopping.wait(INTERRUPT_SECONDS)
            return
        if not self._plan.skip_errors or death.reading is None:
            raise death
        for row in death.reading:
            self._deaths[row] = self._deaths.get(row, 0) + 1
            if self._deaths[row] == MOST_DEATHS:
                mark_skipped(self._build, [row])
                text = f"sample {row} is left out: two worker processes died while they read it ({death.how})"
                if self._plan.is_read:  # in a thread, which has no caller to warn
                    write_line(f"memfeed: {text}")
                else:
                    warn(text, RuntimeWarning)


def _as_range(rows: Int64Array) -> Sequence[int]:
    """Return rows as a range if they are one, which is sent to a worker as two numbers."""
    first, last = int(rows[0]), int(rows[-1])
    is_run = last - first == len(rows) - 1 and bool((np.diff(rows) == 1).all())
    return range(first, last + 1) if is_run else rows.tolist()


MOST_ROWS_OF_TABLES = 65_536
BLOCK_BYTES = 256 << 20
MOST_WORKERS = 16
OnReport = Callable[[Report], None]


def convert_map(
    build: Build,
    plan: WritePlan,
    open_pool: Callable[[], AbstractContextManager[Pool]],
    on_report: OnReport,
    *,
    seconds: float,
    list_seconds: float = LIST_SECONDS,
    most_rows: int = MOST_IDLE_ROWS,
) -> None:
    """Write every absent row of a map-style dataset, as `RowEngine` does. Raise what a sample raised."""
    if not len(build.absent()):
        return
    engine = RowEngine(build, plan, open_pool, seconds, list_seconds, most_rows)
    with contextlib.closing(engine):
        for report in engine.reports():
            on_report(report)
            for _, failure in sorted(report.failed)[:1]:
                raise failure.error from failure.cause
            build.sync_if_due()
            if engine.is_idle:
                engine.stop()


def convert_stream(
    build: Build,
    dataset: Iterable[Any],
    plan: WritePlan,
    length: int | None,
    on_report: OnReport,
    init: WorkerInit = None,
) -> None:
    """Write every sample of an iterable (with a `length`, the first so many), in its order.

    Where the build has several shares, as many workers take turns of ``STREAM_BLOCK`` rows.

    After a drift that a worker found, its column is promoted and the iterable is read again. Rows that were written
    stay.
    """
    build.rewrites = True  # after a power loss, parts of a block may be written already
    is_whole, drifts, shares = False, Drifts(), build.settings.shares
    worker_count = shares if shares > 1 else 0
    while not is_whole:
        with run_job(StreamJob(dataset, build, plan, worker_count, length, init), worker_count) as reports:
            for report in reports:
                drifts.note(report)
                on_report(report)
                build.sync_if_due()
        is_whole = not drifts.promote(build)
    mark_skipped(build, build.absent())  # the workers' shares may have different lengths


def convert_columns(build: Build, columns: Sequence[Any], plan: WritePlan, on_report: OnReport) -> None:
    """Copy whole columns, one block of rows after the other, with a thread for each column."""
    writer = build.writer()
    step = max(1, int(BLOCK_BYTES / max(plan.row_bytes, 1)))
    hashers = [ChunkHasher() for _ in columns]
    is_whole = len(build.absent()) == build.row_count

    def copy(field_index: int, first: int, last: int) -> int:
        field, written = build.schema.fields[field_index], 0
        part = max(1, WRITE_BYTES // max(field.row_bytes, 1))
        for at in range(first, last, part):
            end = min(at + part, last)
            try:
                packed = codec.pack_column(field, columns[field_index][at:end], cast=field_index in plan.casts)
            except SchemaError as error:
                raise SchemaError(f"rows {at} to {end - 1}, field {field.name}: {error}") from None
            with files.opened(ragged.fixed_file(build.root, field)) as fd:
                written += files.write_all_at(fd, packed.buffers, at * field.row_bytes)
            for buffer in packed.buffers if is_whole else ():
                hashers[field_index].update(buffer)  # while it is in the processor's cache
        return written

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # a write waits for memory, not for Python
        for first, count in runs(build.absent()):
            for at in range(first, first + count, step):
                last = min(at + step, first + count)
                writer.check_generation()
                written = sum(pool.map(lambda field_index, a=at, b=last: copy(field_index, a, b), range(len(columns))))
                writer.mark(at, last - at, WRITTEN)
                on_report(Report(row_count=last - at, byte_count=written))
                build.sync_if_due()
    writer.close()
    if is_whole:
        names = (name for field in build.schema for name in ragged.column_files(field, 0))
        build.hashes = {file: hasher.hashes() for file, hasher in zip(names, hashers, strict=True)}


def convert_tables(build: Build, columns: Sequence[Any], plan: WritePlan, on_report: OnReport) -> None:
    """Write columns of which some are text, JSON values or rows of varying lengths, a run of rows at a time."""
    writer = RunWriter(build, plan, may_promote=True)
    step = max(1, min(int(WRITE_BYTES / max(plan.row_bytes, 1)), MOST_ROWS_OF_TABLES))
    for first, count in runs(build.absent()):
        for at in range(first, first + count, step):
            rows, report = slice(at, min(at + step, first + count)), Report()
            writer.write_columns(at, [column[rows] for column in columns], at, report)
            on_report(report)
            build.sync_if_due()
    writer.rows.close()


def default_workers(row_count: int, seconds: float, says: bool) -> int:
    """Return 0 for a second of work or less, else one worker per core this process may use, at most 16.

    None is started where it would import the program again: a script may have no guard, and a notebook's classes
    cannot be sent.
    """
    if row_count * seconds < 1.0:
        return 0
    count, method = min(machine.core_count(), MOST_WORKERS, row_count), machine.start_method()
    if method == "fork":
        return count
    if says:
        write_line(
            f"memfeed: workers=0 is used, because processes start with {method!r} here and import the program again; "
            f"for more speed pass workers={count}, in a script below if __name__ == '__main__':"
        )
    return 0
