"""What a conversion worker does, as torch's DataLoader sees it: a dataset whose items are reports."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from memfeed.building.build import Build
from memfeed.building.rows import SKIPPED, RowWriter
from memfeed.convert.watchdog import Readers
from memfeed.convert.write_run import Drifted, Report, WritePlan, promote_now, take_apart, write_run
from memfeed.errors import BuildError, MemfeedError, SampleError
from memfeed.schema import values
from memfeed.schema.containers import map_leaves

STREAM_BLOCK = 16  # rows a worker of an iterable writes in turn
_SKIP = object()


class RowRange(msgspec.Struct, frozen=True):
    """Rows ``first`` to ``first + count``."""

    first: int
    count: int


def _survives(error: BaseException | None) -> Exception | None:
    """An exception as it can cross to another process: itself, or its traceback as text."""
    if error is None:
        return None
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error) and isinstance(error, Exception):
            return error
    except Exception:  # any class can break pickling in its own way
        pass
    return RuntimeError("".join(traceback.format_exception(error)))


def _of_worker() -> str:
    info = get_worker_info()
    return f" of worker {info.id}" if info else ""


def _carry(report: Report, error: Exception) -> None:
    """Puts an exception into a report for the builder to raise; in the builder's own process it is raised here."""
    if get_worker_info() is None:
        raise error
    ours = isinstance(error, MemfeedError)
    report.error = _survives(error)
    report.cause = _survives(error.__cause__ if ours else RuntimeError("".join(traceback.format_exception(error))))


class _Writer:
    """Writes runs for one process, promoting columns where this process is the builder."""

    def __init__(self, build: Build, plan: WritePlan) -> None:
        self.build, self.plan = build, plan
        self._rows: RowWriter = build.writer()

    def write(self, first: int, leaves: Sequence[Sequence[Any]], number: int, report: Report) -> bool:
        """The rows from ``first``; False where a column has to be promoted before they can all be written."""
        done = 0
        while done < len(leaves):
            try:
                report.bytes += write_run(self._rows, self.plan, first + done, leaves[done:], number + done)
                report.rows += len(leaves) - done
                break
            except Drifted as drift:
                report.rows, report.bytes = report.rows + drift.at, report.bytes + drift.bytes
                done += drift.at
                if get_worker_info() is not None:
                    report.drifts.append((drift.number, drift.shape))
                    return False
                self._rows = promote_now(self.build, drift.number, [drift.shape])
        return True

    def skip(self, row: int) -> None:
        """Marks a row as left out."""
        self._rows.check_generation()
        self._rows.mark(row, 1, SKIPPED)


class _Stopped(Exception):  # noqa: N818
    """The builder wants no more, or is dead."""


class _Reader:
    """This process as one of those that read the dataset: a worker, which ends with the builder, or the builder."""

    def __init__(self, readers: Readers) -> None:
        info = get_worker_info()
        self._readers, self._number = readers, info.id if info else 0
        self._parent = os.getppid() if info else None

    def begin(self, first: int, count: int = 1) -> None:
        """To be called before samples are asked for; raises _Stopped if they are not wanted any more."""
        if self._readers.stopped or (self._parent is not None and os.getppid() != self._parent):
            raise _Stopped
        self._readers.begin(self._number, first, count)

    def end(self) -> None:
        """To be called when they are there, or the dataset raised."""
        self._readers.end(self._number)


class MapJob(IterableDataset[Report]):
    """Reads, packs and writes tasks of a map-style dataset, a report for each, until none is left.

    Workers take the next task from one counter, so that they end together however long each sample takes.
    """

    def __init__(self, dataset: Any, build: Build, plan: WritePlan, tasks: Sequence[RowRange], workers: int) -> None:
        self.dataset, self.build, self.plan, self.tasks = dataset, build, plan, list(tasks)
        self.readers = Readers(workers)
        self._taken = torch.multiprocessing.Value("q", 0)

    def _take(self) -> int:
        with self._taken.get_lock():
            number: int = self._taken.value
            self._taken.value = number + 1
        return number

    def __iter__(self) -> Iterator[Report]:
        writer, step, reader = _Writer(self.build, self.plan), self.plan.rows_a_write, _Reader(self.readers)
        while (number := self._take()) < len(self.tasks):
            report, task = Report(), self.tasks[number]
            try:
                for first in range(task.first, task.first + task.count, step):
                    if not self._some(writer, reader, first, min(step, task.first + task.count - first), report):
                        break
            except _Stopped:
                return
            except Exception as error:
                _carry(report, error)
            yield report
            if report.error is not None:
                return

    def _some(self, writer: _Writer, reader: _Reader, first: int, count: int, report: Report) -> bool:
        run: list[list[Any]] = []
        start = first
        for row, sample in self._samples(reader, first, count):
            if sample is not _SKIP:
                run.append(take_apart(self.plan, sample, row))
                continue
            writer.skip(row)
            report.skipped += 1
            if not writer.write(start, run, start, report):
                return False
            run, start = [], row + 1
        return writer.write(start, run, start, report)

    def _samples(self, reader: _Reader, first: int, count: int) -> Iterator[tuple[int, Any]]:
        wanted = range(first, first + count)
        many = getattr(self.dataset, "__getitems__", None)
        if callable(many) and not self.plan.skip_errors:
            reader.begin(first, count)
            try:
                found = list(many(list(wanted)))
            except Exception:  # read one by one instead, to say which sample it was
                found = []
            finally:
                reader.end()
            if len(found) == count:
                yield from zip(wanted, found, strict=True)
                return
        for row in wanted:
            reader.begin(row)
            try:
                sample = self.dataset[row]
            except Exception as error:
                if not self.plan.skip_errors:
                    raise SampleError(
                        f"sample {row}: the dataset raised {type(error).__name__}: {error}; "
                        'mend the dataset, or leave such samples out with on_error="skip"'
                    ) from error
                sample = _SKIP
            finally:
                reader.end()
            yield row, sample


class StreamJob(IterableDataset[Report]):
    """Iterates an iterable and writes its samples as they come, a report for every block.

    With W workers, each iterating its own share, block c of worker w holds the rows from
    ``(c * W + w) * STREAM_BLOCK``.
    """

    def __init__(self, dataset: Iterable[Any], build: Build, plan: WritePlan, workers: int) -> None:
        self.dataset, self.build, self.plan = dataset, build, plan
        self.readers = Readers(workers)

    def __iter__(self) -> Iterator[Report]:
        info = get_worker_info()
        share, shares = (info.id, info.num_workers) if info else (0, 1)
        step = STREAM_BLOCK if shares > 1 else self.plan.rows_a_write
        writer, samples, present = _Writer(self.build, self.plan), self._samples(), self.build.presence()
        reader, number = _Reader(self.readers), 0
        while True:
            report = Report()
            try:
                block = self._read(reader, samples, step, number)
                first = number if shares == 1 else (number // STREAM_BLOCK * shares + share) * STREAM_BLOCK
                leaves = [take_apart(self.plan, sample, number + i) for i, sample in enumerate(block)]
                here = present[first : first + len(block)]
                done = int(here.argmin()) if not here.all() else len(here)  # written before an interruption
                writer.write(first + done, leaves[done:], number + done, report)
                number += len(block)
            except _Stopped:
                return
            except Exception as error:
                _carry(report, error)
                block = []
            if len(block) < step and report.error is None and (more := self._beyond(present, number, share, shares)):
                _carry(report, more)
            if block or report.error is not None:
                yield report
            if not block or report.drifts:
                return

    def _samples(self) -> Iterator[Any]:
        yield from self.dataset  # what its __iter__ raises is raised by the first next()

    def _beyond(self, present: npt.NDArray[np.uint8], number: int, share: int, shares: int) -> BuildError | None:
        """The error for an iterable that ended after ``number`` samples, where an earlier run had written more."""
        own = np.arange(len(present)) // STREAM_BLOCK % shares == share if shares > 1 else slice(None)
        there = int(np.count_nonzero(present[own] % SKIPPED))
        if there <= number:
            return None
        return BuildError(
            f"{self.build.root}: found that the iterable{_of_worker()} ended after {number:,} samples; expected at "
            f"least {there:,}, which an earlier run has written: if it is meant to be shorter, remove that directory"
        )

    def _read(self, reader: _Reader, samples: Iterator[Any], count: int, number: int) -> list[Any]:
        block: list[Any] = []
        try:
            while len(block) < count:
                reader.begin(number + len(block))
                try:
                    sample = next(samples)
                finally:
                    reader.end()
                block.append(map_leaves(values.copy_value, sample))  # an iterator may yield one buffer again and again
        except StopIteration:
            pass
        except _Stopped:
            raise
        except Exception as error:
            raise SampleError(
                f"sample {number + len(block)}{_of_worker()}: the iterable raised {type(error).__name__}: {error}; "
                "an iterator that raised cannot go on: catch the error inside it and yield the next sample"
            ) from error
        return block
