"""Columns whose rows differ in size or lie apart: in one heap, in a file or a tensor each, or in several stores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from memfeed.errors import CorruptStoreError
from memfeed.schema import codec
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import HEAP_OF_BYTES, Field
from memfeed.schema.values import bytes_of
from memfeed.store.columns import Column, ConcatColumn, FileColumn
from memfeed.store.copied_ranges import copy_ranges
from memfeed.store.ragged import INT64_BYTES, Located, RaggedFiles, consecutive_starts, dims_width, element_counts
from memfeed.system.mapped_memory import ORDINARY, map_checked, read_file

LARGEST_HIDDEN = 1 << 32  # the product of the other dims of a row that has a dim of 0


class RaggedRows(Column):
    """A column whose rows may differ in size, or lie in different files."""

    layout = "ragged"
    row_count: int

    @property
    def nbytes(self) -> int:
        """See ``Column.nbytes``."""
        return self.locate(np.arange(self.row_count)).nbytes

    def copy(self, starts: Int64Array, lengths: Int64Array, out: npt.NDArray[np.uint8]) -> None:
        """Copy those bytes one after another into ``out``, which has exactly their size."""
        done = 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            if length > 0:
                out[done : done + length] = self.view(start, length).numpy()
                done += length

    def view(self, start: int, length: int) -> torch.Tensor:
        """Return those bytes as a uint8 tensor [length], without a copy if the column is mapped."""
        raise NotImplementedError

    def gather_into(self, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """See ``Column.gather_into``."""
        located = self.locate(rows)
        self.copy(located.starts, located.lengths, out.view(-1).view(torch.uint8).numpy())
        return out

    def read_row(self, row: int) -> Any:
        """See ``Column.read_row``."""
        value = self.view_row(row)
        return codec.unpack(self.field, value.clone()) if isinstance(value, torch.Tensor) else value

    def view_row(self, row: int) -> Any:
        """Return one row: a tensor that shares the memory of a map, or a decoded value, or None."""
        field = self.field
        located = self.locate(np.array([row]))
        if located.lengths[0] < 0:
            return None
        raw = self.view(int(located.starts[0]), int(located.lengths[0]))
        if field.kind in HEAP_OF_BYTES:
            return codec.decode_bytes(field, raw.numpy().tobytes())
        return raw.view(field.torch_dtype).view(located.dims[0, : len(field.shape)].tolist())

    def joined(self, field: Field, columns: Sequence[Any]) -> Column:
        """See ``Column.joined``."""
        parts = [column.parts if isinstance(column, ConcatColumn) else [column] for column in columns]
        return ConcatRaggedColumn(field, [part for some in parts for part in some])


class RaggedColumn(FileColumn, RaggedRows):
    """Rows of different sizes in one heap: the start and dims of each row, and the heap, all mapped."""

    def __init__(
        self,
        field: Field,
        files: RaggedFiles,
        row_count: int,
        heap_bytes: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.field, self.row_count, self.heap_bytes = field, row_count, heap_bytes
        self.path, self._files, self._check = files.heap, files, check
        step = math.prod(dim for dim in field.shape if dim is not None)  # elements per unit of the dim that varies
        one_varies = field.kind in HEAP_OF_BYTES or field.shape.count(None) == 1
        self._step = step if one_varies and not field.optional else 0  # 0: `locate` has no short way
        self._axis = field.shape.index(None) if None in field.shape else 0
        self._others = [axis for axis, dim in enumerate(field.shape) if dim is not None]
        self._fixed_dims = [dim for dim in field.shape if dim is not None]

    @cached_property
    @ORDINARY
    def start(self) -> torch.Tensor:
        """The start of each row, in elements (bytes for str, bytes and json): int64 [n]."""
        return map_checked(self._files.start, self.row_count * INT64_BYTES, self._check).view(torch.int64)

    @cached_property
    @ORDINARY
    def dims(self) -> torch.Tensor:
        """The dims of each row, int64 [n, dims_width]; the first is -1 if the row is None."""
        width = dims_width(self.field)
        raw = map_checked(self._files.dims, self.row_count * INT64_BYTES * width, self._check)
        return raw.view(torch.int64).view(self.row_count, width)

    @cached_property
    @ORDINARY
    def heap(self) -> torch.Tensor:
        """The bytes of all rows, in no particular order, perhaps with gaps: uint8 [heap_bytes]."""
        return map_checked(self.path, self.heap_bytes, self._check)

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
                f"{self.path}: found row {row} of field {self.field.name} at byte {int(all_starts[row]) * item} "
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

    @property
    def nbytes(self) -> int:
        """The bytes of the heap."""
        return self.heap_bytes

    @property
    def mean_row_bytes(self) -> int:
        """See ``Column.mean_row_bytes``."""
        return self.heap_bytes // max(self.row_count, 1)

    @property
    def address(self) -> int:
        """See ``FileColumn.address``."""
        return self.heap.data_ptr()

    def places(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See ``FileColumn.places``."""
        return self.locate(rows)[:2]


class HeapColumn(RaggedColumn):
    """Rows in a heap of which the ``start`` [n] and the ``dims`` [n, dims_width] are in memory."""

    def __init__(self, field: Field, heap: Path, heap_bytes: int, start: Int64Array, dims: Int64Array) -> None:
        super().__init__(field, RaggedFiles(heap, heap, heap), len(dims), heap_bytes)  # only the last path is used
        self.start, self.dims = torch.from_numpy(start), torch.from_numpy(dims)


class NestedColumn(HeapColumn):
    """The rows of a nested tensor, one after another in one file or in one flat tensor in memory."""

    def __init__(self, field: Field, data: Path | torch.Tensor, dims: Int64Array) -> None:
        counts, path = element_counts(dims), Path() if isinstance(data, torch.Tensor) else data
        super().__init__(field, path, int(counts.sum()) * field.itemsize, consecutive_starts(counts, 0), dims)
        self.in_memory = isinstance(data, torch.Tensor)
        if isinstance(data, torch.Tensor):
            self.heap = data.view(torch.uint8) if data.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


class SeparateRowsColumn(RaggedRows):
    """Rows that are separate tensors in memory, as in tensordict's lazy stacks.

    The field's kind is "fixed" if all rows have one shape.

    Args:
        field: of the rows.
        rows: their tensors, or the files that begin with them, which are read into memory when the first row is.
        shapes: of the rows.
    """

    in_memory = True

    def __init__(self, field: Field, rows: Sequence[torch.Tensor | Path], shapes: Sequence[tuple[int, ...]]) -> None:
        self.field, self.row_count, self._rows = field, len(shapes), rows
        dims = torch.tensor([shape or (1,) for shape in shapes], dtype=torch.int64, device="cpu")
        self.dims = dims.view(self.row_count, dims_width(field))

    @cached_property
    def data(self) -> list[torch.Tensor]:
        """The bytes of each row. Raises CorruptStoreError for a file that was cut."""
        lengths = self.locate(np.arange(self.row_count)).lengths.tolist()
        return [_row_bytes(row, length) for row, length in zip(self._rows, lengths, strict=True)]

    def locate(self, rows: Int64Array) -> Located:
        """See ``RaggedRows.locate``; here the start is the row's number."""
        dims = self.dims.numpy()[rows]
        return Located(rows, dims.prod(axis=1) * self.field.itemsize, dims)

    def view(self, start: int, length: int) -> torch.Tensor:
        """See ``RaggedRows.view``."""
        return self.data[start]


def _row_bytes(row: torch.Tensor | Path, length: int) -> torch.Tensor:
    if isinstance(row, torch.Tensor) and length:
        return torch.from_numpy(bytes_of(row))
    found = torch.empty(length, dtype=torch.uint8, device="cpu")
    if length and isinstance(row, Path):  # tensordict writes no file for a row without elements
        read_file(row, found.numpy())
    return found


class ConcatRaggedColumn(ConcatColumn, RaggedRows):
    """Ragged columns of several stores as one; each part has its own range of starts. See ``RaggedRows``."""

    def __init__(self, field: Field, parts: Sequence[RaggedRows]) -> None:
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

    @property
    def nbytes(self) -> int:
        """The bytes of the parts."""
        return sum(part.nbytes for part in self.parts)
