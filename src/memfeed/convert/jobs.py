"""The jobs of the processes of a conversion: read samples, write rows, and yield reports."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from memfeed.building.build import Build
from memfeed.building.partial import SKIPPED
from memfeed.convert.inputs import read_sample
from memfeed.convert.options import WorkerInit
from memfeed.convert.randomness import Draws
from memfeed.convert.sharing import share_memory
from memfeed.convert.watchdog import WAITING, Watchdog
from memfeed.convert.write_run import Report, RunWriter, WritePlan, flatten_sample
from memfeed.errors import BuildError, SampleError, SpaceError
from memfeed.schema import values
from memfeed.schema.containers import map_leaves

STREAM_BLOCK = 16  # consecutive rows that one worker of an iterable writes
_SKIP = object()


class MapJob:
    """Reads and writes ranges of rows of a map-style dataset, and reports each, until none is left.

    Workers take the next range from a shared counter, so they end together although samples take different times.
    """

    def __init__(
        self,
        dataset: Any,
        build: Build,
        plan: WritePlan,
        ranges: Sequence[range],
        worker_count: int,
        init: WorkerInit = None,
    ) -> None:
        self.dataset, self.build, self.plan, self.ranges, self.init = dataset, build, plan, list(ranges), init
        self.watchdog = Watchdog(worker_count)
        self._taken = _shared_counter(worker_count)
        self._draws = Draws(dataset, plan)
        self._reads_singly = False  # True once __getitems__ has returned samples in the same memory

    def run(self, worker: int | None) -> Iterator[Report]:
        """Yield a report for each range that this process wrote; `worker` is its index, None for the builder."""
        writer = RunWriter(self.build, self.plan, may_promote=worker is None)
        while (taken := self._take()) < len(self.ranges):
            report = Report()
            self.write_range(writer, worker or 0, self.ranges[taken], report)
            yield report

    def write_range(self, writer: RunWriter, worker: int, rows: range, report: Report) -> None:
        """Read and write rows up to the first that needs a promotion, and add to `report`."""
        step = self.plan.rows_per_write
        for first in range(rows.start, rows.stop, step):
            part = range(first, min(first + step, rows.stop))
            self._draws.begin()
            read = list(self._read(worker, part))
            self._draws.check(
                {row: leaves for row, leaves in read if leaves is not None}, partial(self._read_again, worker)
            )
            if not self._write(writer, part.start, read, report):
                break
        self.watchdog.record(worker, WAITING)

    def _take(self) -> int:
        with self._taken.get_lock():
            taken: int = self._taken.value
            self._taken.value = taken + 1
        return taken

    def _read(self, worker: int, rows: range) -> Iterator[tuple[int, list[Any] | None]]:
        """Yield each row and a copy of the leaves of its sample; None for a sample to skip."""
        for row, sample in self._samples(worker, rows):
            if sample is _SKIP or (sample is None and self._is_skipped(row)):
                yield row, None
            else:
                # a dataset may fill one buffer for every sample: the next one would change this one
                yield row, [values.copy_value(leaf) for leaf in flatten_sample(self.plan, sample, row)]

    def _is_skipped(self, row: int) -> bool:
        """Return True if None is no sample, and such samples are left out."""
        try:
            flatten_sample(self.plan, None, row)
        except SampleError:
            return self.plan.skip_errors
        return False

    def _read_again(self, worker: int, row: int) -> list[Any]:
        return flatten_sample(self.plan, read_sample(self.dataset, row, self.watchdog, worker), row)

    def _write(
        self, writer: RunWriter, start: int, rows: Sequence[tuple[int, list[Any] | None]], report: Report
    ) -> bool:
        """Write rows that were read; return False as `RunWriter.write` does."""
        run: list[list[Any]] = []
        for row, leaves in rows:
            if leaves is not None:
                run.append(leaves)
                continue
            writer.skip(row)
            report.skipped_count += 1
            if not writer.write(start, run, start, report):
                return False
            run, start = [], row + 1
        return writer.write(start, run, start, report)

    def _samples(self, worker: int, rows: range) -> Iterator[tuple[int, Any]]:
        get_many = getattr(self.dataset, "__getitems__", None)
        if callable(get_many) and not self.plan.skip_errors and not self._reads_singly:
            self.watchdog.begin_read(worker, rows.start, len(rows))
            try:
                samples = list(get_many(list(rows)))
            except Exception:  # read them one by one below, so that the error names the sample
                samples = []
            finally:
                self.watchdog.end_read(worker)
            self._reads_singly = share_memory(samples)
            if len(samples) == len(rows) and not self._reads_singly:
                yield from zip(rows, samples, strict=True)
                return
        for row in rows:
            try:
                sample = read_sample(self.dataset, row, self.watchdog, worker)
            except SampleError:
                if not self.plan.skip_errors:
                    raise
                sample = _SKIP
            yield row, sample


class StreamJob:
    """Iterates an iterable and writes its samples in order, with a report for each block.

    Each of W workers iterates its own share. Block c of worker w has the rows from ``(c * W + w) * STREAM_BLOCK``.
    With a ``length``, which only one process can have, no sample after so many is asked for.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        build: Build,
        plan: WritePlan,
        worker_count: int,
        length: int | None = None,
        init: WorkerInit = None,
    ) -> None:
        self.dataset, self.build, self.plan, self.length, self.init = dataset, build, plan, length, init
        self.watchdog = Watchdog(worker_count)

    def run(self, worker: int | None) -> Iterator[Report]:
        """Yield a report for each block that this process wrote; `worker` is its index, None for the builder."""
        share, shares = worker or 0, max(self.watchdog.worker_count, 1)
        step = STREAM_BLOCK if shares > 1 else self.plan.rows_per_write
        writer = RunWriter(self.build, self.plan, may_promote=worker is None)
        samples, presence, index = self._samples(), self.build.presence(), 0
        name = "" if worker is None else f" of worker {worker}"
        while True:
            report = Report()
            count = step if self.length is None else min(step, self.length - index)
            block = self._read(share, samples, count, index, name)
            row = index if shares == 1 else (index // STREAM_BLOCK * shares + share) * STREAM_BLOCK
            leaves = [flatten_sample(self.plan, sample, index + i) for i, sample in enumerate(block)]
            present = presence[row : row + len(block)]
            done = int(present.argmin()) if not present.all() else len(present)  # written before an interruption
            writer.write(row + done, leaves[done:], index + done, report)
            index += len(block)
            is_last = len(block) < count or index == self.length
            if is_last:
                self._require_all(presence, index, share, shares, name)
            if block:
                self.watchdog.record(worker or 0, WAITING)
                yield report
            if is_last or report.drifts:
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

    def _read(self, worker: int, samples: Iterator[Any], count: int, index: int, worker_name: str) -> list[Any]:
        """Return the next `count` samples, or fewer at the end of the iterable."""
        block: list[Any] = []
        try:
            while len(block) < count:
                self.watchdog.begin_read(worker, index + len(block))
                try:
                    sample = next(samples)
                finally:
                    self.watchdog.end_read(worker)
                block.append(map_leaves(values.copy_value, sample))  # an iterator may yield the same buffer again
        except StopIteration:
            pass
        except Exception as error:
            raise SampleError(
                f"sample {index + len(block)}{worker_name}: the iterable raised {type(error).__name__}: {error}; "
                "an iterator cannot continue after an exception: catch it inside the iterator and yield the next sample"
            ) from error
        return block


def _shared_counter(worker_count: int) -> Any:
    """Return an int64 that all workers share, with a lock. Raise SpaceError if /dev/shm has no room for the lock."""
    # a lock between processes is a file in /dev/shm, which one process alone does not need
    lock: Any = True if worker_count else threading.RLock()
    try:
        return torch.multiprocessing.Value("q", 0, lock=lock)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise SpaceError(
            errno.ENOSPC,
            "found no room in /dev/shm, the shared memory in which worker processes keep a lock; expected a few bytes: "
            "remove files there, mount it larger (docker run --shm-size=1g), or use workers=0",
        ) from error
