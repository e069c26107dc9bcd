"""Rows that are fetched by their own bytes, of a cache that is smaller than its store: their chunk has no room in it.

With rows in an order of all rows, each batch needs most chunks of the store, and few rows of each. To fetch a chunk
again for a row would bring a hundred times its bytes. So rows are asked for alone, for the next batches at once, into
memory; they are compared with the hashes that were noted when their chunk came for the first time (`pieces`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future
from functools import partial

import numpy as np
import numpy.typing as npt

from memfeed.errors import StoreError
from memfeed.remote.directory import CacheDirectory
from memfeed.remote.fetching import Fetching, Reading
from memfeed.store.row_supply import ReadRequest

_MOST_REQUESTS, _MOST_BYTES = 256, 64 << 20  # under way, or in memory, ahead of one reader
Part = tuple[int, int, int]
"""A chunk, the first byte in its file and the one after the last."""


class _AskedBatches:
    """What was asked for ahead of a reader: batches in order, and the requests for their parts."""

    def __init__(self) -> None:
        self.batches: list[npt.NDArray[np.integer]] = []
        self.parts: dict[Part, Future[memoryview]] = {}
        self.nbytes = 0


class SingleRows:
    """Fetches parts of chunks whose pieces are known, each by one request."""

    batches_ahead = 32

    def __init__(self, directory: CacheDirectory, objects: Reading, fetching: Fetching) -> None:
        self._directory, self._objects, self._fetching = directory, objects, fetching
        self._asked: dict[ReadRequest, _AskedBatches] = {}
        self._lock = threading.Lock()

    def forget(self, reader: ReadRequest) -> None:
        """Forget what was asked for ahead of a reader."""
        with self._lock:
            asked = self._asked.pop(reader, None)
        for part in asked.parts.values() if asked is not None else ():
            part.cancel()

    def not_asked(
        self, reader: ReadRequest, coming: Iterable[npt.NDArray[np.integer]]
    ) -> Iterator[npt.NDArray[np.integer]]:
        """Yield those of the batches that a reader will wait for that were not asked for yet, while there is room."""
        asked = self._asked.setdefault(reader, _AskedBatches())
        coming = list(coming)
        known = {id(rows) for rows in asked.batches}
        asked.batches = [rows for rows in coming if id(rows) in known]
        for rows in coming:
            if len(asked.parts) >= _MOST_REQUESTS or asked.nbytes >= _MOST_BYTES:
                return
            if id(rows) not in known:
                yield rows

    def ask(self, reader: ReadRequest, rows: npt.NDArray[np.integer], parts: list[Part]) -> None:
        """Ask for the parts of a batch that the cache has not, unless a whole chunk has to come first."""
        asked = self._asked[reader]
        asked.batches.append(rows)
        new = [part for part in parts if part not in asked.parts and self._is_single(part[0])]
        asked.parts.update(zip(new, self._submit(new), strict=True))
        asked.nbytes += sum(stop - start for _, start, stop in new)

    def fill(self, reader: ReadRequest, left: dict[int, list[tuple[int, memoryview]]]) -> None:
        """Fill memory with the bytes of files from their places on, and remove what was filled from ``left``."""
        asked = self._asked.setdefault(reader, _AskedBatches())
        outs = {
            (chunk, start, start + len(out)): out
            for chunk in [chunk for chunk in left if self._is_single(chunk)]
            for start, out in left.pop(chunk)
        }
        futures = {part: asked.parts.pop(part) for part in outs if part in asked.parts}
        asked.nbytes -= sum(stop - start for _, start, stop in futures)
        new = [part for part in outs if part not in futures]
        futures.update(zip(new, self._submit(new), strict=True))
        for part, out in outs.items():
            out[:] = self._result(futures[part])

    def _result(self, future: Future[memoryview]) -> memoryview:
        try:
            return future.result()
        except CancelledError:
            address = self._directory.settings.address
            raise StoreError(f"{address}: found that fetching was stopped; open it again") from None

    def _is_single(self, chunk: int) -> bool:
        pieces = self._directory.pieces
        return pieces is not None and pieces.are_known(chunk) and not self._directory.is_written(chunk)

    def _submit(self, parts: list[Part]) -> list[Future[memoryview]]:
        return self._fetching.submit([partial(self._read, part) for part in parts]) if parts else []

    def _read(self, part: Part) -> memoryview:
        chunk, start, stop = part
        pieces, place = self._directory.pieces, self._directory.table.at(chunk)
        assert pieces is not None
        first, last = pieces.around(place, start, stop)
        data = self._objects.read(
            place.name, first, last - first, accept=lambda found: pieces.are_right(place, first, found)
        )
        return data[start - first : stop - first]
