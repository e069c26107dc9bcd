"""The columns of a store, mapped on first use.

Every map is private to the process: an edit through a column never reaches the file, and a page that was edited does
not show later changes of the file. So only finished stores are mapped here.
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
from memfeed.store.ragged import INT64_BYTES, RaggedFiles, dims_width
from memfeed.system.descriptors import open_read, with_descriptors

LONG_BYTES = 8192  # average row size from which rows of varying length are copied by NumPy
LARGEST_HIDDEN = 1 << 32  # the product of the other dims of a row that has a dim of 0
# Python has had this name only since 3.13; the value is that of x86, Arm, RISC-V, POWER and s390
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
# before Python 3.13 every map keeps a descriptor of its own open, which is not needed
_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}

_ORDINARY = torch.inference_mode(False)  # decorates what outlives the caller's block


def map_file(path: Path, size: int) -> torch.Tensor:
    """Map the first ``size`` bytes of a file as a uint8 tensor [size] over a private, writable map.

    MAP_NORESERVE, because without it the system refuses a private map larger than memory and swap. The tensor keeps the
    map alive; nothing else has to be closed. Raises CorruptStoreError if the file is shorter than ``size``.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    fd = open_read(path)
    try:
        found = os.fstat(fd).st_size
        if found < size:  # touching a map after the file's end is a SIGBUS
            raise CorruptStoreError(f"{path}: found {found:,} bytes; expected {size:,}: the file was cut")
        flags = mmap.MAP_PRIVATE | _NORESERVE
        mapped = with_descriptors(
            lambda: mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE, **_UNTRACKED)
        )
    except (OverflowError, OSError) as error:  # a sparse file can be larger than the address space
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        raise StoreError(f"{path}: found {size:,} bytes, more than this process can map ({error})") from None
    finally:
        os.close(fd)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def map_checked(path: Path, size: int, check: Callable[[], None]) -> torch.Tensor:
    """Map a file, then call ``check``, which raises if the store was replaced meanwhile."""
    try:
        return map_file(path, size)
    finally:
        check()  # also after an error: the file may be that of another store


def _no_check() -> None:
    """Do nothing: the files of this column are never replaced."""


class FixedColumn:
    """A column whose rows all have one shape: ``data`` is [n, *shape], a view of the map.

    If ``row_count`` is None the column has no rows (a model's weights): ``data`` is one tensor, [*shape].
    """

    def __init__(self, field: Field, path: Path, row_count: int | None, check: Callable[[], None] = _no_check) -> None:
        self.field, self.path, self.row_count, self._check = field, path, row_count, check

    @cached_property
    @_ORDINARY
    def data(self) -> torch.Tensor:
        """The whole column, [n, *shape]."""
        shape = self.field.row_shape if self.row_count is None else (self.row_count, *self.field.row_shape)
        raw = map_checked(self.path, math.prod(shape) * self.field.itemsize, self._check)
        return raw.view(self.field.torch_dtype).view(shape)


class InMemoryColumn(FixedColumn):
    """A column that is a tensor in memory, [n, *shape]."""

    def __init__(self, field: Field, data: torch.Tensor) -> None:
        super().__init__(field, Path(), len(data))
        self.data = data


class RaggedRows(Protocol):
    """A column whose rows may differ in size, or lie in different files."""

    field: Field

    def locate(self, rows: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return start [k] and length [k] in bytes, and dims [k, dims_width]; the length of a None is -1."""

    def copy(self, starts: Int64Array, lengths: Int64Array, out: npt.NDArray[np.uint8]) -> None:
        """Copy those bytes one after another into ``out``, which has exactly their size."""

    def view(self, start: int, length: int) -> torch.Tensor:
        """Return those bytes as a uint8 tensor [length], without a copy if the column is mapped."""


class RaggedColumn:
    """Rows of different sizes in one heap: the start and dims of each row, and the heap, all mapped."""

    def __init__(
        self, field: Field, files: RaggedFiles, row_count: int, heap_bytes: int, check: Callable[[], None] = _no_check
    ) -> None:
        self.field, self.row_count, self.heap_bytes = field, row_count, heap_bytes
        self.heap_path, self._files, self._check = files.heap, files, check
        step = math.prod(dim for dim in field.shape[1:] if dim is not None)  # elements per unit of the first dim
        only_first_varies = (field.kind in HEAP_OF_BYTES or field.shape[:1] == (None,)) and None not in field.shape[1:]
        self._step = step if only_first_varies and not field.optional else 0  # 0: `locate` has no short way

    @cached_property
    @_ORDINARY
    def start(self) -> torch.Tensor:
        """The start of each row, in elements (bytes for str, bytes and json): int64 [n]."""
        return map_checked(self._files.start, self.row_count * INT64_BYTES, self._check).view(torch.int64)

    @cached_property
    @_ORDINARY
    def dims(self) -> torch.Tensor:
        """The dims of each row, int64 [n, dims_width]; the first is -1 if the row is None."""
        width = dims_width(self.field)
        raw = map_checked(self._files.dims, self.row_count * INT64_BYTES * width, self._check)
        return raw.view(torch.int64).view(self.row_count, width)

    @cached_property
    @_ORDINARY
    def heap(self) -> torch.Tensor:
        """The bytes of all rows, in no particular order, perhaps with gaps: uint8 [heap_bytes]."""
        return map_checked(self.heap_path, self.heap_bytes, self._check)

    @cached_property
    def _arrays(self) -> tuple[Int64Array, Int64Array, npt.NDArray[np.uint8]]:
        return self.start.numpy(), self.dims.numpy(), self.heap.numpy()

    def locate(self, rows: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """See ``RaggedRows.locate``. Raises CorruptStoreError for a row outside the heap."""
        all_starts, all_dims, _ = self._arrays
        if self._step and len(rows):
            dims, starts = all_dims[rows], all_starts[rows]
            steps, item = dims[:, 0], self.field.itemsize
            elements = self.heap_bytes // item
            # seen as unsigned, negative numbers are too large: so a few comparisons find every possible damage
            if (
                steps.view(np.uint64).max() <= elements // self._step
                and starts.view(np.uint64).max() <= elements
                and (starts + steps * self._step).max() <= elements
                and (dims.shape[1] == 1 or (dims[:, 1:] == self.field.shape[1:]).all())
            ):
                return starts * item, steps * (self._step * item), dims
        return self._locate_checked(rows)

    def _locate_checked(self, rows: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Locate rows of any field, and name the first damaged one in the error."""
        all_starts, all_dims, _ = self._arrays
        dims = all_dims[rows]
        # clipped first, so that hostile starts and products of dims do not wrap round to a small number
        item, most = self.field.itemsize, self.heap_bytes // self.field.itemsize + 1
        starts = np.clip(all_starts[rows], -1, most) * item
        lengths = np.clip(dims, 0, most).astype(np.float64).prod(axis=1) * item
        is_none = dims[:, 0] == -1 if self.field.optional else np.zeros(len(rows), bool)
        bad = (starts < 0) | (starts + lengths > self.heap_bytes) | ((dims < 0).any(axis=1) & ~is_none)
        # a dim of 0 hides how large the others are
        bad |= np.maximum(dims, 1).astype(np.float64).prod(axis=1) > max(most, LARGEST_HIDDEN)
        if not self.field.shape and self.field.kind not in HEAP_OF_BYTES:
            bad |= (dims[:, 0] != 1) & ~is_none
        for axis, dim in enumerate(self.field.shape):
            if dim is not None:
                bad |= (dims[:, axis] != dim) & ~is_none
        if bad.any():
            row = int(rows[int(bad.argmax())])
            raise CorruptStoreError(
                f"{self.heap_path}: found row {row} of field {self.field.name} at byte {int(all_starts[row]) * item} "
                f"with dims {all_dims[row].tolist()}; expected it inside {self.heap_bytes:,} bytes of "
                f"{self.field.describe()}: the store is damaged, run verify()"
            )
        lengths = lengths.astype(np.int64)
        lengths[is_none] = -1
        return starts, lengths, dims

    def copy(self, starts: Int64Array, lengths: Int64Array, out: npt.NDArray[np.uint8]) -> None:
        """See ``RaggedRows.copy``."""
        heap, ranges = self._arrays[2], zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        if out.size >= LONG_BYTES * len(starts) > 0:
            np.concatenate([heap[start:stop] for start, stop in ranges], out=out)
        else:  # joining slices of a memoryview takes a third of the time, although it copies once more
            view = heap.data
            out.data[:] = b"".join([view[start:stop] for start, stop in ranges])

    def view(self, start: int, length: int) -> torch.Tensor:
        """See ``RaggedRows.view``."""
        return self.heap[start : start + length]


class FilePerRowColumn:
    """Rows that each have a file of their own, as tensordict writes lazy stacks; read, not mapped.

    The field's kind is "fixed" if all rows have one shape.
    """

    def __init__(self, field: Field, paths: list[Path], shapes: list[tuple[int, ...]]) -> None:
        self.field, self.paths, self.row_count = field, paths, len(paths)
        dims = torch.tensor([shape or (1,) for shape in shapes], dtype=torch.int64, device="cpu")
        self.dims = dims.view(self.row_count, dims_width(field))

    def locate(self, rows: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """See ``RaggedRows.locate``; here the start is the row's number."""
        dims = self.dims.numpy()[rows]
        return rows, dims.prod(axis=1) * self.field.itemsize, dims

    def copy(self, starts: Int64Array, lengths: Int64Array, out: npt.NDArray[np.uint8]) -> None:
        """See ``RaggedRows.copy``."""
        done = 0
        for row, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            if length == 0:  # tensordict writes no file for it
                continue
            read = np.fromfile(self.paths[row], np.uint8, length)
            if len(read) < length:
                raise CorruptStoreError(
                    f"{self.paths[row]}: found {len(read):,} bytes; expected {length:,}: the file was cut after opening"
                )
            out[done : done + length] = read
            done += length

    def view(self, start: int, length: int) -> torch.Tensor:
        """See ``RaggedRows.view``; a private map of the row's own file."""
        return map_file(self.paths[start], length)


class JsonColumn:
    """Rows that are Python values read from JSON at opening: a NonTensorStack of tensordict."""

    def __init__(self, field: Field, values: list[object]) -> None:
        self.field, self.values, self.row_count = field, values, len(values)


class ComputedColumn:
    """A column whose rows, all of one shape, are put together when they are read; see `memfeed.store.packed`."""

    def __init__(self, field: Field, row_count: int) -> None:
        self.field, self.row_count = field, row_count

    def gather_into(self, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """Write ``rows`` (int64 [k]) into ``out``, [k, *shape] and contiguous, and return it."""
        raise NotImplementedError


class _ConcatColumn:
    """The columns of several stores as one: the rows of the first, then those of the second, and so on."""

    def __init__(self, field: Field, parts: Sequence[Any]) -> None:
        self.field, self.parts = field, list(parts)
        self.begins = np.cumsum([0, *(part.row_count for part in parts)])
        self.row_count = int(self.begins[-1])

    def by_part(self, rows: Int64Array) -> list[tuple[Any, Int64Array, Int64Array]]:
        """Return each part that has some of ``rows``, their positions in ``rows``, and their rows in the part."""
        part_of = np.searchsorted(self.begins, rows, side="right") - 1
        found = []
        for part_index in np.unique(part_of):
            positions = np.flatnonzero(part_of == part_index)
            found.append((self.parts[part_index], positions, rows[positions] - self.begins[part_index]))
        return found


class ConcatFixedColumn(_ConcatColumn):
    """Columns of several stores as one, all fixed or all computed."""

    def gather_into(self, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """Copy ``rows`` (int64 [k]) into ``out``, [k, *shape], and return it."""
        for part, positions, part_rows in self.by_part(rows):
            if isinstance(part, ComputedColumn):
                found = torch.empty((len(part_rows), *out.shape[1:]), dtype=out.dtype)
                out.index_copy_(0, torch.from_numpy(positions), part.gather_into(part_rows, found))
                continue
            index = torch.from_numpy(part_rows)
            if len(positions) == len(rows):
                return torch.index_select(part.data, 0, index, out=out)
            out.index_copy_(0, torch.from_numpy(positions), torch.index_select(part.data, 0, index))
        return out


class RowSubsetColumn(ConcatFixedColumn):
    """Some rows of a fixed column, in memory: ``data`` [m, *shape] has row ``kept[i]`` (ascending, int64 [m]) at i."""

    def __init__(self, field: Field, data: torch.Tensor, kept: Int64Array) -> None:
        super().__init__(field, [InMemoryColumn(field, data)])
        self._kept = kept

    def by_part(self, rows: Int64Array) -> list[tuple[Any, Int64Array, Int64Array]]:
        """Return the one part, the positions of all ``rows``, and their rows in ``data``."""
        return [(self.parts[0], np.arange(len(rows)), np.searchsorted(self._kept, rows))]


class ConcatRaggedColumn(_ConcatColumn):
    """Ragged columns of several stores as one; each part has its own range of starts. See ``RaggedRows``."""

    def __init__(self, field: Field, parts: Sequence[RaggedColumn | FilePerRowColumn]) -> None:
        super().__init__(field, parts)
        self._span = (1 << 62) // len(self.parts)  # more than any start: bytes of a heap, or numbers of files

    def locate(self, rows: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """See ``RaggedRows.locate``; a start also tells in which part the row is."""
        starts, lengths = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        dims = np.empty((len(rows), dims_width(self.field)), np.int64)
        for part, positions, part_rows in self.by_part(rows):
            starts[positions], lengths[positions], dims[positions] = part.locate(part_rows)
            starts[positions] += self.parts.index(part) * self._span
        return starts, lengths, dims

    def copy(self, starts: Int64Array, lengths: Int64Array, out: npt.NDArray[np.uint8]) -> None:
        """See ``RaggedRows.copy``; consecutive rows of one part are copied together."""
        part_of = starts // self._span
        edges = [0, *(np.flatnonzero(np.diff(part_of)) + 1).tolist(), len(part_of)]
        ends = np.cumsum(lengths)
        for first, last in pairwise(edges):
            if first < last:
                begin = int(ends[first] - lengths[first])
                part = self.parts[int(part_of[first])]
                part.copy(starts[first:last] % self._span, lengths[first:last], out[begin : int(ends[last - 1])])

    def view(self, start: int, length: int) -> torch.Tensor:
        """See ``RaggedRows.view``."""
        part_index, part_start = divmod(start, self._span)
        viewed: torch.Tensor = self.parts[part_index].view(part_start, length)
        return viewed


Column = (
    FixedColumn | RaggedColumn | FilePerRowColumn | JsonColumn | ConcatFixedColumn | ConcatRaggedColumn | ComputedColumn
)
