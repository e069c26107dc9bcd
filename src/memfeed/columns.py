"""The columns of a store, mapped on first use.

Every map is private to the process: an edit through a column never reaches the file, and a page once edited no longer
shows what others write, which is why only finished stores are mapped here.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from memfeed import files
from memfeed.errors import CorruptStoreError
from memfeed.schema import HEAP_OF_BYTES, Field

Ints = npt.NDArray[np.int64]
# before Python 3.13 every map keeps a descriptor of its own open, which none of ours needs
_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def map_file(path: Path, size: int) -> torch.Tensor:
    """The first ``size`` bytes of a file as a uint8 tensor [size] over a private, writable map.

    MAP_NORESERVE, because a private map larger than memory and swap is refused without it. The tensor keeps the map
    alive; nothing else has to be closed. Raises CorruptStoreError if the file has become shorter.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    fd = files.open_read(path)
    try:
        have = os.fstat(fd).st_size
        if have < size:  # touching a map beyond the file's end is a SIGBUS
            raise CorruptStoreError(f"{path}: found {have:,} bytes; expected {size:,}: the file was cut")
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        mapped = files.with_descriptors(
            lambda: mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE, **_UNTRACKED)
        )
    finally:
        os.close(fd)
    return torch.frombuffer(mapped, dtype=torch.uint8)


class FixedColumn:
    """A column whose rows all have one shape: ``data`` is [n, *shape], a view of the map.

    Where ``rows`` is None there are none to tell apart (a model's weights): ``data`` is the one tensor, [*shape].
    """

    def __init__(self, field: Field, path: Path, rows: int | None) -> None:
        self.field, self.path, self.rows = field, path, rows

    @cached_property
    def data(self) -> torch.Tensor:
        """The whole column, [n, *shape]."""
        shape = self.field.row_shape if self.rows is None else (self.rows, *self.field.row_shape)
        raw = map_file(self.path, math.prod(shape) * self.field.itemsize)
        return raw.view(self.field.torch_dtype).view(shape)


class InMemory(FixedColumn):
    """A column that is a tensor already, [n, *shape]."""

    def __init__(self, field: Field, data: torch.Tensor) -> None:
        super().__init__(field, Path(), len(data))
        self.data = data


class Ragged(Protocol):
    """A column whose rows differ in size."""

    field: Field

    def extents(self, ids: Ints) -> tuple[Ints, Ints, Ints]:
        """Where rows lie: start [k] and length [k] in bytes, dims [k, rank]; length is -1 where a row is None."""

    def copy(self, starts: Ints, lengths: Ints, out: npt.NDArray[np.uint8]) -> None:
        """Copies those bytes one behind the other into ``out``, which has exactly their size."""

    def view(self, start: int, length: int) -> torch.Tensor:
        """Those bytes as a uint8 tensor [length], without a copy where the column is mapped."""


class RaggedColumn:
    """Rows of different sizes in one heap: where each starts, its dims, and the heap, all mapped."""

    def __init__(self, field: Field, directory: Path, rows: int, heap_bytes: int) -> None:
        self.field, self.path, self.rows, self.heap_bytes = field, directory, rows, heap_bytes

    @cached_property
    def start(self) -> torch.Tensor:
        """Where each row starts, in elements (bytes for str, bytes and json): int64 [n]."""
        return map_file(self.path / "start.memmap", self.rows * 8).view(torch.int64)

    @cached_property
    def dims(self) -> torch.Tensor:
        """The dims of each row, int64 [n, rank]; -1 in the first place where the row is None."""
        width = max(self.field.rank, 1)
        return map_file(self.path / "dims.memmap", self.rows * 8 * width).view(torch.int64).view(self.rows, width)

    @cached_property
    def heap(self) -> torch.Tensor:
        """The bytes of all rows, in no particular order, perhaps with gaps: uint8 [heap_bytes]."""
        return map_file(self.path / "heap.bin", self.heap_bytes)

    @cached_property
    def _arrays(self) -> tuple[Ints, Ints, npt.NDArray[np.uint8]]:
        return self.start.numpy(), self.dims.numpy(), self.heap.numpy()

    def extents(self, ids: Ints) -> tuple[Ints, Ints, Ints]:
        """See ``Ragged.extents``; raises CorruptStoreError for a row outside the heap."""
        all_starts, all_dims, _ = self._arrays
        dims = all_dims[ids]
        # clipped first: hostile starts and products of dims must not wrap round to something small
        item = 1 if self.field.kind in HEAP_OF_BYTES else self.field.itemsize
        starts = np.clip(all_starts[ids], -1, self.heap_bytes + 1) * item
        lengths = np.clip(dims, 0, self.heap_bytes + 1).astype(np.float64).prod(axis=1) * item
        none = dims[:, 0] == -1 if self.field.optional else np.zeros(len(ids), bool)
        bad = (starts < 0) | (starts + lengths > self.heap_bytes) | ((dims < 0).any(axis=1) & ~none)
        for axis, dim in enumerate(self.field.shape):
            if dim is not None:
                bad |= (dims[:, axis] != dim) & ~none
        if bad.any():
            row = int(ids[int(bad.argmax())])
            raise CorruptStoreError(
                f"{self.path}: found row {row} of field {self.field.name} at byte {int(all_starts[row]) * item} with "
                f"dims {all_dims[row].tolist()}; expected it inside {self.heap_bytes:,} bytes of "
                f"{self.field.describe()}: the store is damaged, run verify()"
            )
        lengths = lengths.astype(np.int64)
        lengths[none] = -1
        return starts, lengths, dims

    def copy(self, starts: Ints, lengths: Ints, out: npt.NDArray[np.uint8]) -> None:
        """See ``Ragged.copy``."""
        heap = self._arrays[2]
        if len(starts):
            ends = (starts + lengths).tolist()
            np.concatenate([heap[a:b] for a, b in zip(starts.tolist(), ends, strict=True)], out=out)

    def view(self, start: int, length: int) -> torch.Tensor:
        """See ``Ragged.view``."""
        return self.heap[start : start + length]


class Pieces:
    """Rows that each lie in a file of their own, as tensordict writes lazy stacks; read, not mapped.

    The field's kind is "fixed" where all rows have one shape.
    """

    def __init__(self, field: Field, paths: list[Path], shapes: list[tuple[int, ...]]) -> None:
        self.field, self.paths, self.rows = field, paths, len(paths)
        width = max(field.rank, 1)
        self.dims = torch.tensor([shape or (1,) for shape in shapes], dtype=torch.int64).view(self.rows, width)

    def extents(self, ids: Ints) -> tuple[Ints, Ints, Ints]:
        """See ``Ragged.extents``; here a row's start is its number."""
        dims = self.dims.numpy()[ids]
        return ids, dims.prod(axis=1) * self.field.itemsize, dims

    def copy(self, starts: Ints, lengths: Ints, out: npt.NDArray[np.uint8]) -> None:
        """See ``Ragged.copy``."""
        at = 0
        for row, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            if length == 0:  # tensordict writes no file for it
                continue
            read = np.fromfile(self.paths[row], np.uint8, length)
            if len(read) < length:
                raise CorruptStoreError(
                    f"{self.paths[row]}: found {len(read):,} bytes; expected {length:,}: the file was cut after opening"
                )
            out[at : at + length] = read
            at += length

    def view(self, start: int, length: int) -> torch.Tensor:
        """See ``Ragged.view``; a private map of the row's own file."""
        return map_file(self.paths[start], length)


class Values:
    """Rows that were read from JSON already: what tensordict keeps as a NonTensorStack."""

    def __init__(self, field: Field, values: list[object]) -> None:
        self.field, self.values, self.rows = field, values, len(values)


Column = FixedColumn | RaggedColumn | Pieces | Values
