"""What each process of a conversion does: read samples, write rows, and yield reports."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from memfeed.building.build import Build
from memfeed.building.rows import SKIPPED
from memfeed.convert.inputs import read_sample
from memfeed.convert.watchdog import Watchdog
from memfeed.convert.write_run import Report, RunWriter, WritePlan, flatten_sample
from memfeed.errors import BuildError, SampleError
from memfeed.schema import codec
from memfeed.schema.tree import map_leaves

STREAM_BLOCK = 16  # consecutive rows that one worker of an iterable writes
_SKIP = object()


class RowRange(msgspec.Struct, frozen=True):
    """The rows ``first`` to ``first + count - 1``."""

    first: int
    count: int


class _Stopped(Exception):  # noqa: N818
    """The builder wants no more samples, or is dead."""


class _Reader:
    """The dataset's reads in one process: each is announced to the watchdog, and refused once it is not wanted."""

    def __init__(self, watchdog: Watchdog, worker: int | None) -> None:
        self.watchdog, self.worker = watchdog, worker or 0
        self._parent = None if worker is None else os.getppid()

    def begin(self, first: int, count: int = 1) -> None:
        """Call this before samples are read. Raise _Stopped if they are not wanted any more."""
        self.require_wanted()
        self.watchdog.begin_read(self.worker, first, count)

    def end(self) -> None:
        """Call this when the dataset has returned them, or has raised."""
        self.watchdog.end_read(self.worker)

    def require_wanted(self) -> None:
        """Raise _Stopped if the builder has stopped this job, or is dead."""
        if self.watchdog.is_stopped or (self._parent is not None and os.getppid() != self._parent):
            raise _Stopped


class MapJob:
    """Reads and writes row ranges of a map-style dataset, and reports each, until none is left.

    Workers take the next range from a shared counter, so they end together although samples take different times.
    """

    def __init__(
        self, dataset: Any, build: Build, plan: WritePlan, ranges: Sequence[RowRange], worker_count: int
    ) -> None:
        self.dataset, self.build, self.plan, self.ranges = dataset, build, plan, list(ranges)
        self.watchdog = Watchdog(worker_count)
        self._taken = torch.multiprocessing.Value("q", 0)

    def run(self, worker: int | None) -> Iterator[Report]:
        """Yield a report for each range that this process wrote; `worker` is its index, None for the builder."""
        writer = RunWriter(self.build, self.plan, may_promote=worker is None)
        reader = _Reader(self.watchdog, worker)
        step = self.plan.rows_per_write
        while (taken := self._take()) < len(self.ranges):
            report, rows = Report(), self.ranges[taken]
            last = rows.first + rows.count
            try:
                for first in range(rows.first, last, step):
                    if not self._write(writer, reader, first, min(step, last - first), report):
                        break
            except _Stopped:
                return
            yield report

    def _take(self) -> int:
        with self._taken.get_lock():
            taken: int = self._taken.value
            self._taken.value = taken + 1
        return taken

    def _write(self, writer: RunWriter, reader: _Reader, first: int, count: int, report: Report) -> bool:
        """Write `count` rows from `first`; return False as `RunWriter.write` does."""
        run: list[list[Any]] = []
        start = first
        for row, sample in self._samples(reader, first, count):
            if sample is not _SKIP:
                run.append(flatten_sample(self.plan, sample, row))
                continue
            writer.skip(row)
            report.skipped_count += 1
            if not writer.write(start, run, start, report):
                return False
            run, start = [], row + 1
        return writer.write(start, run, start, report)

    def _samples(self, reader: _Reader, first: int, count: int) -> Iterator[tuple[int, Any]]:
        rows = range(first, first + count)
        get_many = getattr(self.dataset, "__getitems__", None)
        if callable(get_many) and not self.plan.skip_errors:
            reader.begin(first, count)
            try:
                samples = list(get_many(list(rows)))
            except Exception:  # read them one by one below, so that the error names the sample
                samples = []
            finally:
                reader.end()
            if len(samples) == count:
                yield from zip(rows, samples, strict=True)
                return
        for row in rows:
            reader.require_wanted()
            try:
                sample = read_sample(self.dataset, row, self.watchdog, reader.worker)
            except SampleError:
                if not self.plan.skip_errors:
                    raise
                sample = _SKIP
            yield row, sample


class StreamJob:
    """Iterates an iterable and writes its samples in order, with a report for each block.

    Each of W workers iterates its own share. Block c of worker w has the rows from ``(c * W + w) * STREAM_BLOCK``.
    """

    def __init__(self, dataset: Iterable[Any], build: Build, plan: WritePlan, worker_count: int) -> None:
        self.dataset, self.build, self.plan = dataset, build, plan
        self.watchdog = Watchdog(worker_count)

    def run(self, worker: int | None) -> Iterator[Report]:
        """Yield a report for each block that this process wrote; `worker` is its index, None for the builder."""
        share, shares = worker or 0, max(self.watchdog.worker_count, 1)
        step = STREAM_BLOCK if shares > 1 else self.plan.rows_per_write
        writer = RunWriter(self.build, self.plan, may_promote=worker is None)
        reader = _Reader(self.watchdog, worker)
        samples, presence, index = self._samples(), self.build.presence(), 0
        name = "" if worker is None else f" of worker {worker}"
        while True:
            report = Report()
            try:
                block = self._read(reader, samples, step, index, name)
            except _Stopped:
                return
            row = index if shares == 1 else (index // STREAM_BLOCK * shares + share) * STREAM_BLOCK
            leaves = [flatten_sample(self.plan, sample, index + i) for i, sample in enumerate(block)]
            present = presence[row : row + len(block)]
            done = int(present.argmin()) if not present.all() else len(present)  # written before an interruption
            writer.write(row + done, leaves[done:], index + done, report)
            index += len(block)
            if len(block) < step:
                self._require_all(presence, index, share, shares, name)
            if block:
                yield report
            if len(block) < step or report.drifts:
                return

    def _samples(self) -> Iterator[Any]:
        yield from self.dataset  # so the first next() raises what the dataset's __iter__ raises

    def _require_all(
        self, presence: npt.NDArray[np.uint8], count: int, share: int, shares: int, worker_name: str
    ) -> None:
        """Raise BuildError if the iterable ended after `count` samples, but an earlier run wrote more."""
        own = np.arange(len(presence)) // STREAM_BLOCK % shares == share if shares > 1 else slice(None)
        written = int(np.count_nonzero(presence[own] % SKIPPED))
        if written > count:
            raise BuildError(
                f"{self.build.root}: found that the iterable{worker_name} ended after {count:,} samples; expected at "
                f"least {written:,}, which an earlier run wrote: if it is meant to be shorter, remove that directory"
            )

    def _read(self, reader: _Reader, samples: Iterator[Any], count: int, index: int, worker_name: str) -> list[Any]:
        """Return the next `count` samples, or fewer at the end of the iterable."""
        block: list[Any] = []
        try:
            while len(block) < count:
                reader.begin(index + len(block))
                try:
                    sample = next(samples)
                finally:
                    reader.end()
                block.append(map_leaves(codec.own, sample))  # an iterator may yield the same buffer again
        except StopIteration:
            pass
        except _Stopped:
            raise
        except Exception as error:
            raise SampleError(
                f"sample {index + len(block)}{worker_name}: the iterable raised {type(error).__name__}: {error}; "
                "an iterator cannot continue after an exception: catch it inside the iterator and yield the next sample"
            ) from error
        return block
