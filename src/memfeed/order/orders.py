"""The order in which an epoch visits rows: a pure function of (n, seed, epoch).

An order is called with a range of positions and returns the rows there. It knows no store, no rank and no batch.

A pseudo-random permutation of range(n) that computes each entry by itself: no list, no start-up, any n.

A Feistel network over Z_a x Z_b with a * b just above n (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
CT-RSA 2002, https://doi.org/10.1007/3-540-45760-7_9, their generalised Feistel cipher). An entry outside of n is
mapped again until it is inside, which keeps it a permutation. The round functions are `memfeed.random.mix` of a key.

The next epoch's order is drawn in the background while an epoch runs.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from memfeed.random import derive, mix
from memfeed.system.threads import started

Numbers = npt.NDArray[np.int64]
ROUNDS = 8


class Bijection:
    """One permutation of range(n), chosen by a key; memory and time do not depend on n.

    Example::

        Bijection(10**12, "epoch", 3)(np.arange(5))  # the first five of 10^12 numbers in random order
    """

    def __init__(self, n: int, *key: int | str) -> None:
        self.n = n
        self._a = math.isqrt(max(n - 1, 0)) + 1
        self._b = -(-n // self._a)
        self._keys = [np.uint64(derive("bijection", n, round_index, *key)) for round_index in range(ROUNDS)]

    def __call__(self, at: Numbers) -> Numbers:
        """Return the entries at positions ``at``, int64 [k], each in range(n)."""
        return self._walk(at, 1)

    def inverse(self, entries: Numbers) -> Numbers:
        """Return the positions of these entries: ``inverse(self(at)) == at``."""
        return self._walk(entries, -1)

    def _walk(self, numbers: Numbers, sign: int) -> Numbers:
        found = self._mapped(np.asarray(numbers, np.int64), sign)
        outside = np.flatnonzero(found >= self.n)
        while len(outside):
            found[outside] = self._mapped(found[outside], sign)
            outside = outside[found[outside] >= self.n]
        return found

    def _mapped(self, numbers: Numbers, sign: int) -> Numbers:
        """Go through all rounds once; backwards with ``sign`` -1."""
        left, right = np.divmod(numbers, self._b)
        move = np.add if sign > 0 else np.subtract
        for round_index, key in list(enumerate(self._keys))[::sign]:
            if round_index % 2:
                right = move(right, self._round(left, key, self._b)) % self._b
            else:
                left = move(left, self._round(right, key, self._a)) % self._a
        return left * self._b + right

    def _round(self, half: Numbers, key: np.uint64, size: int) -> Numbers:
        mixed: Numbers = (mix(half.astype(np.uint64) + key) % np.uint64(size)).astype(np.int64)
        return mixed


class InTurn:
    """The permutation that leaves each number where it is."""

    def __call__(self, at: Numbers) -> Numbers:
        """Return the entries at positions ``at``: the positions."""
        return at

    inverse = __call__


Rows = npt.NDArray[Any]  # int64 or int32
COMPACT_ABOVE = 1 << 20  # rows from which a permutation is kept in half the memory
WINDOW_BLOCKS = 128


class Order(Protocol):
    """The rows of one epoch by their positions."""

    n: int

    def __call__(self, start: int, stop: int) -> Rows:
        """Return the rows at positions ``start`` to ``stop`` of the epoch, int64 or int32; the caller must not change
        them."""


def permutation(n: int, seed: int, epoch: int) -> Rows:
    """Return an exact uniform permutation of ``range(n)``, int64 [n], drawn from SFC64 keyed by hash(seed, epoch).

    Seed and epoch are hashed together, so that no two pairs give one order (42 + 1 is 43 + 0). The caller owns it. It
    is the same on every platform that numpy supports.
    """
    generator = np.random.Generator(np.random.SFC64(derive("order", seed, epoch)))
    # above 10,000 numpy's choice of all, without replacement, is a shuffle too, in two thirds of the time
    return generator.choice(n, n, replace=False) if n > 10_000 else generator.permutation(n)


class Sequential:
    """The rows in their own order."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, start: int, stop: int) -> Rows:
        """Return the rows at positions ``start`` to ``stop`` of the epoch, int64."""
        return np.arange(start, min(stop, self.n), dtype=np.int64)

    def passed(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the runs of rows [a, b) whose last visit in this epoch is at positions ``start`` to ``stop``."""
        return [(start, min(stop, self.n))]


class Shuffled:
    """An exact uniform permutation of the rows, one per (seed, epoch); memory O(n), 4 bytes a row where they fit."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self.n = n
        rows: npt.NDArray[Any] = permutation(n, seed, epoch)
        self._rows = rows.astype(np.int32) if COMPACT_ABOVE <= n <= np.iinfo(np.int32).max else rows

    def __call__(self, start: int, stop: int) -> Rows:
        """Return the rows at positions ``start`` to ``stop`` of the epoch, int64 or int32."""
        return self._rows[start:stop]


class BlockOrder:
    """Blocks of neighbouring rows in random order, the rows of 128 blocks at a time mixed: O(1) memory for any n.

    Starts in less than a millisecond for 10^10 rows, and reads a disk in runs of ``block_rows``. How far it is from
    uniform: which blocks share a window, and the order of rows within a window, are uniform (the former up to a
    pseudo-random permutation). But two rows of one block always come within one window, ``128 * block_rows``
    positions; a uniform permutation of n puts them n / 3 apart on average. If n is at most one window, this *is* a
    uniform permutation. ``in_turn`` leaves the blocks in their own order: then only neighbours are mixed.
    """

    def __init__(self, n: int, seed: int, epoch: int, block_rows: int, *, in_turn: bool = False) -> None:
        self.n, self.block_rows = n, block_rows
        self._key = derive("blocks", seed, epoch, block_rows)
        self._blocks = -(-n // block_rows)
        self._place = InTurn() if in_turn else Bijection(self._blocks, self._key)
        self._missing = self._blocks * block_rows - n  # rows that the last block lacks; it can come at any place
        last = np.array([self._blocks - 1], np.int64)
        self._short_window = int(self._place.inverse(last)[0]) // WINDOW_BLOCKS if self._missing else self._blocks
        self._held: tuple[int, Rows] = (-1, np.empty(0, np.int64))

    @property
    def window_rows(self) -> int:
        """The number of rows that are mixed."""
        return WINDOW_BLOCKS * self.block_rows

    def __call__(self, start: int, stop: int) -> Rows:
        """Return the rows at positions ``start`` to ``stop`` of the epoch, int64."""
        parts, stop = [], min(stop, self.n)
        while start < stop:
            window = self._window_at(start)
            first = self._first(window)
            rows = self._window(window)
            parts.append(rows[start - first : stop - first])
            start += len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def passed(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the runs of rows [a, b) whose last visit in this epoch is at positions ``start`` to ``stop``."""
        runs = []
        for window in range(self._window_at(start), self._window_at(min(stop, self.n - 1)) + 1):
            if start < self._first(window + 1) <= stop:
                firsts = self._members(window) * self.block_rows
                runs += [(int(first), min(int(first) + self.block_rows, self.n)) for first in np.sort(firsts)]
        return runs

    def _first(self, window: int) -> int:
        """Return the position where a window begins."""
        return min(window * self.window_rows, self.n + self._missing) - self._missing * (window > self._short_window)

    def _window_at(self, position: int) -> int:
        window = position // self.window_rows
        return window + (position >= self._first(window + 1))

    def _members(self, window: int) -> Rows:
        first = window * WINDOW_BLOCKS
        return self._place(np.arange(first, min(first + WINDOW_BLOCKS, self._blocks)))

    def _window(self, window: int) -> Rows:
        if self._held[0] != window:
            rows = (self._members(window)[:, None] * self.block_rows + np.arange(self.block_rows)).ravel()
            rows = rows[rows < self.n]
            np.random.Generator(np.random.PCG64(derive(self._key, window))).shuffle(rows)
            self._held = window, rows
        return self._held[1]


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
