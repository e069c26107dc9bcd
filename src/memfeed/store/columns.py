"""The base classes of columns, and the columns of a store, mapped on first use.

Every map is private to the process: an edit through a column never reaches the file, and a page that was edited does
not show later changes of the file. So only finished stores are mapped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from memfeed.schema import codec
from memfeed.schema.codec import Int64Array, unpack
from memfeed.schema.fields import Field
from memfeed.schema.values import bytes_of
from memfeed.store.copied_ranges import select_rows
from memfeed.store.ragged import Located, fixed_file
from memfeed.system.buffers import Allocator
from memfeed.system.mapped_memory import ORDINARY, map_checked, read_file


class Column:
    """The values of one field, for all rows of a store; None as ``row_count`` if there are no rows (a model's weights).

    ``layout`` says how a batch is gathered: "dense" rows into a tensor, "ragged" rows after they were located, "values"
    as a list. ``offsets`` are those of the windows, int64 [steps], of a column of windows or of their mask, and
    ``packing`` is the one of a column of a packed view: None for any other.
    """

    field: Field
    row_count: int | None
    layout: Literal["dense", "ragged", "values"]
    in_memory = False
    gives_views = False  # rows can be read as views of one map
    offsets: Int64Array | None = None
    packing: Any = None  # a `memfeed.store.packed.Packing`
    why_mapped = ""  # why a loader cannot keep the rows in another place

    @property
    def nbytes(self) -> int:
        """The bytes of all rows on the disk."""
        return (1 if self.row_count is None else self.row_count) * self.mean_row_bytes

    @property
    def mean_row_bytes(self) -> int:
        """The average bytes of a row in a batch; 0 where they are not known, and for values."""
        return self.field.row_bytes if self.layout == "dense" else 0

    @property
    def kept_in(self) -> str:
        """The place of the rows: "mapped", "memory" or "files"."""
        return "memory" if self.in_memory else "mapped"

    @property
    def whole(self) -> Any:
        """All rows without a copy: a tensor [n, *shape], or a list; None where rows are found or made one by one."""
        return None

    # --- rows

    def read_row(self, row: int) -> Any:
        """Return one row as the sample had it, in new memory."""
        out = torch.empty((1, *self.field.row_shape), dtype=self.field.torch_dtype, device="cpu")
        return codec.unpack(self.field, self.gather_into(np.array([row]), out)[0])

    def view_row(self, row: int) -> Any:
        """Return one row, as a view of the map where there is one."""
        return self.read_row(row)

    def read(self, first: int, out: torch.Tensor) -> bool:
        """Fill ``out`` with the rows from ``first`` by reading the file. Return False if that cannot be done."""
        return False

    def leaf(self, rows: Int64Array, allocator: Allocator, base_rows: Int64Array | None = None) -> Any:
        """Return the leaf of a batch of ``rows``, in memory of ``allocator``; ``base_rows`` if they are known."""
        out = allocator.allocate((len(rows), *self.field.row_shape), self.field.torch_dtype)
        return self.gather_into(rows, out) if base_rows is None else self.gather_windows(base_rows, out)

    def gather_into(self, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """Write ``rows`` (int [k]) of kind "fixed" into ``out``, [k, *shape] and contiguous, and return it."""
        raise NotImplementedError

    def locate(self, rows: Int64Array) -> Located:
        """Return where ragged rows lie. Raises CorruptStoreError for a row outside the column's file."""
        raise NotImplementedError

    def files(self, begin: int = 0) -> Iterator[FileRows]:
        """Yield the files that hold rows, unless each row has one of its own; the first row is number ``begin``."""
        return iter(())

    @property
    def stored(self) -> Column:
        """The column as it is on the disk: this one, unless its rows are compressed."""
        return self

    # --- columns made of others

    @property
    def base(self) -> Column:
        """The column whose rows a row is made of: the column itself, unless its rows are windows."""
        return self

    def base_rows(self, rows: Int64Array) -> Int64Array:
        """Return the rows of ``base`` that ``rows`` (int [k]) are made of; of windows int64 [k, steps]."""
        return rows

    def rows_needed(self, rows: Int64Array) -> Int64Array:
        """Return the rows of ``base`` without which ``rows`` cannot be read, each once."""
        return rows

    def gather_windows(self, base_rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """Write the rows that are made of ``base_rows`` into ``out``, as ``gather_into`` does."""
        return self.gather_into(base_rows, out)

    def over(self, base: Column) -> Column:
        """Return this column over another ``base`` of the same rows."""
        return base

    def placed_bytes(self, rows: Int64Array | None) -> int | None:
        """Return the bytes of ``rows`` (None: all) in another place of a loader; None if they cannot be placed."""
        if self.field.kind != "fixed" or self.why_mapped:
            return None
        return (self.row_count or 0 if rows is None else len(rows)) * self.field.row_bytes or None

    def joined(self, field: Field, columns: Sequence[Any]) -> Column:
        """Return the columns of several stores, of one layout, as one; this is the first of them."""
        return ConcatFixedColumn(field, columns)


class FileColumn(Column):
    """A column whose rows lie in one file, and are mapped together."""

    gives_views = True
    path: Path

    @property
    def address(self) -> int:
        """The address at which the rows are mapped."""
        raise NotImplementedError

    def places(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return where rows start in the file, and how long they are, both in bytes."""
        raise NotImplementedError

    def files(self, begin: int = 0) -> Iterator[FileRows]:
        """See ``Column.files``."""
        if not self.in_memory and self.nbytes:
            yield FileRows(self, begin, self.row_count or 0, self.places)


@dataclass(frozen=True)
class FileRows:
    """The rows of a column that lie in one file, that of ``column``.

    Args:
        begin: the number of the first of these rows among all rows of the column.
        row_count: the number of these rows.
        places: see ``FileColumn.places``.
        base_rows: for a column of windows, see ``Column.base_rows``.
        shares_pages: a page of the file may hold other rows too, though rows are large.
    """

    column: FileColumn
    begin: int
    row_count: int
    places: Callable[[Int64Array], tuple[Int64Array, Int64Array]]
    base_rows: Callable[[Int64Array], Int64Array] | None = None
    shares_pages: bool = False

    @property
    def row_bytes(self) -> int:
        """The average bytes of a row."""
        return self.column.nbytes // max(self.row_count, 1)

    def within(self, ids: Int64Array) -> Int64Array:
        """Return the rows of the file that these rows of the column need; with windows, each once."""
        rows = ids.astype(np.int64) if self.base_rows is None else np.unique(self.base_rows(ids.astype(np.int64)))
        rows = rows - self.begin
        return rows[(rows >= 0) & (rows < self.row_count)]


class ConcatColumn(Column):
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

    @property
    def kept_in(self) -> str:
        """The places of the parts."""
        return ", ".join(sorted({part.kept_in for part in self.parts}))

    def files(self, begin: int = 0) -> Iterator[FileRows]:
        """See ``Column.files``."""
        for part, first in zip(self.parts, self.begins.tolist(), strict=False):
            yield from part.files(begin + first)


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


INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes by their size in bytes. torch copies rows of these by an index, but none of uint16, uint64 or float8."""


class ConcatFixedColumn(ConcatColumn, ComputedColumn):
    """Fixed columns of several stores as one."""

    def gather_into(self, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """See ``Column.gather_into``."""
        for part, positions, part_rows in self.by_part(rows):
            if len(positions) == len(rows):
                return part.gather_into(part_rows, out)  # type: ignore[no-any-return]
            here = part.gather_into(part_rows, out.new_empty(len(positions), *out.shape[1:]))
            whole = INTS.get(out.itemsize, out.dtype)
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
