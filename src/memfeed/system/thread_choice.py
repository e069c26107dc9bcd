"""How many threads a kind of work is worth, by measurement: found out while the work runs, and again when that changes.

Two numbers of threads take turns for a few milliseconds each; the larger one is kept if it is faster by a fifth for
twice the threads. Then the number rests. It is compared again after a while, longer each time it stays, and sooner if
the thread that shares its work out waits much more or much less for cores than before.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from time import perf_counter

import numpy as np

GAIN = 1.2  # twice the threads are kept if they do this many times the work
TURNS, TURN_SECONDS = 5, 0.004  # of each of the two numbers in a comparison
FIRST_REST, LONGEST_REST = 0.5, 16.0  # seconds between comparisons
LEAST_REST = 20  # and at least this many times as long as the work of a comparison took
WATCHED_SECONDS = 0.05  # the share of its time that the thread computed is taken over this long
MOST_CHANGE = 0.25  # of that share, without a new comparison


class ThreadChoice:
    """The number of threads for one kind of work, from 1 to ``most``. Any thread may call it.

    ``threads`` is the number settled on last, 1 at first.

    Args:
        most: the largest number.
        clock: gives seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._most, self.threads = most, 1
        self._rest, self._went_up = FIRST_REST, False
        self._rests_until, self._stays_until = 0.0, 0.0  # the second even if the share of its time has changed
        self._compared: tuple[int, int] | None = None
        self._busy_share: float | None = None
        self._forget()
        self._compare_next()

    def _forget(self) -> None:
        self._turn, self._work, self._seconds, self._cpu_seconds = 0, 0.0, 0.0, 0.0
        self._compared_seconds = 0.0  # without the time between pieces of work: an epoch may end in a comparison
        self._rates: tuple[list[float], list[float]] = [], []

    def set_most(self, most: int) -> None:
        """Change the largest number of threads, at any time."""
        with self._lock:
            if most != self._most:
                self._most, self.threads = most, min(self.threads, most)
                self._rest = FIRST_REST
                self._compare_next()

    def next(self) -> int:
        """Return how many threads the next piece of work takes."""
        compared = self._compared
        return self.threads if compared is None else compared[self._turn % 2]

    def note(self, threads: int, work: float, seconds: float, cpu_seconds: float) -> None:
        """Count work that was done by so many threads.

        Args:
            threads: what ``next`` returned before it.
            work: its amount, in a unit that is the same for all work of this kind.
            seconds: from its beginning to its end.
            cpu_seconds: of the thread that shared it out.
        """
        with self._lock:
            if threads != self.next():  # a comparison began or ended meanwhile, in another thread
                return
            self._work, self._seconds = self._work + work, self._seconds + seconds
            self._cpu_seconds += cpu_seconds
            if self._compared is None:
                self._watch()
            elif self._seconds >= TURN_SECONDS:
                self._rates[self._turn % 2].append(self._work / self._seconds)
                self._compared_seconds += self._seconds
                self._turn += 1
                self._work = self._seconds = self._cpu_seconds = 0.0
                if self._turn == 2 * TURNS:
                    self._settle(*self._compared)

    def _settle(self, few: int, many: int) -> None:
        gain = np.median(self._rates[1]) / np.median(self._rates[0])
        best = many if gain >= GAIN ** math.log2(many / few) else few
        if best != self.threads:
            self._went_up, self.threads, self._rest = best > self.threads, best, FIRST_REST
            self._compare_next(self._went_up)
            if self._compared is not None:
                return
        self._compared = self._busy_share = None
        self._stays_until = self._clock() + LEAST_REST * self._compared_seconds
        self._rests_until = max(self._clock() + self._rest, self._stays_until)
        self._rest = min(2 * self._rest, LONGEST_REST)
        self._forget()

    def _watch(self) -> None:
        """Compare again after the rest, or if the share of its time that the thread computed has changed."""
        if self._seconds < WATCHED_SECONDS:
            return
        share = self._cpu_seconds / self._seconds
        self._work = self._seconds = self._cpu_seconds = 0.0
        if self._busy_share is None:
            self._busy_share = share
        has_changed = abs(share - self._busy_share) > MOST_CHANGE
        if self._clock() < (self._stays_until if has_changed else self._rests_until):
            return
        if has_changed:
            self._rest = FIRST_REST
        self._went_up = not self._went_up
        self._compare_next(self._went_up)

    def _compare_next(self, upwards: bool = True) -> None:
        """Begin to compare the number with the next larger or smaller one, if there is one in that direction."""
        threads = self.threads
        smaller = 1 << max((threads - 1).bit_length() - 1, 0)  # the power of two below; 1 for 1
        pairs = {True: (threads, min(2 * threads, self._most)), False: (smaller, threads)}
        few, many = pairs[upwards]
        if few == many and self._compared is None:
            few, many = pairs[not upwards]
        self._compared = (few, many) if few != many else None
        self._forget()
