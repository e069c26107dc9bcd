"""The byte ranges of rows in the files of a store, and their chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from memfeed.building.unit_queue import RowUnits, first_uses
from memfeed.remote.ranges import MOST_CHUNKS, ChunkTable
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field, Schema
from memfeed.store.column import Column
from memfeed.store.ragged import column_files, record_sizes
from memfeed.store.row_supply import ReadRequest

Places = Iterator[tuple[str, Int64Array, Int64Array]]
"""Files, the byte at which each row begins, and the bytes of each row, int64 [k]."""


class RowByteRanges:
    """The places of rows. A ragged column says where its rows lie once the bytes of start and dims are there.

    Args:
        schema: the fields of the store.
        row_count: its rows.
        table: its chunks.
        column: returns the column of a field, by its index.
        are_absent: which of some chunks (int64 [k]) are not there, bool [k].
    """

    def __init__(
        self,
        schema: Schema,
        row_count: int,
        table: ChunkTable,
        column: Callable[[int], Column],
        are_absent: Callable[[Int64Array], npt.NDArray[np.bool_]],
    ) -> None:
        self._schema, self._table, self._column, self._are_absent = schema, table, column, are_absent
        self._names = [list(column_files(field, row_count)) for field in schema]

    def _fields(self, reader: ReadRequest) -> Iterator[tuple[int, Field]]:
        chosen: Sequence[int] = range(len(self._schema)) if reader.fields is None else reader.fields
        return ((index, self._schema.fields[index]) for index in chosen)

    def fixed(self, reader: ReadRequest, rows: Int64Array) -> Places:
        """Yield the places of rows in fixed columns."""
        for index, field in self._fields(reader):
            if field.kind == "fixed":
                yield self._names[index][0], rows * field.row_bytes, np.full(len(rows), field.row_bytes)

    def _offsets(self, reader: ReadRequest, rows: Int64Array) -> Places:
        """Yield the places of the start and dims of rows."""
        for _, field in self._fields(reader):
            for name, size in record_sizes(field).items():
                if size is not None and field.kind != "fixed":
                    yield name, rows * size, np.full(len(rows), size)

    def elements(self, reader: ReadRequest, rows: Int64Array) -> Places:
        """Yield the places of rows in heaps. Their start and dims must be there."""
        for index, field in self._fields(reader):
            if field.kind != "fixed":
                located = self._column(index).locate(rows)
                yield self._names[index][2], located.starts, located.lengths

    def offset_chunks(self, reader: ReadRequest, rows: Int64Array) -> Int64Array:
        """Return the chunks of the start and dims of rows, each once; small files are taken whole."""
        found = [np.empty(0, np.int64)]
        for name, starts, lengths in self._offsets(reader, rows):
            first, last = self._table.of_file(name)
            is_small = last - first <= MOST_CHUNKS
            found.append(np.arange(first, last) if is_small else self._table.of_places(name, starts, lengths))
        return first_uses(np.concatenate(found))

    def record_chunks(self, reader: ReadRequest, rows: Int64Array) -> Int64Array:
        """Return the chunks of what has one size in all rows: start and dims, and fixed columns; each once."""
        fixed = [self._table.of_places(*place) for place in self.fixed(reader, rows)]
        return np.concatenate([self.offset_chunks(reader, rows), *fixed])

    def element_chunks(self, reader: ReadRequest, rows: Int64Array) -> Int64Array:
        """Return the chunks of ``elements``, each once."""
        found = [self._table.of_places(*place) for place in self.elements(reader, rows)]
        return first_uses(np.concatenate([np.empty(0, np.int64), *found]))

    def has_elements(self, reader: ReadRequest) -> bool:
        """Return True if a column of the reader is ragged."""
        return any(field.kind != "fixed" for _, field in self._fields(reader))

    def chunks(self, reader: ReadRequest, rows: Int64Array) -> RowUnits:
        """Return the chunks of rows: those of their records, and as soon as these are there those of heaps."""
        rows = rows.astype(np.int64, copy=False)
        records = self.record_chunks(reader, rows)
        if not self.has_elements(reader):
            return RowUnits(records, True)
        if self._are_absent(records).any():
            return RowUnits(records, False)
        return RowUnits(np.concatenate([records, self.element_chunks(reader, rows)]), True)
