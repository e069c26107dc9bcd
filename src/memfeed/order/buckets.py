"""Batches of rows of like length, drawn from an epoch's order: a pure function of (lengths, order, key)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memfeed.order.orders import Rows
from memfeed.random import derive

WINDOW_BATCHES = 128  # batches, about, whose rows are sorted by length together

Lengths = npt.NDArray[np.int64]


class LengthBatches:
    """The batches of one epoch.

    The rows of the epoch's order are taken in windows. The rows of a window are sorted by length, longest first, and
    cut into batches; then the batches of the window are shuffled. So every row is in one batch, and a window is a
    random part of the rows if the order is.

    Args:
        rows: the epoch's order, int [n].
        lengths: the length of each row at its position in the order, int64 [n].
        window: rows of a window.
        batch_size: rows of a batch; the last window may have a smaller one, unless ``drop_last``. None cuts by
            ``batch_tokens``.
        batch_tokens: a batch has as many rows as fit: their number times the longest length (at least 1) is at most
            this. No length may be larger.
        count: with ``batch_tokens``, the number of batches, at least that of one window of all rows and at most n. If
            there are fewer, the batches of the most rows are halved; if there are more, the window is doubled. None
            leaves them as they are.
        key: the key of the random order of the batches of a window; None keeps them as they were cut.
    """

    def __init__(
        self,
        rows: Rows,
        lengths: Lengths,
        window: int,
        *,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        drop_last: bool = False,
        count: int | None = None,
        key: int | None = None,
    ) -> None:
        self._rows = rows
        while True:
            self._places = _sorted_in_windows(lengths, window)
            if batch_tokens is None:
                edges = np.arange(0, len(rows) + 1, batch_size)
                if not drop_last and edges[-1] < len(rows):
                    edges = np.append(edges, len(rows))
            else:
                edges = _cut(lengths[self._places], window, batch_tokens)
            if count is None or len(edges) - 1 <= count:
                break
            window *= 2  # of all partitions into batches, that of one window has the fewest
        if count is not None:
            edges = _halved(edges, count)
        self._begins, self._ends = edges[:-1], edges[1:]
        if key is not None:
            drawn = np.random.Generator(np.random.PCG64(derive("buckets", key))).random(self.n)
            shuffled = np.lexsort((drawn, self._begins // window))
            self._begins, self._ends = self._begins[shuffled], self._ends[shuffled]

    @property
    def n(self) -> int:
        """The number of batches."""
        return len(self._begins)

    def __getitem__(self, batch: int) -> tuple[Rows, Lengths]:
        """Return the rows of a batch, and their positions in the epoch's order, int [k]."""
        places = self._places[int(self._begins[batch]) : int(self._ends[batch])]
        return self._rows[places], places


def enough_batches(count: int, n: int, window: int) -> int:
    """Return a number of batches that hardly any epoch exceeds, if one epoch of ``n`` rows has ``count``.

    Windows are alike, so the sum of their batches varies with the square root of their number.
    """
    return min(count + 2 * math.isqrt(max(-(-n // window) - 1, 0)) + 2, n)


def _sorted_in_windows(lengths: Lengths, window: int) -> Lengths:
    """Return the positions 0 to n, each window sorted by length, longest first; equal ones keep their order."""
    places = np.empty(len(lengths), np.int64)
    for first in range(0, len(lengths), window):
        places[first : first + window] = np.argsort(-lengths[first : first + window], kind="stable") + first
    return places


def _cut(lengths: Lengths, window: int, batch_tokens: int) -> Lengths:
    """Return where batches begin, and the end, for rows sorted by length in each window."""
    edges: list[int] = []
    for first in range(0, len(lengths), window):
        of_window: Sequence[int] = lengths[first : first + window].tolist()
        at = 0
        while at < len(of_window):
            edges.append(first + at)
            at += batch_tokens // max(of_window[at], 1)
    return np.array([*edges, len(lengths)], np.int64)


def _halved(edges: Lengths, count: int) -> Lengths:
    """Return edges of ``count`` batches: those of the most rows are cut into halves, again and again if need be."""
    while (missing := count - (len(edges) - 1)) > 0:
        sizes = np.diff(edges)
        chosen = np.argsort(-sizes, kind="stable")[:missing]
        chosen = chosen[sizes[chosen] > 1]
        edges = np.sort(np.concatenate([edges, edges[chosen] + sizes[chosen] // 2]))
    return edges
