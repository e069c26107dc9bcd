"""The order in which an epoch visits rows: a pure function of (n, seed, epoch).

An order is called with a range of positions and returns the rows there. It knows no store, no rank and no batch.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from memfeed.order.bijection import Bijection, InTurn
from memfeed.random import derive

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
