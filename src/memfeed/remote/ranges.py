"""Compute the chunks that rows lie in, and the chunks that are fetched by one request. Numbers only.

A chunk is the bytes of one checksum: 4 MiB of one file, or about as many in whole rows. Chunks are numbered through all
files of a store, in the order of its manifest. Nothing here grows with their number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from memfeed.building.unit_queue import first_uses
from memfeed.schema.codec import Int64Array
from memfeed.store.manifest import CHUNK_BYTES, Manifest
from memfeed.system.files import BLOCK_BYTES

MOST_CHUNKS = 4  # of one request: 16 MiB


class ByteRange(NamedTuple):
    """Bytes ``start`` to ``stop`` of a file of the store, in whole chunks: ``size`` of them from ``chunk``."""

    name: str
    start: int
    stop: int
    chunk: int
    size: int


def aligned_step(row_bytes: int) -> int:
    """Return the bytes of a chunk of rows of this size: whole rows, whole blocks of the disk, about 4 MiB.

    4 MiB where twice as many do not hold such rows.
    """
    unit = math.lcm(row_bytes, BLOCK_BYTES)
    return unit * max(1, CHUNK_BYTES // unit) if 0 < unit <= 2 * CHUNK_BYTES else CHUNK_BYTES


def aligned_steps(manifest: Manifest) -> dict[str, int]:
    """Return the bytes of a chunk of each file, where chunks hold whole rows of fixed columns."""
    steps = dict.fromkeys(manifest.files, CHUNK_BYTES)
    fixed = [field for field in manifest.schema if field.kind == "fixed"]
    return steps | {f"{field.stem}.memmap": aligned_step(field.row_bytes) for field in fixed}


class ChunkTable:
    """The chunks of files of these sizes in bytes; ``steps`` are the bytes of a chunk of each, 4 MiB if not given."""

    def __init__(self, sizes: Mapping[str, int], steps: Mapping[str, int] | None = None) -> None:
        self.sizes = dict(sizes)
        self.steps = dict.fromkeys(sizes, CHUNK_BYTES) if steps is None else dict(steps)
        counts = [-(-size // self.steps[name]) for name, size in sizes.items()]
        self._begins = np.cumsum([0, *counts])
        self._names = list(sizes)
        self._first = dict(zip(sizes, self._begins.tolist(), strict=False))
        self.count = int(self._begins[-1])
        self._sizes = np.array(list(sizes.values()), np.int64)
        self._steps = np.array([self.steps[name] for name in sizes], np.int64)

    def of_file(self, name: str) -> tuple[int, int]:
        """Return the first chunk of a file, and the chunk after its last."""
        first = self._first[name]
        return first, first - (-self.sizes[name] // self.steps[name])

    def at(self, chunk: int) -> ByteRange:
        """Return the bytes of one chunk."""
        return self.range_of(chunk, chunk + 1)

    def bytes_of(self, chunks: Int64Array) -> Int64Array:
        """Return the bytes of each of these chunks, int64 [k]: fewer for the last of a file."""
        which = np.searchsorted(self._begins, chunks, side="right") - 1
        steps = self._steps[which]
        left: Int64Array = self._sizes[which] - (chunks - self._begins[which]) * steps
        return np.minimum(left, steps)

    def range_of(self, first: int, last: int) -> ByteRange:
        """Return the bytes of chunks ``first`` to ``last`` of one file."""
        name = self._names[int(np.searchsorted(self._begins, first, side="right")) - 1]
        begin, step = self._first[name], self.steps[name]
        stop = min((last - begin) * step, self.sizes[name])
        return ByteRange(name, (first - begin) * step, stop, first, last - first)

    def of_places(self, name: str, starts: Int64Array, lengths: Int64Array) -> Int64Array:
        """Return the chunks that hold these bytes of a file, each once, in the order of their first use."""
        there, step = lengths > 0, self.steps[name]
        first = starts[there] // step
        count = (starts[there] + lengths[there] - 1) // step - first + 1
        before = np.cumsum(count) - count
        every = np.repeat(first - before, count) + np.arange(int(count.sum()))
        found: Int64Array = first_uses(every) + self._first[name]
        return found

    def span(self, chunk: int) -> tuple[int, int]:
        """Return the first chunk of the file of a chunk, and the one after the last: one request can read them."""
        return self.of_file(self.at(chunk).name)
