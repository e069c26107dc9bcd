"""The columns of a store, mapped on first use.

Every map is private to the process: an edit through a column never reaches the file, and a page that was edited does
not show later changes of the file. So only finished stores are mapped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memfeed.schema.codec import Int64Array, unpack
from memfeed.schema.fields import Field
from memfeed.schema.values import bytes_of
from memfeed.store.column import Column, ConcatColumn, FileColumn
from memfeed.store.copied_ranges import select_rows
from memfeed.store.mapping import ORDINARY, map_checked, read_file
from memfeed.store.ragged import fixed_file
from memfeed.system.buffers import Allocator


class FixedColumn(FileColumn):
    """A column whose rows all have one shape: ``data`` is [n, *shape], a view of the map.

    If ``row_count`` is None the column has no rows (a model's weights): ``data`` is one tensor, [*shape].
    """

    layout = "dense"

    def __init__(
        self,
        field: Field,
        path: Path,
        row_count: int | None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.field, self.path, self.row_count = field, path, row_count
        self._check = check

    @cached_property
    @ORDINARY
    def data(self) -> torch.Tensor:
        """The whole column, [n, *shape]."""
        shape = self.field.row_shape if self.row_count is None else (self.row_count, *self.field.row_shape)
        raw = map_checked(self.path, math.prod(shape) * self.field.itemsize, self._check)
        return raw.view(self.field.torch_dtype).view(shape)

    def read(self, first: int, out: torch.Tensor) -> bool:
        """See ``Column.read``; ``out`` is [k, *shape], without rows [*shape].

        False if the column is mapped already, as an edit of the map would be missed, or if ``out`` is not contiguous
        memory of the CPU.
        """
        if self.in_memory or "data" in self.__dict__ or out.device.type != "cpu":
            return False
        if not out.is_contiguous() or out.is_conj() or out.is_neg():
            return False
        torch.autograd.graph.increment_version(out)  # as copy_ does
        try:
            read_file(self.path, bytes_of(out.detach()), first * self.field.row_bytes)
        finally:
            self._check()
        return True

    @property
    def address(self) -> int:
        """See ``FileColumn.address``."""
        return self.data.data_ptr()

    @property
    def whole(self) -> torch.Tensor:
        """See ``Column.whole``."""
        return self.data

    def places(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See ``FileColumn.places``."""
        return rows * self.field.row_bytes, np.full(len(rows), self.field.row_bytes)

    def read_row(self, row: int) -> Any:
        """See ``Column.read_row``."""
        return unpack(self.field, self.data[row].clone())

    def gather_into(self, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """See ``Column.gather_into``."""
        return select_rows(self.data, torch.from_numpy(rows), out)

    def joined(self, field: Field, columns: Sequence[Any]) -> Column:
        """See ``Column.joined``."""
        return ConcatFixedColumn(field, columns)

    def switch_to_committed(self, root: Path, check: Callable[[], None]) -> None:
        """Let this column of a build be that of the finished store at ``root``."""
        self.path, self._check = fixed_file(root, self.field), check


class InMemoryColumn(FixedColumn):
    """A column that is a tensor in memory, [n, *shape]."""

    in_memory = True

    def __init__(self, field: Field, data: torch.Tensor) -> None:
        super().__init__(field, Path(), len(data))
        self.data = data


class JsonColumn(Column):
    """Rows that are Python values in memory, those of a NonTensorStack of tensordict."""

    layout = "values"
    in_memory = True

    def __init__(self, field: Field, values: list[object]) -> None:
        self.field, self.values, self.row_count = field, values, len(values)

    @property
    def whole(self) -> list[object]:
        """See ``Column.whole``."""
        return self.values

    def read_row(self, row: int) -> object:
        """See ``Column.read_row``."""
        return self.values[row]

    def leaf(self, rows: Int64Array, allocator: Allocator, base_rows: Int64Array | None = None) -> list[object]:
        """See ``Column.leaf``."""
        return [self.values[row] for row in rows]

    def joined(self, field: Field, columns: Sequence[Any]) -> Column:
        """See ``Column.joined``."""
        return JsonColumn(field, [value for column in columns for value in column.values])


class ComputedColumn(Column):
    """A column whose rows, all of one shape, are put together when they are read: windows, packed blocks."""

    layout = "dense"
    row_count: int

    def __init__(self, field: Field, row_count: int) -> None:
        self.field, self.row_count = field, row_count

    def joined(self, field: Field, columns: Sequence[Any]) -> Column:
        """See ``Column.joined``."""
        return ConcatFixedColumn(field, columns)


_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes by their size in bytes. torch copies rows of these by an index, but none of uint16, uint64 or float8."""


class ConcatFixedColumn(ConcatColumn, ComputedColumn):
    """Fixed columns of several stores as one."""

    def gather_into(self, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """See ``Column.gather_into``."""
        for part, positions, part_rows in self.by_part(rows):
            if len(positions) == len(rows):
                return part.gather_into(part_rows, out)  # type: ignore[no-any-return]
            here = part.gather_into(part_rows, out.new_empty(len(positions), *out.shape[1:]))
            whole = _INTS.get(out.itemsize, out.dtype)
            out.view(whole).index_copy_(0, torch.from_numpy(positions), here.view(whole))
        return out


class RowSubsetColumn(ConcatFixedColumn):
    """Some rows of a fixed column, in memory: ``data`` [m, *shape] has row ``kept[i]`` (ascending, int64 [m]) at i."""

    def __init__(self, field: Field, data: torch.Tensor, kept: Int64Array) -> None:
        super().__init__(field, [InMemoryColumn(field, data)])
        self._kept = kept

    def by_part(self, rows: Int64Array) -> list[tuple[Any, Int64Array, Int64Array]]:
        """Return the one part, the positions of all ``rows``, and their rows in ``data``."""
        return [(self.parts[0], np.arange(len(rows)), np.searchsorted(self._kept, rows))]
