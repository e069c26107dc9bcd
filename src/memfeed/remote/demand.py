"""Choose the next chunk to fetch: one that readers wait for, else one of the rows that they asked for, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memfeed.remote.ranges import MOST_CHUNKS, ByteRange, ChunkTable, first_uses
from memfeed.schema.codec import Int64Array
from memfeed.store.row_supply import ReadRequest

LOOKED_AT = 4096  # chunks ahead, at most: 16 GiB
SOON = 128  # chunks ahead, whose requests are not made longer than needed: 512 MiB


class RowChunks(NamedTuple):
    """The chunks of some rows: ``is_known`` is False while where their bytes lie has to be fetched first."""

    chunks: Int64Array
    is_known: bool


class _AskedRows:
    """Rows that a reader will wait for."""

    def __init__(self, rows: Int64Array) -> None:
        self.rows = rows
        self.found: RowChunks | None = None


class Demand:
    """The rows that readers have asked for. The caller must hold a lock during each call.

    Memory and time grow with the rows asked for and the chunks ahead, not with the store.

    Args:
        table: the chunks of the store.
        chunks_of: the chunks of rows (int64 [k]) that a reader reads.
        is_absent: which of some chunks (int64 [k]) are not there, bool [k].
        ahead: how many different chunks ahead of the readers may be fetched; None for as many as are asked for.
    """

    def __init__(
        self,
        table: ChunkTable,
        chunks_of: Callable[[ReadRequest, Int64Array], RowChunks],
        is_absent: Callable[[Int64Array], npt.NDArray[np.bool_]],
        ahead: int | None,
    ) -> None:
        self._table, self._chunks_of, self._is_absent = table, chunks_of, is_absent
        self._ahead = LOOKED_AT if ahead is None else ahead
        self._asked: dict[ReadRequest, deque[_AskedRows]] = {}  # by reader; the one that waited last is the last
        self._urgent: dict[int, None] = {}  # in order
        self._todo: deque[int] = deque()
        self._wanted: set[int] = set()  # urgent, or in _todo
        self._taken: set[int] = set()  # fetched now
        self._known = self._places = np.empty(0, np.int64)  # the chunks ahead, sorted; their places
        self._is_stale, self._is_full = True, False

    # --- what readers ask for

    def add(self, reader: ReadRequest, rows: Int64Array) -> None:
        """Note rows that a reader will wait for after those it asked for before."""
        self._asked.setdefault(reader, deque()).append(_AskedRows(rows))
        if not self._todo:
            self._is_stale = True

    def waits(self, reader: ReadRequest, rows: Int64Array) -> None:
        """Note that a reader waits for these rows: what it asked for before them is of no use any more."""
        asked = self._asked.get(reader)
        if asked is not None:
            if asked and asked[0].rows is rows:
                asked.popleft()
            self._asked[reader] = self._asked.pop(reader)
        self._is_stale, self._is_full = True, False

    def forget(self, reader: ReadRequest) -> None:
        """Forget what a reader asked for."""
        if self._asked.pop(reader, None) is not None:
            self._is_stale, self._is_full = True, False

    def prioritise(self, chunks: Int64Array) -> None:
        """Put chunks before all others."""
        self._urgent.update(dict.fromkeys(chunks.tolist()))
        self._wanted.update(chunks.tolist())

    def is_urgent(self, chunk: int) -> bool:
        """Return True if somebody waits for a chunk now."""
        return chunk in self._urgent

    @property
    def urgent_count(self) -> int:
        """How many chunks somebody waits for now."""
        return len(self._urgent)

    def calm(self, chunk: int) -> None:
        """Note that nobody waits for a chunk any more: it came, or failed."""
        self._urgent.pop(chunk, None)

    # --- what is fetched

    def take(self, in_flight: int, most_chunks: int = MOST_CHUNKS) -> ByteRange | None:
        """Return the chunks to fetch next, by one request, at most so many; None if there are none.

        With ``in_flight`` requests at once, few chunks that are needed soon are not joined, so that each request has
        some. Those that are needed later are joined as far as can be: a store serves so many requests a second.
        ``put_back`` ends a request.
        """
        chunk = self._next()
        if chunk is None:
            return None
        free = len(self._wanted) - len(self._wanted & self._taken)
        is_soon = self.ranks(np.array([chunk]))[0] < SOON
        most = min(most_chunks, max(1, free // in_flight)) if is_soon else most_chunks
        found = self._table.joined(chunk, lambda one: one in self._wanted and one not in self._taken, most)
        absent = self._is_absent(np.arange(found.chunk, found.chunk + found.size))
        if not absent.all():  # of a neighbour, another process may have it
            found = self._table.at(chunk)
        self._taken.update(range(found.chunk, found.chunk + found.size))
        return found

    def put_off(self, fetched: ByteRange) -> None:
        """Note that there is no room for a range now. It is looked for again when readers have gone on."""
        part = range(fetched.chunk, fetched.chunk + fetched.size)
        self._taken.difference_update(part)
        self._wanted.difference_update(part)
        self._is_full = True

    @property
    def is_full(self) -> bool:
        """True if the cache has no room for the next chunk, and no reader waits for one."""
        return self._is_full and not self._urgent

    def put_back(self, fetched: ByteRange) -> None:
        """Note that a range is not fetched any more."""
        part = range(fetched.chunk, fetched.chunk + fetched.size)
        self._taken.difference_update(part)
        self._wanted.difference_update(part)
        self._is_stale = True

    def _next(self) -> int | None:
        for chunk in list(self._urgent):
            if not self._is_absent(np.array([chunk]))[0]:
                del self._urgent[chunk]
            elif chunk not in self._taken:
                self._wanted.add(chunk)
                return chunk
        for _ in range(2):
            while self._todo:
                chunk = self._todo.popleft()
                if chunk in self._wanted and chunk not in self._taken and self._is_absent(np.array([chunk]))[0]:
                    return chunk
            if not self._is_stale:
                return None
            self._look_ahead()
        return None

    def _look_ahead(self) -> None:
        """Find the absent chunks of the rows that were asked for, up to ``ahead`` of them."""
        self._is_stale = False
        found, count = [np.empty(0, np.int64)], 0
        for chunks in self._in_order():
            found.append(chunks)
            count += len(chunks)
            if count > 2 * self._ahead:
                found, count = [first_uses(np.concatenate(found))], 0
                if len(found[0]) >= self._ahead:
                    break
        order = first_uses(np.concatenate(found))[: self._ahead]
        self._places = np.argsort(order)
        self._known = order[self._places]
        self._todo = deque(chunk for chunk in order[self._is_absent(order)].tolist() if chunk not in self._taken)
        self._wanted = {*self._todo, *self._urgent}

    def _in_order(self) -> Iterator[Int64Array]:
        for reader, asked in reversed(list(self._asked.items())):
            for one in asked:
                if one.found is None or not one.found.is_known:
                    one.found = self._chunks_of(reader, one.rows)
                yield one.found.chunks

    def ranks(self, chunks: Int64Array) -> npt.NDArray[np.float64]:
        """Return when each of ``chunks`` is needed, as an ordinal number; infinity for not soon."""
        at = np.searchsorted(self._known, chunks)
        is_known = at < len(self._known)
        is_known[is_known] = self._known[at[is_known]] == chunks[is_known]
        found = np.full(len(chunks), np.inf)
        found[is_known] = self._places[at[is_known]]
        found[np.isin(chunks, list(self._urgent))] = -1.0
        return found
