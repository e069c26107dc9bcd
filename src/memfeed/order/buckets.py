"""Batches of rows of like length, drawn from an epoch's order: a pure function of (lengths, order, key)."""

from __future__ import annotations

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
        key: int | None = None,
    ) -> None:
        self._rows = rows
        self._places = np.empty(len(rows), np.int64)
        begins, ends = [], []
        for first in range(0, len(rows), window):
            of_window = lengths[first : first + window]
            sorted_places = np.argsort(-of_window, kind="stable")
            self._places[first : first + window] = sorted_places + first
            if batch_tokens is None:
                assert batch_size is not None
                cuts = list(range(0, len(of_window), batch_size))
                whole = len(of_window) // batch_size if drop_last else len(cuts)
            else:
                cuts, whole = _cut(of_window[sorted_places].tolist(), batch_tokens), len(of_window)
            edges = np.array([*cuts, len(of_window)], np.int64)[: whole + 1] + first
            chosen = np.arange(len(edges) - 1)
            if key is not None:
                np.random.Generator(np.random.PCG64(derive(key, first))).shuffle(chosen)
            begins.append(edges[:-1][chosen])
            ends.append(edges[1:][chosen])
        self._begins = np.concatenate([np.empty(0, np.int64), *begins])
        self._ends = np.concatenate([np.empty(0, np.int64), *ends])

    @property
    def n(self) -> int:
        """The number of batches."""
        return len(self._begins)

    def __getitem__(self, batch: int) -> tuple[Rows, Lengths]:
        """Return the rows of a batch, and their positions in the epoch's order, int [k]."""
        places = self._places[int(self._begins[batch]) : int(self._ends[batch])]
        return self._rows[places], places


def _cut(lengths: Sequence[int], batch_tokens: int) -> list[int]:
    """Return where each batch begins, for rows sorted by length, longest first."""
    cuts, at = [], 0
    while at < len(lengths):
        cuts.append(at)
        at += batch_tokens // max(lengths[at], 1)
    return cuts
