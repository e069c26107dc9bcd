"""The base classes of columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from memfeed.schema import codec
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field
from memfeed.store.ragged import Located
from memfeed.system.buffers import Allocator

if TYPE_CHECKING:
    from memfeed.store.document_blocks import Packing


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
    packing: Packing | None = None
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
        raise NotImplementedError


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
