"""The columns of a store, mapped on first use.

Every map is private to the process: an edit through a column never reaches the file, and a page once edited no longer
shows what others write, which is why only finished stores are mapped here.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from memfeed.errors import CorruptStoreError, StoreError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import HEAP_OF_BYTES, Field
from memfeed.system.descriptors import open_read, with_descriptors

LONG_BYTES = 8192  # rows of varying length are copied in one way or the other, by their average size
MOST_HIDDEN = 1 << 32  # the product of the dims of a row without elements, those of 0 left out
# Python names it only since 3.13; the number is that of x86, Arm, RISC-V, POWER and s390
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
# before Python 3.13 every map keeps a descriptor of its own open, which none of ours needs
_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def map_file(path: Path, size: int) -> torch.Tensor:
    """The first ``size`` bytes of a file as a uint8 tensor [size] over a private, writable map.

    MAP_NORESERVE, because a private map larger than memory and swap is refused without it. The tensor keeps the map
    alive; nothing else has to be closed. Raises CorruptStoreError if the file has become shorter.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    fd = open_read(path)
    try:
        have = os.fstat(fd).st_size
        if have < size:  # touching a map beyond the file's end is a SIGBUS
            raise CorruptStoreError(f"{path}: found {have:,} bytes; expected {size:,}: the file was cut")
        flags = mmap.MAP_PRIVATE | _NORESERVE
        mapped = with_descriptors(
            lambda: mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE, **_UNTRACKED)
        )
    except (OverflowError, OSError) as error:  # sparse files can be larger than all addresses
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        raise StoreError(f"{path}: found {size:,} bytes, more than this process can map ({error})") from None
    finally:
        os.close(fd)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _nothing() -> None:
    """For columns whose files are not replaced."""


def _checked_map(path: Path, size: int, check: Callable[[], None]) -> torch.Tensor:
    """``map_file``, unless another store is at its place by now."""
    try:
        return map_file(path, size)
    finally:
        check()  # whatever was found: it may be of that one


class FixedColumn:
    """A column whose rows all have one shape: ``data`` is [n, *shape], a view of the map.

    Where ``rows`` is None there are none to tell apart (a model's weights): ``data`` is the one tensor, [*shape].
    """

    def __init__(self, field: Field, path: Path, rows: int | None, check: Callable[[], None] = _nothing) -> None:
        self.field, self.path, self.rows, self._check = field, path, rows, check

    @cached_property
    def data(self) -> torch.Tensor:
        """The whole column, [n, *shape]."""
        shape = self.field.row_shape if self.rows is None else (self.rows, *self.field.row_shape)
        raw = _checked_map(self.path, math.prod(shape) * self.field.itemsize, self._check)
        return raw.view(self.field.torch_dtype).view(shape)


class InMemory(FixedColumn):
    """A column that is a tensor already, [n, *shape]."""

    def __init__(self, field: Field, data: torch.Tensor) -> None:
        super().__init__(field, Path(), len(data))
        self.data = data


class Ragged(Protocol):
    """A column whose rows differ in size."""

    field: Field

    def extents(self, ids: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Where rows lie: start [k] and length [k] in bytes, dims [k, rank]; length is -1 where a row is None."""

    def copy(self, starts: Int64Array, lengths: Int64Array, out: npt.NDArray[np.uint8]) -> None:
        """Copies those bytes one behind the other into ``out``, which has exactly their size."""

    def view(self, start: int, length: int) -> torch.Tensor:
        """Those bytes as a uint8 tensor [length], without a copy where the column is mapped."""


class RaggedColumn:
    """Rows of different sizes in one heap: where each starts, its dims, and the heap, all mapped."""

    def __init__(
        self, field: Field, directory: Path, rows: int, heap_bytes: int, check: Callable[[], None] = _nothing
    ) -> None:
        self._check = check
        self.field, self.path, self.rows, self.heap_bytes = field, directory, rows, heap_bytes
        self._item = 1 if field.kind in HEAP_OF_BYTES else field.itemsize
        step = math.prod(dim for dim in field.shape[1:] if dim is not None)  # elements of one step of the first dim
        first_varies = (field.kind in HEAP_OF_BYTES or field.shape[:1] == (None,)) and None not in field.shape[1:]
        self._step = step if first_varies and not field.optional else 0  # 0: rows are not so simple

    @cached_property
    def start(self) -> torch.Tensor:
        """Where each row starts, in elements (bytes for str, bytes and json): int64 [n]."""
        return _checked_map(self.path / "start.memmap", self.rows * 8, self._check).view(torch.int64)

    @cached_property
    def dims(self) -> torch.Tensor:
        """The dims of each row, int64 [n, rank]; -1 in the first place where the row is None."""
        width = max(self.field.rank, 1)
        raw = _checked_map(self.path / "dims.memmap", self.rows * 8 * width, self._check)
        return raw.view(torch.int64).view(self.rows, width)

    @property
    def heap_path(self) -> Path:
        """The file that holds the bytes of all rows."""
        return self.path / "heap.bin"

    @cached_property
    def heap(self) -> torch.Tensor:
        """The bytes of all rows, in no particular order, perhaps with gaps: uint8 [heap_bytes]."""
        return _checked_map(self.heap_path, self.heap_bytes, self._check)

    @cached_property
    def _arrays(self) -> tuple[Int64Array, Int64Array, npt.NDArray[np.uint8]]:
        return self.start.numpy(), self.dims.numpy(), self.heap.numpy()

    def extents(self, ids: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """See ``Ragged.extents``; raises CorruptStoreError for a row outside the heap."""
        all_starts, all_dims, _ = self._arrays
        if self._step and len(ids):
            dims, starts = all_dims[ids], all_starts[ids]
            steps, elements = dims[:, 0], self.heap_bytes // self._item
            # as unsigned numbers negative ones are too large: few looks see whatever may be wrong
            if (
                steps.view(np.uint64).max() <= elements // self._step
                and starts.view(np.uint64).max() <= elements
                and (starts + steps * self._step).max() <= elements
                and (dims.shape[1] == 1 or (dims[:, 1:] == self.field.shape[1:]).all())
            ):
                return starts * self._item, steps * (self._step * self._item), dims
        return self._checked(ids)

    def _checked(self, ids: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The same for any field and any damage, which it names."""
        all_starts, all_dims, _ = self._arrays
        dims = all_dims[ids]
        # clipped first: hostile starts and products of dims must not wrap round to something small
        item, most = self._item, self.heap_bytes // self._item + 1
        starts = np.clip(all_starts[ids], -1, most) * item
        lengths = np.clip(dims, 0, most).astype(np.float64).prod(axis=1) * item
        none = dims[:, 0] == -1 if self.field.optional else np.zeros(len(ids), bool)
        bad = (starts < 0) | (starts + lengths > self.heap_bytes) | ((dims < 0).any(axis=1) & ~none)
        # a dim of 0 hides how large the others are
        bad |= np.maximum(dims, 1).astype(np.float64).prod(axis=1) > max(most, MOST_HIDDEN)
        if not self.field.shape and self.field.kind not in HEAP_OF_BYTES:
            bad |= (dims[:, 0] != 1) & ~none
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

    def copy(self, starts: Int64Array, lengths: Int64Array, out: npt.NDArray[np.uint8]) -> None:
        """See ``Ragged.copy``."""
        heap, places = self._arrays[2], zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        if out.size >= LONG_BYTES * len(starts) > 0:
            np.concatenate([heap[a:b] for a, b in places], out=out)
        else:  # slices of a memoryview are made and joined in a third of the time, which pays for copying once more
            view = heap.data
            out.data[:] = b"".join([view[a:b] for a, b in places])

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

    def extents(self, ids: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """See ``Ragged.extents``; here a row's start is its number."""
        dims = self.dims.numpy()[ids]
        return ids, dims.prod(axis=1) * self.field.itemsize, dims

    def copy(self, starts: Int64Array, lengths: Int64Array, out: npt.NDArray[np.uint8]) -> None:
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


class _Joined:
    """Columns of several stores, their rows one behind the other."""

    def __init__(self, field: Field, parts: Sequence[Any]) -> None:
        self.field, self.parts = field, list(parts)
        self.begins = np.cumsum([0, *(part.rows for part in parts)])
        self.rows = int(self.begins[-1])

    def by_part(self, ids: Int64Array) -> list[tuple[Any, Int64Array, Int64Array]]:
        """Each part that has some of these rows, where in ``ids`` they are, and their numbers in the part."""
        which = np.searchsorted(self.begins, ids, side="right") - 1
        found = []
        for number in np.unique(which):
            at = np.flatnonzero(which == number)
            found.append((self.parts[number], at, ids[at] - self.begins[number]))
        return found


class JoinedFixed(_Joined):
    """Fixed columns of several stores."""

    def select(self, ids: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """Copies rows into ``out``, [k, *shape]."""
        for part, at, rows in self.by_part(ids):
            index = torch.from_numpy(rows)
            if len(at) == len(ids):
                return torch.index_select(part.data, 0, index, out=out)
            out.index_copy_(0, torch.from_numpy(at), torch.index_select(part.data, 0, index))
        return out


class KeptFixed(JoinedFixed):
    """Some rows of a fixed column, in memory: ``data`` is [m, *shape], row ``kept[i]`` (ascending, int64 [m]) at i."""

    def __init__(self, field: Field, data: torch.Tensor, kept: Int64Array) -> None:
        super().__init__(field, [InMemory(field, data)])
        self._kept = kept

    def by_part(self, ids: Int64Array) -> list[tuple[Any, Int64Array, Int64Array]]:
        """The one part, all of ``ids``, and their numbers there."""
        return [(self.parts[0], np.arange(len(ids)), np.searchsorted(self._kept, ids))]


class JoinedRagged(_Joined):
    """Ragged columns of several stores, seen as one heap behind the other. See ``Ragged``."""

    def __init__(self, field: Field, parts: Sequence[RaggedColumn | Pieces]) -> None:
        super().__init__(field, parts)
        self._room = (1 << 62) // len(self.parts)  # a part's starts are less: bytes of its heap, or numbers of files

    def extents(self, ids: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """See ``Ragged.extents``; a start tells which part it is in."""
        starts, lengths = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        dims = np.empty((len(ids), max(self.field.rank, 1)), np.int64)
        for part, at, rows in self.by_part(ids):
            starts[at], lengths[at], dims[at] = part.extents(rows)
            starts[at] += self.parts.index(part) * self._room
        return starts, lengths, dims

    def copy(self, starts: Int64Array, lengths: Int64Array, out: npt.NDArray[np.uint8]) -> None:
        """See ``Ragged.copy``; runs of rows of one part are copied together."""
        which = starts // self._room
        edges = [0, *(np.flatnonzero(np.diff(which)) + 1).tolist(), len(which)]
        ends = np.cumsum(lengths)
        for a, b in pairwise(edges):
            if a < b:
                begin = int(ends[a] - lengths[a])
                part = self.parts[int(which[a])]
                part.copy(starts[a:b] % self._room, lengths[a:b], out[begin : int(ends[b - 1])])

    def view(self, start: int, length: int) -> torch.Tensor:
        """See ``Ragged.view``."""
        number, at = divmod(start, self._room)
        found: torch.Tensor = self.parts[number].view(at, length)
        return found


Column = FixedColumn | RaggedColumn | Pieces | Values | JoinedFixed | JoinedRagged
