"""The order of each epoch. The next one is drawn in the background while an epoch runs."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from functools import cache
from time import perf_counter

import numpy as np

from memfeed.order.orders import Order
from memfeed.system.threads import started

KEPT_BYTES = 30 << 20
LARGE_BLOCK = (128 << 10) // 8  # rows whose order glibc would return to the system when it is freed
SHORT_SECONDS, MEASURED_EPOCHS = 0.05, 12  # shorter epochs are measured, so many with a thread and without
LEAST_ROWS = 100_000  # fewer are drawn in less than a millisecond: a thread would only take time from the gather


class _Draw(threading.Thread):
    def __init__(self, make: Callable[[int], Order], epoch: int) -> None:
        super().__init__(name="memfeed", daemon=True)
        self._make, self._epoch = make, epoch
        self._order: Order | None = None
        self._is_started = started(self)

    def run(self) -> None:
        self._order = self._make(self._epoch)

    def result(self) -> Order:
        if self._is_started:
            self.join()
        # if it failed in the thread, it is done again here, where its exception is raised
        return self._make(self._epoch) if self._order is None else self._order


@cache
def _keep_freed_memory() -> None:
    """Make the C library keep freed blocks of the size of an order, for the order of the next epoch.

    glibc returns such a block to the system and pages a new one in for each epoch, until it has seen a larger block
    freed (mallopt(3), M_MMAP_THRESHOLD, "dynamic"). To page in 2 MB takes as long as to shuffle them.
    """
    np.empty(KEPT_BYTES, np.uint8)


class EpochOrders:
    """The order of each epoch, made by ``make``, in a thread before it is needed if ``draw_ahead`` was called.

    ``n`` is the number of rows; None for orders that take no time to make. Where an epoch takes only milliseconds, a
    thread may cost more than it hides, as on a machine whose cores are busy or slow to wake. So some epochs are run in
    each of the two ways, and the faster way is kept.
    """

    def __init__(self, make: Callable[[int], Order], n: int | None) -> None:
        self._make = make
        self._ahead = self._measuring = n is not None and n >= LEAST_ROWS
        self._long = n is not None and n >= LARGE_BLOCK
        self._next: tuple[int, _Draw] | None = None
        self._pid = os.getpid()
        self._called = math.inf
        self._took: dict[bool, list[float]] = {True: [], False: []}

    def __call__(self, epoch: int) -> Order:
        """Return the order of an epoch."""
        if self._pid != os.getpid():  # threads do not survive a fork
            self._next, self._pid = None, os.getpid()
        self._choose(perf_counter())
        if self._long:
            _keep_freed_memory()
        coming, self._next = self._next, None
        return coming[1].result() if coming is not None and coming[0] == epoch else self._make(epoch)

    def _choose(self, now: float) -> None:
        """Record how long an epoch took. After enough of them, keep the faster way."""
        took, self._called = now - self._called, now
        if not self._measuring or not 0 < took < SHORT_SECONDS:
            return
        times = self._took[self._ahead]
        times.append(took)
        if len(times) == MEASURED_EPOCHS:
            self._measuring = self._ahead  # first ahead, then not
            self._ahead = not self._ahead and bool(np.median(self._took[True]) < np.median(times))

    def draw_ahead(self, epoch: int) -> None:
        """Start to make the order of a later epoch."""
        if self._ahead and self._next is None:
            self._next = epoch, _Draw(self._make, epoch)
