"""The jobs of the processes of a conversion: read samples, write rows, and yield reports.

Rows are written in the order in which their lists were sent, though several processes read them at once.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from memfeed.building.build import Build
from memfeed.building.partial import SKIPPED
from memfeed.building.space import Extents
from memfeed.convert.inputs import next_sample
from memfeed.convert.options import WorkerInit
from memfeed.convert.row_worker import ReadList, Request, RowWorker
from memfeed.convert.watchdog import ENDED, WAITING, Watchdog
from memfeed.convert.write_run import Report, RunWriter, WritePlan, flatten_sample
from memfeed.errors import BuildError
from memfeed.schema import values
from memfeed.schema.containers import map_leaves

POLL_SECONDS = 0.001  # between two looks whether a list is placed
MOST_BYTES_READ = 64 << 20  # of lists that wait for others, before a worker waits too
MOST_SECONDS = 10.0  # that a list waits, because a kill loses it: then it is written out of order


class ListWorker:
    """Reads the lists of rows that a process is sent, and writes each once it is placed: see `building.extents`.

    A list that waits for others is kept, and the next one is read: a slow sample does not stop the other workers. If a
    sample takes very long, or for ever, the lists after it are written out of order.
    """

    def __init__(self, rows: RowWorker, watchdog: Watchdog, number: int, receiver: Connection) -> None:
        self._rows, self._watchdog, self._number, self._receiver = rows, watchdog, number, receiver
        self._extents = rows.extents
        self._sent: deque[tuple[int, Request | None]] = deque()
        self._read: deque[tuple[float, ReadList]] = deque()  # when each was read, and what
        self._reports: deque[Report] = deque()
        self._look_due = 0.0

    def run(self) -> Iterator[Report]:
        """Yield a report for each list, until None is received. Raises EOFError if the builder has ended."""
        while True:
            self._write_placed()
            while self._reports:
                yield self._reports.popleft()
            if not self._sent or self._is_full():
                self._receive()
                continue
            number, request = self._sent[0]
            if request is None:
                if not self._read:
                    return
                self._receive()
                continue
            assert not isinstance(request, str)
            self._sent.popleft()
            if self._extents.is_left_out(number):
                self._reports.append(Report(worker=self._number))
                continue
            one = self._rows.read(number, request, self._write_now_and_then)
            self._read.append((time.monotonic(), one))
            self._write_placed()
            if self._read:
                self._reports.append(Report(reader=self._number))

    def _is_full(self) -> bool:
        return sum(one.byte_count for _, one in self._read) > MOST_BYTES_READ

    def _receive(self) -> None:
        """Receive what was sent. Wait for it if there is nothing to write; else for a moment."""
        self._watchdog.record(self._number, ENDED)  # it may wait for long, which is no stall
        self._watchdog.require_going_on()
        if not self._read or self._receiver.poll(POLL_SECONDS):
            self._sent.append(self._receiver.recv())

    def _write_now_and_then(self) -> None:
        now = time.monotonic()
        if self._read and now >= self._look_due:
            self._look_due = now + POLL_SECONDS
            self._write_placed()

    def _write_placed(self) -> None:
        """Write the lists that were read and that are placed, or cannot wait. Report those that are left out."""
        while self._read:
            since, one = self._read[0]
            if self._extents.is_left_out(one.number):
                self._reports.append(Report(worker=self._number))
            elif self._extents.is_placed(one.number) or time.monotonic() - since > MOST_SECONDS:
                self._reports.append(self._rows.write_list(one))
            else:
                return
            self._read.popleft()


STREAM_BLOCK = 16  # consecutive rows that one worker of an iterable writes
_ADVICE = "; an iterator cannot continue after an exception: catch it inside the iterator and yield the next sample"


class RowJob:
    """Reads and writes the rows of a map-style dataset that each process is sent, one list after another.

    Lists get heap space in the order in which they were sent, so that the bytes of a store do not depend on which
    process is ready first. Rows of a store that is read meanwhile have no order, and are written at once.

    Args:
        worker_count: processes; with 0 of them the builder itself is worker 0.
        known: samples that were read before, by their rows.
    """

    def __init__(
        self,
        dataset: Any,
        build: Build,
        plan: WritePlan,
        worker_count: int,
        init: WorkerInit = None,
        known: Mapping[int, Any] | None = None,
    ) -> None:
        self.dataset, self.build, self.plan, self.init = dataset, build, plan, init
        self.watchdog, self._known = Watchdog(worker_count), known or {}
        pipes = [torch.multiprocessing.Pipe(duplex=False) for _ in range(worker_count)]
        self._receivers: list[Connection] = [receiver for receiver, _ in pipes]
        self._senders: list[Connection] = [sender for _, sender in pipes]
        self._here: deque[Request | None] = deque()
        self._number = Extents(build.root).begin_lists() if worker_count and not plan.is_read else 0  # of the next list

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}  # for a process that is not forked it is less work to read them again

    def send(self, worker: int, request: Request | None) -> None:
        """Let a worker do something after what it was asked for before, or end it: None."""
        if self._senders:
            self._senders[worker].send((self._number, request))
            self._number += request is not None
        else:
            self._here.append(request)

    def run(self, worker: int | None) -> Iterator[Report]:
        """Yield a report for each request to this process; `worker` is its index, None for the builder."""
        number = worker or 0
        if worker is not None:
            for sender in self._senders:
                sender.close()  # else no worker would see that the builder has died
        rows = RowWorker(self.dataset, self.build, self.plan, self.watchdog, worker, self._known)
        with contextlib.closing(rows), contextlib.suppress(EOFError):
            if worker is not None and not self.plan.is_read:
                yield from ListWorker(rows, self.watchdog, number, self._receivers[worker]).run()
                return
            while True:
                if worker is not None:
                    self.watchdog.record(number, ENDED)  # it may wait for long, which is no stall
                request = self._here.popleft() if worker is None else self._receivers[worker].recv()[1]
                if request is None:
                    return
                self.watchdog.record(number, WAITING)
                yield rows.do(request)

    def close(self) -> None:
        """Close the pipes of this process."""
        for pipe in (*self._receivers, *self._senders):
            pipe.close()


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
        while True:
            report = Report()
            count = step if self.length is None else min(step, self.length - index)
            block = self._read(worker, samples, count, index)
            row = index if shares == 1 else (index // STREAM_BLOCK * shares + share) * STREAM_BLOCK
            leaves = [flatten_sample(self.plan, sample, index + i) for i, sample in enumerate(block)]
            present = presence[row : row + len(block)]
            done = int(present.argmin()) if not present.all() else len(present)  # written before an interruption
            writer.write(row + done, leaves[done:], index + done, report)
            index += len(block)
            is_last = len(block) < count or index == self.length
            if is_last:
                name = "" if worker is None else f" of worker {worker}"
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

    def _read(self, worker: int | None, samples: Iterator[Any], count: int, index: int) -> list[Any]:
        """Return the next `count` samples, or fewer at the end of the iterable."""
        block: list[Any] = []
        with contextlib.suppress(StopIteration):
            while len(block) < count:
                sample = next_sample(samples, index + len(block), self.watchdog, worker, _ADVICE)
                block.append(map_leaves(values.copy_value, sample))  # an iterator may yield the same buffer again
        return block
