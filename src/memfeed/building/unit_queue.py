"""Choose the units to bring next: first those that readers wait for, then those that they asked for, then the rest."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memfeed.schema.codec import Int64Array
from memfeed.store.row_supply import ReadRequest

LOOKED_AT = 256  # units, to find one that is free
MOST_AHEAD = 4096  # units ahead that are looked for at once: of chunks, 16 GiB
SOON = 128  # units ahead, whose runs are not made longer than needed: of chunks, 512 MiB
REST_SECONDS = 0.5  # between two looks for units that nobody asked for
NONE = np.empty(0, np.int64)


class RowUnits(NamedTuple):
    """The units of some rows: ``is_known`` is False while units that say where the bytes lie have to come first."""

    units: Int64Array
    is_known: bool


class _Asked:
    """Rows that a reader will wait for."""

    def __init__(self, rows: Int64Array) -> None:
        self.rows = rows
        self.found: RowUnits | None = None


class UnitQueue:
    """The units that readers want, and those that are brought now. The caller must hold a lock during each call.

    Time grows with the rows asked for, not with the store; memory has a byte for each unit, as their map has.

    Args:
        count: how many units there are.
        are_absent: which of some units (int64 [k], or a slice) are not there, bool [k].
        units_of: the units of rows (int64 [k]) that a reader reads. If not given, units are rows.
        ahead: how many different units ahead of the readers may be brought; None for as many as are asked for.
        span_of: the first unit and the one after the last that can be brought together with one, as one run. If not
            given, any units can be, in any order.
        is_shared: each process begins elsewhere with the units that nobody asked for.
    """

    def __init__(
        self,
        count: int,
        are_absent: Callable[[Int64Array | slice], npt.NDArray[np.bool_]],
        *,
        units_of: Callable[[ReadRequest, Int64Array], RowUnits] | None = None,
        ahead: int | None = None,
        span_of: Callable[[int], tuple[int, int]] | None = None,
        is_shared: bool = False,
    ) -> None:
        self.are_absent, self._units_of, self._span_of, self._is_shared = are_absent, units_of, span_of, is_shared
        self.count = count
        self._ahead = MOST_AHEAD if ahead is None else ahead
        self._is_taken = np.zeros(count, bool)  # brought now, or soon again, or failed
        self.failed: dict[int, Any] = {}
        self.returned = deque[tuple[float, Int64Array]]()  # taken, but not brought: when to try again
        self._asked: dict[ReadRequest, deque[_Asked]] = {}  # by reader; the one that waited last is the last
        self._is_urgent = np.zeros(count, bool)  # the units of `urgent`
        self.urgent = self._line = self._rest = NONE  # in order: waited for, asked for, others
        self._rest_due = 0.0
        self._known = self._places = NONE  # the units ahead, sorted; their places
        self._is_stale = self._is_full = self._has_unknown = self._is_cut = False

    # --- what readers ask for

    def want(self, reader: ReadRequest, rows: Int64Array) -> None:
        """Note rows that a reader will wait for, after those it asked for before."""
        if reader not in self._asked:
            self._line = NONE  # its rows come first from now on
        self._asked.setdefault(reader, deque()).append(_Asked(rows))
        self._is_stale = True

    def wait(self, reader: ReadRequest, rows: Int64Array) -> None:
        """Note that a reader waits for these rows: what it asked for before them is of no use any more."""
        if (asked := self._asked.get(reader)) is not None:
            if self._is_full or next(reversed(self._asked)) is not reader:
                self._line = NONE
            if asked and asked[0].rows is rows:
                asked.popleft()
            self._asked[reader] = self._asked.pop(reader)
        self._is_stale, self._is_full = True, False

    def forget(self, reader: ReadRequest) -> None:
        """Forget what a reader asked for."""
        if self._asked.pop(reader, None) is not None:
            self._line, self._is_stale, self._is_full = NONE, True, False

    def prioritise(self, units: Int64Array) -> bool:
        """Put units before all others. Return False if all of them were so already."""
        new = units[~self._is_urgent[units]]
        if not len(new):
            return False
        self._is_urgent[new] = True
        self.urgent = np.concatenate([self.urgent, new])
        return True

    def retry(self, units: Int64Array) -> None:
        """Let units be brought again that failed."""
        for unit in units.tolist():
            if self.failed.pop(unit, None) is not None:
                self._is_taken[unit] = False

    # --- what is brought

    def next_units(self, now: float, most: int, parts: int = 1, most_rest: int = 0) -> Int64Array:
        """Return the units to bring next, in order; none if there are none at present. `give_back` ends that.

        The last ones go into small parts, at least ``parts`` of them, so that no worker is left with much work while
        the others have none.

        Args:
            now: the time in seconds.
            most: units that readers wait or asked for.
            most_rest: units that nobody asked for.
        """
        self._take_back(now)
        are_absent = self.are_absent(self.urgent)
        self._is_urgent[self.urgent[~are_absent]] = False
        self.urgent = self.urgent[are_absent]
        found, _ = self._take(self.urgent, most, parts)
        if not len(found) and not self._is_full:
            found, self._line = self._take(self._line, most, 1 if self._is_cut else parts)
            if not len(found) and self._is_stale:
                self._look_ahead()
                found, self._line = self._take(self._line, most, 1 if self._is_cut else parts)
        if not len(found) and most_rest:
            if not len(self._rest) and self.is_rest_due(now):
                self._rest_due = now + REST_SECONDS
                rest = np.flatnonzero(self.are_absent(slice(None)) & ~self._is_taken)
                first = random.Random(os.getpid()).randrange(len(rest) + 1) if self._is_shared else 0
                self._rest = np.roll(rest, -first)
            found, self._rest = self._take(self._rest, most_rest, parts)
        self._is_taken[found] = True
        return found

    def _take(self, line: Int64Array, most: int, parts: int) -> tuple[Int64Array, Int64Array]:
        """Return up to ``most`` free units from the begin of a line, and what is left of the line."""
        size = min(most, max(len(line) // parts, 1))
        while len(line):
            looked_at = max(4 * size, LOOKED_AT)
            at = np.flatnonzero(self._are_free(line[:looked_at]))
            if not len(at):
                line = line[looked_at:]
            elif self._span_of is None:
                return line[at[:size]], line[int(at[:size][-1]) + 1 :]
            else:
                left = line[int(at[0]) + 1 :]
                return self._joined(int(line[at[0]]), most, max((len(left) + 1) // parts, 1)), left
        return NONE, NONE

    def _joined(self, unit: int, most: int, share: int) -> Int64Array:
        """Return a run of units around ``unit`` that are all wanted: those after it first, then those before it.

        Units that are needed later are joined as far as can be, also if they are few.
        """
        assert self._span_of is not None
        is_soon = self.ranks(np.array([unit]))[0] < SOON
        size = 1 if self._is_full else min(most, share) if is_soon else most
        begin, end = self._span_of(unit)
        around = np.arange(max(begin, unit - size + 1), min(end, unit + size))
        free = self._are_free(around) & np.isfinite(self.ranks(around))
        at = unit - int(around[0])
        after = int(np.argmin(np.append(free[at:], False)))
        before = int(np.argmin(np.append(free[:at][::-1], False)))
        first = unit - min(before, size - after)
        return np.arange(first, min(first + size, unit + after))

    def _are_free(self, units: Int64Array) -> npt.NDArray[np.bool_]:
        return self.are_absent(units) & ~self._is_taken[units]

    def give_back(self, units: Int64Array, due: float, failed: Mapping[int, Any] | None = None) -> None:
        """Note that units are not brought any more, and the errors of those that failed.

        Those that are absent, because another process has them, are brought again from ``due`` on, in seconds. Those
        that failed stay so until `retry`.
        """
        self.failed.update(failed or {})
        is_absent = self.are_absent(units)
        self._is_taken[units[~is_absent]] = False
        lost = units[is_absent]
        if self.failed and len(lost):
            has_failed = np.isin(lost, list(self.failed))
            self._is_urgent[lost[has_failed]] = False
            self.urgent = self.urgent[self._is_urgent[self.urgent]]
            lost = lost[~has_failed]
        if len(lost):
            self.returned.append((due, lost))
        self._is_stale |= self._has_unknown

    def put_off(self, units: Int64Array) -> None:
        """Note that there is no room for units now. They are looked for again when readers have gone on."""
        self._is_taken[units] = False
        self._is_full = True

    def _take_back(self, now: float) -> None:
        for due, units in [self.returned.popleft() for _ in range(len(self.returned))]:
            if due > now:
                self.returned.append((due, units))
            else:
                self._is_taken[units] = False
                self._is_stale = True

    def take_back_all(self) -> None:
        """Note that no unit is brought now."""
        self._is_taken[:] = False
        self._is_taken[list(self.failed)] = True
        self.returned.clear()
        self._rest, self._rest_due, self._is_stale = NONE, 0.0, True

    def is_rest_due(self, now: float) -> bool:
        """Return True if it is time to look for units that nobody asked for."""
        return now >= self._rest_due

    # --- the units ahead

    def _look_ahead(self) -> None:
        """Find the absent units of the rows that were asked for, up to ``ahead`` of them."""
        self._is_stale = self._has_unknown = self._is_cut = False
        found, count = [NONE], 0
        for units in self._in_order():
            found.append(units)
            count += len(units)
            if count > 2 * self._ahead:
                found = [self._distinct(found)]
                count = len(found[0])
                if count >= self._ahead:
                    self._is_cut = self._is_stale = self._units_of is None  # the next look finds those after them
                    break
        order = self._distinct(found)
        if self._units_of is not None:
            order = order[: self._ahead]
            self._places = np.argsort(order)
            self._known = order[self._places]
        self._line = order[self._are_free(order)]

    def _distinct(self, found: list[Int64Array]) -> Int64Array:
        units = np.concatenate(found)
        return first_uses(units if self._units_of is not None else units[self._are_free(units)])

    def _in_order(self) -> Iterator[Int64Array]:
        for reader, asked in reversed(list(self._asked.items())):
            for one in asked:
                if one.found is None or not one.found.is_known:
                    rows = one.rows.astype(np.int64, copy=False)
                    one.found = RowUnits(rows, True) if self._units_of is None else self._units_of(reader, rows)
                    self._has_unknown |= not one.found.is_known
                yield one.found.units

    def ranks(self, units: Int64Array) -> npt.NDArray[np.float64]:
        """Return when each of ``units`` is needed, as an ordinal number; infinity for not soon."""
        at = np.searchsorted(self._known, units)
        is_known = at < len(self._known)
        is_known[is_known] = self._known[at[is_known]] == units[is_known]
        found = np.full(len(units), np.inf)
        found[is_known] = self._places[at[is_known]]
        found[self._is_urgent[units]] = -1.0
        return found


def first_uses(numbers: Int64Array) -> Int64Array:
    """Return each of ``numbers`` once, in the order of their first use."""
    _, at = np.unique(numbers, return_index=True)
    found: Int64Array = numbers[np.sort(at)]
    return found
