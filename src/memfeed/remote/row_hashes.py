"""Checksums of single rows, for a cache that is smaller than its store: of rows whose chunk has no room in it.

The checksums at an address are those of whole chunks. So when a chunk comes for the first time, the pieces of it are
hashed, and from then on a piece can be fetched alone, and compared. A piece is a row, or rows of 4 KiB together; 16 KiB
in a file whose chunks do not hold whole rows. The hashes are in the cache directory, for all processes that share it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from memfeed.remote.ranges import ByteRange, ChunkTable
from memfeed.store.manifest import Manifest
from memfeed.system import files

_PIECE_BYTES, _LEAST_BYTES = 16 << 10, 4 << 10
_MOST_SHARE = 0.03  # of the size of a cache, that these hashes may take


class RowHashes:
    """The hashes of pieces, in files of a cache directory; ``nbytes`` is what these take at most."""

    def __init__(self, work: Path, table: ChunkTable, sizes: dict[str, int]) -> None:
        self._table, self._sizes = table, sizes
        self._begins, total = dict[str, int](), 0
        for name, size in sizes.items():
            first, last = table.of_file(name)
            self._begins[name] = total
            total += (last - first) * self._in_chunk(name, size)
        self.nbytes = 8 * total + table.count
        self._hashes = _map(work / "pieces", total, "<u8")
        self._hashed = _map(work / "hashed", table.count, "u1")

    def _in_chunk(self, name: str, size: int) -> int:
        return -(-self._table.steps[name] // size)

    def are_known(self, chunk: int) -> bool:
        """Return True if the pieces of a chunk have been hashed."""
        return bool(self._hashed[chunk])

    def learn(self, place: ByteRange, data: memoryview) -> None:
        """Note the hashes of the pieces of one chunk, whose bytes were compared with its checksum."""
        if not self._hashed[place.chunk]:
            size, first = self._sizes[place.name], self._first(place)
            hashes = [xxhash.xxh3_64_intdigest(data[at : at + size]) for at in range(0, len(data), size)]
            self._hashes[first : first + len(hashes)] = hashes
            self._hashed[place.chunk] = 1

    def forget(self) -> None:
        """Forget all hashes: a power loss may have damaged them."""
        self._hashed[:] = 0

    def around(self, place: ByteRange, start: int, stop: int) -> tuple[int, int]:
        """Return the bytes of the pieces that hold bytes ``start`` to ``stop`` of a file, all in the chunk."""
        size = self._sizes[place.name]
        first = place.start + (start - place.start) // size * size
        return first, min(place.stop, place.start - (place.start - stop) // size * size)

    def are_right(self, place: ByteRange, start: int, data: memoryview) -> bool:
        """Return True if ``data`` are the bytes of whole pieces from byte ``start`` of a file, all in the chunk."""
        size = self._sizes[place.name]
        first = self._first(place) + (start - place.start) // size
        found = [xxhash.xxh3_64_intdigest(data[at : at + size]) for at in range(0, len(data), size)]
        return bool((self._hashes[first : first + len(found)] == np.array(found, np.uint64)).all())

    def _first(self, place: ByteRange) -> int:
        begin, size = self._table.of_file(place.name)[0], self._sizes[place.name]
        return self._begins[place.name] + (place.chunk - begin) * self._in_chunk(place.name, size)


def open_pieces(work: Path, table: ChunkTable, manifest: Manifest, most: int) -> RowHashes | None:
    """Return the hashes for a cache of ``most`` bytes; None where they would take too much of it."""
    sizes = dict.fromkeys(manifest.files, _PIECE_BYTES)
    for field in manifest.schema:
        name = f"{field.stem}.memmap"
        if field.kind == "fixed" and field.row_bytes and table.steps[name] % field.row_bytes == 0:
            sizes[name] = field.row_bytes * -(-_LEAST_BYTES // field.row_bytes)
    expected = sum(8 * -(-size // sizes[name]) for name, size in manifest.files.items())
    return RowHashes(work, table, sizes) if expected <= _MOST_SHARE * most else None


def _map(path: Path, count: int, dtype: str) -> npt.NDArray[np.uint64]:
    size = count * np.dtype(dtype).itemsize
    with files.opened(path, os.O_CREAT) as fd:
        has_size = os.fstat(fd).st_size == size
    if not has_size:
        files.truncate(path, size)
    return np.memmap(path, dtype, "r+", shape=(count,)) if count else np.zeros(0, dtype)
