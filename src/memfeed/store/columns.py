"""The columns of a store, mapped on first use.

Every map is private to the process: an edit through a column never reaches the file, and a page that was edited does
not show later changes of the file. So only finished stores are mapped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from memfeed.errors import CorruptStoreError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import HEAP_OF_BYTES, Field
from memfeed.schema.values import bytes_of
from memfeed.store.copied_ranges import copy_ranges
from memfeed.store.copied_rows import select_rows
from memfeed.store.mapping import Place, map_checked, read_file
from memfeed.store.ragged import INT64_BYTES, Located, RaggedFiles, consecutive_starts, dims_width, element_counts
from memfeed.store.separate_rows import SeparateRowsColumn

LARGEST_HIDDEN = 1 << 32  # the product of the other dims of a row that has a dim of 0
_ORDINARY = torch.inference_mode(False)  # decorates what outlives the caller's block


def _no_check() -> None:
    """Do nothing: the files of this column are never replaced."""


class FixedColumn:
    """A column whose rows all have one shape: ``data`` is [n, *shape], a view of the map.

    If ``row_count`` is None the column has no rows (a model's weights): ``data`` is one tensor, [*shape]. The rows
    begin at byte ``offset`` of the file.
    """

    in_memory = False

    def __init__(
        self,
        field: Field,
        path: Path,
        row_count: int | None,
        check: Callable[[], None] = _no_check,
        offset: int = 0,
    ) -> None:
        self.field, self.path, self.row_count, self.offset = field, path, row_count, offset
        self._check = check

    @cached_property
    @_ORDINARY
    def data(self) -> torch.Tensor:
        """The whole column, [n, *shape]."""
        shape = self.field.row_shape if self.row_count is None else (self.row_count, *self.field.row_shape)
        raw = map_checked(self.path, math.prod(shape) * self.field.itemsize, self._check, self.offset)
        return raw.view(self.field.torch_dtype).view(shape)

    def read(self, first: int, out: torch.Tensor) -> bool:
        """Fill ``out``, [k, *shape] (without rows: [*shape]), with the rows from ``first`` by reading the file.

        Returns False, and does nothing, if the column is mapped already, as an edit of the map would be missed, or if
        ``out`` is not contiguous memory of the CPU.
        """
        if self.in_memory or "data" in self.__dict__ or out.device.type != "cpu":
            return False
        if not out.is_contiguous() or out.is_conj() or out.is_neg():
            return False
        torch.autograd.graph.increment_version(out)  # as copy_ does
        try:
            read_file(self.path, bytes_of(out.detach()), self.offset + first * self.field.row_bytes)
        finally:
            self._check()
        return True


class InMemoryColumn(FixedColumn):
    """A column that is a tensor in memory, [n, *shape]."""

    in_memory = True

    def __init__(self, field: Field, data: torch.Tensor) -> None:
        super().__init__(field, Path(), len(data))
        self.data = data


class RaggedRows(Protocol):
    """A column whose rows may differ in size, or lie in different files."""

    field: Field

    def locate(self, rows: Int64Array) -> Located:
        """Return where rows lie. Raises CorruptStoreError for a row outside the column's file."""

    def copy(self, starts: Int64Array, lengths: Int64Array, out: npt.NDArray[np.uint8]) -> None:
        """Copy those bytes one after another into ``out``, which has exactly their size."""

    def view(self, start: int, length: int) -> torch.Tensor:
        """Return those bytes as a uint8 tensor [length], without a copy if the column is mapped."""


class RaggedColumn:
    """Rows of different sizes in one heap: the start and dims of each row, and the heap, all mapped."""

    offset = 0  # of the heap in its file
    in_memory = False

    def __init__(
        self, field: Field, files: RaggedFiles, row_count: int, heap_bytes: int, check: Callable[[], None] = _no_check
    ) -> None:
        self.field, self.row_count, self.heap_bytes = field, row_count, heap_bytes
        self.heap_path, self._files, self._check = files.heap, files, check
        step = math.prod(dim for dim in field.shape if dim is not None)  # elements per unit of the dim that varies
        one_varies = field.kind in HEAP_OF_BYTES or field.shape.count(None) == 1
        self._step = step if one_varies and not field.optional else 0  # 0: `locate` has no short way
        self._axis = field.shape.index(None) if None in field.shape else 0
        self._others = [axis for axis, dim in enumerate(field.shape) if dim is not None]
        self._fixed_dims = [dim for dim in field.shape if dim is not None]

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
        return map_checked(self.heap_path, self.heap_bytes, self._check, self.offset)

    @cached_property
    def _arrays(self) -> tuple[Int64Array, Int64Array, npt.NDArray[np.uint8]]:
        return self.start.numpy(), self.dims.numpy(), self.heap.numpy()

    def locate(self, rows: Int64Array) -> Located:
        """See ``RaggedRows.locate``. Raises CorruptStoreError for a row outside the heap."""
        all_starts, all_dims, _ = self._arrays
        if self._step and len(rows):
            dims, starts = all_dims[rows], all_starts[rows]
            steps, item = dims[:, self._axis], self.field.itemsize
            elements = self.heap_bytes // item
            # seen as unsigned, negative numbers are too large: so a few comparisons find every possible damage
            if (
                steps.view(np.uint64).max() <= elements // self._step
                and starts.view(np.uint64).max() <= elements
                and (starts + steps * self._step).max() <= elements
                and (not self._others or (dims[:, self._others] == self._fixed_dims).all())
            ):
                return Located(starts * item, steps * (self._step * item), dims)
        return self._locate_checked(rows)

    def _locate_checked(self, rows: Int64Array) -> Located:
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
        return Located(starts, lengths, dims)

    def copy(self, starts: Int64Array, lengths: Int64Array, out: npt.NDArray[np.uint8]) -> None:
        """See ``RaggedRows.copy``."""
        copy_ranges(self.heap, starts, lengths, out)

    def view(self, start: int, length: int) -> torch.Tensor:
        """See ``RaggedRows.view``."""
        return self.heap[start : start + length]


class NestedColumn(RaggedColumn):
    """The rows of a nested tensor, one after another in one file or in one flat tensor in memory."""

    def __init__(self, field: Field, data: Place | torch.Tensor, dims: Int64Array) -> None:
        counts = element_counts(dims)
        path, self.offset = (Path(), 0) if isinstance(data, torch.Tensor) else data
        # start and dims are set here, so only the path of the heap is used
        super().__init__(field, RaggedFiles(path, path, path), len(dims), int(counts.sum()) * field.itemsize)
        self.start, self.dims = torch.from_numpy(consecutive_starts(counts, 0)), torch.from_numpy(dims)
        self.in_memory = isinstance(data, torch.Tensor)
        if isinstance(data, torch.Tensor):
            self.heap = data.view(torch.uint8) if data.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


class JsonColumn:
    """Rows that are Python values in memory, those of a NonTensorStack of tensordict."""

    in_memory = True

    def __init__(self, field: Field, values: list[object]) -> None:
        self.field, self.values, self.row_count = field, values, len(values)


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


class ComputedColumn:
    """A column whose rows, all of one shape, are put together when they are read: windows, packed blocks."""

    in_memory = False

    def __init__(self, field: Field, row_count: int) -> None:
        self.field, self.row_count = field, row_count

    def gather_into(self, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """Write ``rows`` (int [k]) into ``out``, [k, *shape] and contiguous, and return it."""
        raise NotImplementedError


def gather_rows(column: Any, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
    """Copy ``rows`` (int [k]) of any column of kind "fixed" into ``out``, [k, *shape], and return it."""
    if isinstance(column, FixedColumn):
        return select_rows(column.data, torch.from_numpy(rows), out)
    if isinstance(column, SeparateRowsColumn):
        located = column.locate(rows)
        column.copy(located.starts, located.lengths, out.view(-1).view(torch.uint8).numpy())
        return out
    gathered: torch.Tensor = column.gather_into(rows, out)
    return gathered


class ConcatFixedColumn(_ConcatColumn, ComputedColumn):
    """Fixed columns of several stores as one."""

    def gather_into(self, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """See ``ComputedColumn.gather_into``."""
        for part, positions, part_rows in self.by_part(rows):
            if len(positions) == len(rows):
                return gather_rows(part, part_rows, out)
            here = gather_rows(part, part_rows, out.new_empty(len(positions), *out.shape[1:]))
            out.index_copy_(0, torch.from_numpy(positions), here)
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

    def __init__(self, field: Field, parts: Sequence[RaggedColumn | SeparateRowsColumn]) -> None:
        super().__init__(field, parts)
        self._span = (1 << 62) // len(self.parts)  # more than any start: bytes of a heap, or numbers of files

    def locate(self, rows: Int64Array) -> Located:
        """See ``RaggedRows.locate``; a start also tells in which part the row is."""
        starts, lengths = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        dims = np.empty((len(rows), dims_width(self.field)), np.int64)
        for part, positions, part_rows in self.by_part(rows):
            starts[positions], lengths[positions], dims[positions] = part.locate(part_rows)
            starts[positions] += self.parts.index(part) * self._span
        return Located(starts, lengths, dims)

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


Column = FixedColumn | RaggedColumn | SeparateRowsColumn | JsonColumn | ComputedColumn | ConcatRaggedColumn
