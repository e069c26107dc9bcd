"""The order of each epoch, the next one's drawn in the background while an epoch runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache

import numpy as np

from memfeed.order.order import Order

KEPT_BYTES = 30 << 20
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


class Draws:
    """epoch -> order; calls ``make`` for an epoch in the background, once told to, before it is asked for.

    ``n`` says how many rows that is; None for orders that take no time to make.
    """

    def __init__(self, make: Callable[[int], Order], n: int | None) -> None:
        self._make = make
        self._ahead = n is not None and n >= WORTH_A_THREAD
        self._next: tuple[int, _Draw] | None = None
        self._pid = os.getpid()

    def __call__(self, epoch: int) -> Order:
        """The order of an epoch."""
        if self._pid != os.getpid():  # threads do not survive a fork
            self._next, self._pid = None, os.getpid()
        coming, self._next = self._next, None
        return coming[1].result() if coming is not None and coming[0] == epoch else self._make(epoch)

    def draw_ahead(self, epoch: int) -> None:
        """Starts to make the order of an epoch to come."""
        if self._ahead and self._next is None:
            _keep_freed_memory()
            self._next = epoch, _Draw(self._make, epoch)
