"""Fill rows in a worker: read the rows that it is sent, write them, and report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import msgspec
import torch

from memfeed.building.build import Build
from memfeed.convert.failure import Failure, failure_of
from memfeed.convert.inputs import read_sample
from memfeed.convert.options import WorkerInit
from memfeed.convert.randomness import Draws
from memfeed.convert.readback import require_reread
from memfeed.convert.watchdog import ENDED, WAITING, Watchdog
from memfeed.convert.write_run import Report, RunWriter, WritePlan, flatten_sample
from memfeed.errors import SampleError, SchemaError
from memfeed.schema import values

REREAD = "reread"
"""Sent to a worker in place of rows: compare some rows with the dataset once more, before the commit."""


class FillReport(Report):
    """A report of one worker: the rows it was sent, the errors of those that failed, and the seconds it took."""

    worker: int = 0
    rows: list[int] = msgspec.field(default_factory=list)
    failed: list[tuple[int, Failure]] = msgspec.field(default_factory=list)
    seconds: float = 0.0
    is_reread: bool = False


class FillJob:
    """Reads and writes the rows that the process of the loader sends, one list after another; None ends a worker."""

    def __init__(self, dataset: Any, build: Build, plan: WritePlan, worker_count: int, init: WorkerInit = None) -> None:
        self.dataset, self.build, self.plan, self.init = dataset, build, plan, init
        self.watchdog = Watchdog(worker_count)
        pipes = [torch.multiprocessing.Pipe(duplex=False) for _ in range(worker_count)]
        self.requests = [receiver for receiver, _ in pipes]
        self.senders: list[Connection] = [sender for _, sender in pipes]

    def run(self, worker: int | None) -> Iterator[Report]:
        """Yield a report for each list of rows that arrives."""
        assert worker is not None
        with FillWorker(self, worker) as filling:
            while True:
                self.watchdog.record(worker, ENDED)  # it may wait for long, which is no stall
                request = self.requests[worker].recv()
                if request is None:
                    return
                self.watchdog.record(worker, WAITING)
                yield filling.reread() if request == REREAD else filling.fill(request)

    def close(self) -> None:
        """Close the pipes of this process."""
        for pipe in (*self.requests, *self.senders):
            pipe.close()


class FillWorker:
    """One process that fills rows: a worker, or the caller where there is none."""

    def __init__(self, job: FillJob, worker: int) -> None:
        self._job, self._worker, self._plan = job, worker, job.plan
        self._writer = RunWriter(job.build, job.plan, may_promote=False)
        self._draws = Draws(job.dataset, job.plan)

    def __enter__(self) -> FillWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._writer.rows.close()

    def fill(self, rows: Sequence[int]) -> FillReport:
        """Read and write those of ``rows`` that are absent and that no other process has. Return what was done."""
        report, started = FillReport(worker=self._worker, rows=list(rows)), time.monotonic()
        with self._job.build.units.hold(rows) as held:
            self._fill(sorted(held), report)
        report.seconds = time.monotonic() - started
        return report

    def reread(self) -> FillReport:
        """Read some samples again, as `require_reread` does. Raise what it raises."""
        if self._plan.refuse_random:
            require_reread(self._job.build, self._job.dataset, self._plan)
        return FillReport(worker=self._worker, is_reread=True)

    def _fill(self, rows: Sequence[int], report: FillReport) -> None:
        read: dict[int, list[Any]] = {}
        self._draws.begin()
        for row in rows:
            try:
                # a dataset may fill one buffer for every sample: the next one would change this one
                read[row] = [values.copy_value(leaf) for leaf in self._read(row)]
            except SampleError as error:
                if self._plan.skip_errors:
                    self._writer.skip(row)
                    report.skipped_count += 1
                else:
                    report.failed.append((row, failure_of(error)))
            except SchemaError as error:
                report.failed.append((row, failure_of(error)))
        self._draws.check(read, self._read)
        self._write(sorted(read), read, report)

    def _read(self, row: int) -> list[Any]:
        sample = read_sample(self._job.dataset, row, self._job.watchdog, self._worker)
        return list(flatten_sample(self._plan, sample, row))

    def _write(self, rows: Sequence[int], read: dict[int, list[Any]], report: FillReport) -> None:
        """Write rows, which ascend; those that fit no column are failed."""
        while rows:
            before, drifts = report.row_count, len(report.drifts)
            try:
                columns = list(zip(*(read[row] for row in rows), strict=True))
                if self._writer.write_rows(rows, columns, rows, report):
                    return
                done = report.row_count - before
                problem = self._drift(rows[done], *report.drifts[drifts])
                report.drifts = []
            except SchemaError as error:
                if len(rows) > 1:  # find the row: the others are written
                    for row in rows:
                        self._write([row], read, report)
                    return
                done, problem = 0, error
            report.failed.append((rows[done], failure_of(problem)))
            rows = rows[done + 1 :]

    def _drift(self, row: int, field_index: int, shape: tuple[int, ...]) -> SchemaError:
        field = self._job.build.schema.fields[field_index]
        kind = "jagged" if field.kind == "fixed" and _dims_that_differ(field.shape, shape) == 1 else "list"
        return SchemaError(
            f"sample {row}, field {field.name}: found dims {list(shape)}; expected {field.describe()}, as the samples "
            "had that were read first. A store that is read while it is filled keeps its columns: remove "
            f"{self._job.build.root} and say so: cache(..., fields={{{field.name!r}: {kind!r}}})"
        )


def _dims_that_differ(expected: Sequence[int | None], shape: Sequence[int]) -> int:
    return sum(one != other for one, other in zip(expected, shape, strict=True))
