"""The orders that a loader's arguments choose, mixtures of several sources by weight included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np

from memfeed.errors import LoaderError
from memfeed.order.orders import WINDOW_BLOCKS, BlockOrder, EpochOrders, Order, Rows, Sequential, Shuffled
from memfeed.order.pieces import RankCut, RankPieces
from memfeed.random import derive

WINDOW = 4096  # positions within which each source has its exact share


def check_weights(weights: Sequence[float]) -> None:
    """Raise LoaderError if a weight is negative, or if they do not sum to 1."""
    if not all(0 <= weight <= 1 for weight in weights) or abs(sum(weights) - 1) > 1e-6:
        raise LoaderError(
            f"found weights {list(weights)}, which sum to {sum(weights):g}; expected none negative, and a sum of 1"
        )


def shares(weights: Sequence[float], n: int) -> list[int]:
    """Return how many of ``n`` rows each source gets: n times its weight; rows left over go to the largest remainders.

    `weights` are those that `check_weights` allows.
    """
    exact = [weight * n for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: n - sum(counts)]:
        counts[i] += 1
    return counts


class Mixed:
    """An epoch of ``sum(counts)`` rows, ``counts[i]`` of them from source i, spread evenly over it.

    Every window of 4,096 positions holds each source's exact share, in random order within the window if ``key`` is
    given, else evenly spaced; the positions after the last whole window belong to it. Each source visits its own rows
    in its own orders, pass after pass. An epoch continues a pass where the epoch before stopped, so that over the
    epochs each row of a source comes equally often.

    Args:
        sizes: rows of each source; source i has the rows from ``sum(sizes[:i])`` on.
        counts: how many rows of each an epoch has.
        epoch: its number.
        passes: for each source, its order by the number of the pass.
        key: the key of the random order within windows; None spaces the sources evenly.
    """

    def __init__(
        self, sizes: Sequence[int], counts: Sequence[int], epoch: int, passes: Sequence[EpochOrders], key: int | None
    ) -> None:
        self.n = sum(counts)
        self._sizes, self._counts, self._epoch, self._passes, self._key = sizes, counts, epoch, passes, key
        self._first = [0, *accumulate(sizes)]
        self._most = int(np.argmax(counts))
        # the largest source takes the rows that rounding leaves, less than one per source: each window, the last
        # too, must hold enough of its rows
        self._window = max(WINDOW, len(counts) ** 2)
        self._windows = max(1, self.n // self._window)
        self._held: tuple[int, Rows] = (-1, np.empty(0, np.int64))
        self._current: dict[int, tuple[int, Order]] = {}

    def __call__(self, start: int, stop: int) -> Rows:
        """Return the rows at positions ``start`` to ``stop`` of the epoch, int64."""
        parts, stop = [np.empty(0, np.int64)], min(stop, self.n)
        while start < stop:
            window = min(start // self._window, self._windows - 1)
            skipped = start - window * self._window
            parts.append(self._rows(window)[skipped : skipped + stop - start])
            start += len(parts[-1])
        return np.concatenate(parts)

    def _until(self, position: int) -> list[int]:
        """Return how many rows of each source come before a window's first position."""
        counts = [position * count // self.n for count in self._counts]
        counts[self._most] += position - sum(counts)
        return counts

    def _rows(self, window: int) -> Rows:
        if self._held[0] == window:
            return self._held[1]
        begin = window * self._window
        end = self.n if window == self._windows - 1 else begin + self._window
        before, after = self._until(begin), self._until(end)
        each = [b - a for a, b in zip(before, after, strict=True)]
        labels = np.repeat(np.arange(len(each)), each)
        if self._key is None:
            places = np.concatenate([(np.arange(count) + 0.5) / count for count in each if count])
            labels = labels[np.argsort(places, kind="stable")]
        else:
            np.random.Generator(np.random.PCG64(derive(self._key, window))).shuffle(labels)
        rows = np.empty(end - begin, np.int64)
        for i, count in enumerate(each):
            if count:
                rows[labels == i] = self._first[i] + self._next_of(i, before[i], count)
        self._held = window, rows
        return rows

    def _pass(self, i: int, pass_index: int) -> Order:
        if self._current.get(i, (-1, None))[0] != pass_index:
            self._current[i] = pass_index, self._passes[i](pass_index)
            self._passes[i].draw_ahead(pass_index + 1)
        return self._current[i][1]

    def _next_of(self, i: int, done: int, count: int) -> Rows:
        """Return ``count`` rows of source i, after the ``done`` rows that this epoch has had already."""
        at, size = self._epoch * self._counts[i] + done, self._sizes[i]
        parts = []
        while count:
            pass_index, skipped = divmod(at, size)
            parts.append(self._pass(i, pass_index)(skipped, min(skipped + count, size)))
            at, count = at + len(parts[-1]), count - len(parts[-1])
        return np.concatenate(parts)


BLOCK_BYTES = 1 << 20  # of one block of rows: a disk reads it at full speed
BLOCK_ROWS = 1024  # at most


@dataclass(frozen=True)
class Blocks:
    """Shuffle blocks of neighbouring rows, for stores beyond memory or of more than 10^8 rows: `Loader(shuffle=)`.

    Blocks come in random order, and the rows of 128 blocks at a time are mixed. This needs memory for these rows only,
    and reads a disk in long runs. `memfeed.order.orders.BlockOrder` says how far it is from a uniform permutation.

    Args:
        rows: rows of a block; None takes as many as make 1 MiB, at most 1,024.
    """

    rows: int | None = None


Shuffle = bool | Blocks


def default_block_rows(row_bytes: int) -> int:
    """Return how many rows make a block of 1 MiB, at most 1,024."""
    return max(1, min(BLOCK_ROWS, BLOCK_BYTES // max(row_bytes, 1)))


def mixed_rows(shuffle: Shuffle, n: int, block_rows: int, chunk_rows: int) -> int:
    """Return among how many of ``n`` rows an order mixes, 0 if it leaves them in order.

    Blocks that are smaller than the ``chunk_rows`` that are fetched together leave the rest of each chunk for later.
    """
    if isinstance(shuffle, Blocks) and block_rows >= chunk_rows:
        return min(n, WINDOW_BLOCKS * block_rows)
    return n if shuffle else 0


def orders_of(n: int, shuffle: Shuffle, seed: int, block_rows: int, cut: RankCut | None = None) -> EpochOrders:
    """Return the orders of ``n`` rows, by epoch, cut into pieces if need be: those of one piece are not cut."""
    in_blocks = isinstance(shuffle, Blocks)
    if cut is None or cut.pieces == 1:
        if in_blocks:
            return EpochOrders(lambda epoch: BlockOrder(n, seed, epoch, block_rows), None)
        return EpochOrders(partial(Shuffled, n, seed), n) if shuffle else EpochOrders(lambda epoch: Sequential(n), None)

    def make(epoch: int) -> Order:
        return RankPieces(n, seed, epoch, shuffle=bool(shuffle), in_blocks=in_blocks, block_rows=block_rows, cut=cut)

    return EpochOrders(make, None)


def mixed_orders(
    sizes: Sequence[int], counts: Sequence[int], shuffle: Shuffle, seed: int, block_rows: int
) -> EpochOrders:
    """Return the orders that mix sources of ``sizes`` rows: ``counts[i]`` rows of source i in each epoch."""
    passes = [orders_of(n, shuffle, derive("source", seed, i), block_rows) for i, n in enumerate(sizes)]

    def make(epoch: int) -> Order:
        return Mixed(sizes, counts, epoch, passes, derive("mixture", seed, epoch) if shuffle else None)

    return EpochOrders(make, None)
