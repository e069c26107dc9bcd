"""The order of each epoch, the next one's drawn in the background while an epoch runs."""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from collections.abc import Callable
from functools import cache

import numpy as np

from memfeed.order.orders import Order

KEPT_BYTES = 30 << 20
LARGE_BLOCK = (128 << 10) // 8  # rows whose order glibc would return to the system
SHORT_SECONDS, LOOKS = 0.05, 12  # epochs this short are measured, so many in either way
WORTH_A_THREAD = 100_000  # rows: fewer are drawn in less than a millisecond, which a thread would take from the gather


class _Draw(threading.Thread):
    def __init__(self, make: Callable[[int], Order], epoch: int) -> None:
        super().__init__(name="memfeed", daemon=True)
        self._make, self._epoch = make, epoch
        self._order: Order | None = None
        self.start()

    def run(self) -> None:
        self._order = self._make(self._epoch)

    def result(self) -> Order:
        self.join()
        # what failed in the thread is done again here, where its exception can be seen
        return self._make(self._epoch) if self._order is None else self._order


@cache
def _keep_freed_memory() -> None:
    """Lets the C library keep blocks as large as an order when they are freed, for the next one.

    glibc returns such a block to the system, and pages it in anew, byte by byte, for each epoch, until it has seen a
    larger one freed (mallopt(3), M_MMAP_THRESHOLD, "dynamic"). To page in 2 MB takes as long as to shuffle them.
    """
    np.empty(KEPT_BYTES, np.uint8)


class EpochOrders:
    """epoch -> order; calls ``make`` for an epoch in the background, once told to, before it is asked for.

    ``n`` says how many rows that is; None for orders that take no time to make.

    Where epochs follow each other within milliseconds, a thread may cost more than it hides, as on a machine whose
    cores are busy or slow to wake. So some of them are run in either way, and the faster one is kept.
    """

    def __init__(self, make: Callable[[int], Order], n: int | None) -> None:
        self._make = make
        self._ahead = self._measuring = n is not None and n >= WORTH_A_THREAD
        self._long = n is not None and n >= LARGE_BLOCK
        self._next: tuple[int, _Draw] | None = None
        self._pid = os.getpid()
        self._called = math.inf
        self._took: dict[bool, list[float]] = {True: [], False: []}

    def __call__(self, epoch: int) -> Order:
        """The order of an epoch."""
        if self._pid != os.getpid():  # threads do not survive a fork
            self._next, self._pid = None, os.getpid()
        self._choose(time.perf_counter())
        if self._long:
            _keep_freed_memory()
        coming, self._next = self._next, None
        return coming[1].result() if coming is not None and coming[0] == epoch else self._make(epoch)

    def _choose(self, now: float) -> None:
        """Notes how long an epoch took, and once enough did, which way is the faster."""
        took, self._called = now - self._called, now
        if not self._measuring or not 0 < took < SHORT_SECONDS:
            return
        times = self._took[self._ahead]
        times.append(took)
        if len(times) == LOOKS:
            self._measuring = self._ahead  # first ahead, then not
            self._ahead = not self._ahead and statistics.median(self._took[True]) < statistics.median(times)

    def draw_ahead(self, epoch: int) -> None:
        """Starts to make the order of an epoch to come."""
        if self._ahead and self._next is None:
            self._next = epoch, _Draw(self._make, epoch)
