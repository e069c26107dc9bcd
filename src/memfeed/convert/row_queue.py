"""Choose the rows to read next while a store is filled: first those that loaders want, in order, then the rest."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memfeed.building.partial import ABSENT, SKIPPED
from memfeed.schema.codec import Int64Array
from memfeed.store.row_supply import FillProgress

LIST_SECONDS = 0.03  # of work in one list of rows that a worker is sent
MOST_ROWS_A_LIST = 64  # that a reader wants
MOST_IDLE_ROWS = 4096
LOST_SECONDS = 0.25  # after which rows that another process had are sent again, if they are still absent
FEWEST_LOOKED_AT = 256  # rows, to find one that is free
IDLE_SECONDS = 0.5  # between two looks for rows that nobody wants


class RowQueue:
    """The absent rows of a build, and which of them a worker of this process has. Not for several threads at a time.

    Args:
        presence: of every row, uint8 [n], mapped: other processes change it.
        seconds: that one sample takes, as far as known.
        list_seconds: of work in one list of rows.
        is_shared: other processes fill the same store, and each begins elsewhere with the rows that nobody wants.
        most_rows: of one list that nobody wants.
    """

    def __init__(
        self,
        presence: npt.NDArray[np.uint8],
        seconds: float,
        list_seconds: float = LIST_SECONDS,
        *,
        is_shared: bool = False,
        most_rows: int = MOST_IDLE_ROWS,
    ) -> None:
        self._list_seconds, self._is_shared, self._most_rows = list_seconds, is_shared, most_rows
        self.presence = np.asarray(presence)  # indexing a memmap itself takes ten times as long
        self.failed: dict[int, Any] = {}
        self._is_sent = np.zeros(len(presence), bool)  # to a worker of this process, or failed
        self._wanted: dict[object, deque[Int64Array]] = {}  # by reader; the one that waited last is the last
        self._idle: deque[Int64Array] = deque()  # that nobody wants
        self._idle_due = 0.0
        self._lost: deque[tuple[float, list[int]]] = deque()  # that another process has, and when to try again
        self._read_count, self._read_seconds = 1, seconds

    # --- how full the store is

    def progress(self) -> FillProgress:
        """Return how many rows are there, of how many."""
        counts = np.bincount(self.presence, minlength=SKIPPED + 1)
        total = len(self.presence)
        return FillProgress(total - int(counts[ABSENT] + counts[SKIPPED]), total, int(counts[SKIPPED]))

    def is_complete(self) -> bool:
        """Return True if no row is absent."""
        return not (self.presence == ABSENT).any()

    def absent(self, rows: Int64Array) -> Int64Array:
        """Return the absent rows of ``rows``."""
        is_absent: npt.NDArray[np.bool_] = self.presence[rows] == ABSENT
        found: Int64Array = rows[is_absent]
        return found

    def a_present_row(self) -> int | None:
        """Return a row that can be read; None if there is none."""
        present = np.flatnonzero((self.presence != ABSENT) & (self.presence != SKIPPED))
        return int(present[0]) if len(present) else None

    # --- what readers want

    def want(self, reader: object, rows: Int64Array) -> None:
        """Add rows to those that a reader will wait for."""
        self._wanted.setdefault(reader, deque()).append(rows.astype(np.int64))

    def prioritise(self, reader: object, rows: Int64Array) -> None:
        """Put rows before all others."""
        wanted = self._wanted.pop(reader, None) or deque()
        wanted.appendleft(rows.astype(np.int64))
        self._wanted[reader] = wanted

    def forget(self, reader: object) -> None:
        """Remove what a reader wanted."""
        self._wanted.pop(reader, None)

    # --- what workers get, and give back

    def take(self, lists: int = 1) -> Sequence[int]:
        """Return rows for a worker, about ``list_seconds`` of work; none if there are none at present.

        The last rows that a reader wants, and the last of all, go into smaller lists, at least ``lists`` of them, so
        that no worker is left with much work while the others have none.
        """
        by_time = int(max(self._list_seconds * self._read_count / max(self._read_seconds, 1e-9), 1))
        for rows in reversed(self._wanted.values()):
            if len(found := self._take_from(rows, min(by_time, MOST_ROWS_A_LIST), lists)):
                return found
        if not self._idle and self.is_idle_due():
            self._idle_due = time.monotonic() + IDLE_SECONDS
            idle = np.flatnonzero((self.presence == ABSENT) & ~self._is_sent)
            first = random.Random(os.getpid()).randrange(len(idle) + 1) if self._is_shared else 0
            self._idle.extend(part for part in (idle[first:], idle[:first]) if len(part))
        return self._take_from(self._idle, min(by_time, self._most_rows), lists)

    def _take_from(self, rows: deque[Int64Array], most: int, lists: int) -> Sequence[int]:
        """Take up to ``most`` free rows from the first array that has any."""
        while rows:
            left = sum(map(len, itertools.islice(rows, most * lists)))
            size = max(min(most, left // lists), 1)
            looked_at = max(4 * size, FEWEST_LOOKED_AT)
            at = np.flatnonzero(self._is_free(rows[0][:looked_at]))[:size]
            if not len(at):
                rows[0] = rows[0][looked_at:]
                if not len(rows[0]):
                    rows.popleft()
                continue
            found = rows[0][at]
            rows[0] = rows[0][int(at[-1]) + 1 :]
            self._is_sent[found] = True
            first, last = int(found[0]), int(found[-1])
            is_run = last - first == len(found) - 1 and bool((np.diff(found) == 1).all())
            return range(first, last + 1) if is_run else found.tolist()
        return []

    def give_back(self, rows: Sequence[int], failed: Mapping[int, Any], seconds: float = 0.0) -> None:
        """Note that a worker is done with rows, in so many seconds, and the errors of those that failed."""
        self.failed.update(failed)
        done = np.asarray(rows, np.int64)
        lost = self.absent(done)
        self._is_sent[done] = False
        self._is_sent[lost] = True
        if self.failed:
            lost = lost[~np.isin(lost, list(self.failed))]
        if len(lost):
            self._lost.append((time.monotonic() + LOST_SECONDS, lost.tolist()))
        elif seconds:
            self._read_count += len(done)
            self._read_seconds += seconds

    def retry_lost(self) -> None:
        """Let rows be sent again that another process had, once it had the time to write them."""
        while self._lost and self._lost[0][0] <= time.monotonic():
            self._is_sent[[row for row in self._lost.popleft()[1] if row not in self.failed]] = False

    def take_back_all(self) -> None:
        """Note that no worker has any row."""
        self._idle.clear()
        self._idle_due = 0.0
        self._is_sent[:] = False
        self._is_sent[list(self.failed)] = True
        self._lost.clear()

    def is_idle_due(self) -> bool:
        """Return True if it is time to look for rows that nobody wants."""
        return time.monotonic() >= self._idle_due

    def _is_free(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        return np.asarray(self.presence[rows] == ABSENT) & ~self._is_sent[rows]
