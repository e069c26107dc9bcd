"""Write rows in the order in which their lists were sent, though several processes read them at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection

from memfeed.convert.row_worker import ReadList, Request, RowWorker
from memfeed.convert.watchdog import ENDED, Watchdog
from memfeed.convert.write_run import Report

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
            if self._rows.is_left_out(number):
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
            if self._rows.is_left_out(one.number):
                self._reports.append(Report(worker=self._number))
            elif self._rows.is_placed(one.number) or time.monotonic() - since > MOST_SECONDS:
                self._reports.append(self._rows.write_list(one))
            else:
                return
            self._read.popleft()
