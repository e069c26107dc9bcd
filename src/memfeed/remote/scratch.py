"""Memory for the rows of a store whose cache has not room for all of it: the rows that are read now, and no others.

Each file is as long as in the store, in memory that takes no room before it is written. So the columns, and all that
gathers from them, are those of any store. A batch's rows are copied in from the cache, and forgotten afterwards.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from memfeed.errors import StoreError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field
from memfeed.store.column import Column
from memfeed.store.columns import FixedColumn
from memfeed.store.manifest import Manifest
from memfeed.store.mapping import _NORESERVE
from memfeed.store.ragged import column_files, fixed_file, ragged_files
from memfeed.store.ragged_columns import RaggedColumn
from memfeed.store.row_supply import ReadRequest

Piece = tuple[str, int, int]
"""A file and the bytes of it, from the first to the one after the last."""


class Scratch:
    """Memory for the files of a store, and who reads which bytes of it now."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._maps = {name: _reserved(size) for name, size in sizes.items() if size}
        self._bytes = {name: memoryview(mapped) for name, mapped in self._maps.items()}
        self._held: dict[ReadRequest, list[Piece]] = {}
        self._lock = threading.Lock()

    def tensor(self, name: str) -> torch.Tensor:
        """Return the memory of a file, uint8 [size]."""
        if name not in self._maps:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self._maps[name], dtype=torch.uint8)

    def part(self, piece: Piece) -> memoryview:
        """Return the memory of some bytes, to write them."""
        name, start, stop = piece
        return self._bytes[name][start:stop]

    def hold(self, reader: ReadRequest, pieces: list[Piece]) -> None:
        """Keep these bytes until the reader releases them."""
        with self._lock:
            self._held.setdefault(reader, []).extend(pieces)

    def release(self, reader: ReadRequest) -> None:
        """Give back the memory of the bytes that a reader held, and that no other one holds."""
        with self._lock:
            pieces = self._held.pop(reader, [])
            kept = [piece for held in self._held.values() for piece in held]
            for name in {piece[0] for piece in pieces}:
                pages = np.setdiff1d(_pages(name, pieces), _pages(name, kept))
                for first, last in _runs(pages):
                    size = min(last * mmap.PAGESIZE, len(self._maps[name])) - first * mmap.PAGESIZE
                    self._maps[name].madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, size)


def scratch_files(manifest: Manifest) -> dict[str, int]:
    """Return the files whose rows are copied into such memory, with their sizes; start and dims stay in the cache."""
    names = [f"{field.stem}.memmap" if field.kind == "fixed" else heap_file(field) for field in manifest.schema]
    return {name: manifest.files[name] for name in names}


def heap_file(field: Field) -> str:
    """Return the name of the file that has the elements of a ragged column."""
    return next(name for name, size in column_files(field, 0).items() if size is None)


def scratch_columns(root: Path, manifest: Manifest, scratch: Scratch) -> list[Column]:
    """Return the columns of a store over such memory."""
    columns: list[Column] = []
    for field in manifest.schema:
        if field.kind == "fixed":
            fixed = FixedColumn(field, fixed_file(root, field), manifest.rows)
            raw = scratch.tensor(f"{field.stem}.memmap")
            fixed.data = raw.view(field.torch_dtype).view(manifest.rows, *field.row_shape)
            columns.append(fixed)
        else:
            columns.append(_ragged(root, manifest, field, scratch))
    return columns


def _ragged(root: Path, manifest: Manifest, field: Field, scratch: Scratch) -> RaggedColumn:
    heap = heap_file(field)
    column = RaggedColumn(field, ragged_files(root, field), manifest.rows, manifest.files[heap])
    column.heap = scratch.tensor(heap)
    return column


def _reserved(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, OverflowError) as error:
        raise StoreError(
            f"found {size:,} bytes of a column, more than this process can reserve ({error}); expected room for "
            "addresses: raise its limit (ulimit -v), or give the cache room for the whole store"
        ) from None


def _pages(name: str, pieces: list[Piece]) -> Int64Array:
    places = np.array([(start, stop) for one, start, stop in pieces if one == name], np.int64).reshape(-1, 2)
    first, last = places[:, 0] // mmap.PAGESIZE, -(-places[:, 1] // mmap.PAGESIZE)
    count = last - first
    before = np.cumsum(count) - count
    return np.unique(np.repeat(first - before, count) + np.arange(int(count.sum())))


def _runs(pages: Int64Array) -> Iterator[tuple[int, int]]:
    if len(pages):
        cuts = np.flatnonzero(np.diff(pages) != 1) + 1
        firsts, lasts = pages[np.append(0, cuts)], pages[np.append(cuts - 1, len(pages) - 1)] + 1
        yield from zip(firsts.tolist(), lasts.tolist(), strict=True)
