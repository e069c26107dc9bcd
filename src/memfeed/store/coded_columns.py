"""Columns whose rows are compressed: each row a blob in the heap of a column of bytes, decoded when it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from memfeed.codecs import Codec
from memfeed.errors import CorruptStoreError
from memfeed.schema import codec
from memfeed.schema.codec import ROW_BYTES, Int64Array
from memfeed.store.columns import Column, ComputedColumn, FileRows
from memfeed.store.ragged import Located
from memfeed.store.ragged_columns import RaggedColumn, RaggedRows
from memfeed.system import share

HEAVY_BYTES = 4 << 20  # decoded: they take the fastest codec a millisecond
SAMPLED_ROWS = 8  # whose sizes give an average
_DAMAGED = "the store is damaged, run verify()"


def decoded_column(column: Any) -> Any:
    """Return a column as batches have it: with its rows decoded, if it is coded."""
    if column.field.coding is None:
        return column
    if column.field.coding.kind == "fixed" and not column.field.optional:
        return CodedFixedColumn(column)
    return CodedRaggedColumn(column)


class CodedColumn(Column):
    """The base of coded columns: the blobs of its rows are in the heap of ``stored``."""

    def __init__(self, stored: RaggedColumn) -> None:
        self._heap, self.field, self.row_count = stored, stored.field.decoded, stored.row_count
        self._dtype = codec.array_dtype(self.field)

    @cached_property
    def codec(self) -> Codec:
        """The codec. Raises ModuleNotFoundError if its library is not installed."""
        return codec.codec_of_field(self._heap.field)

    def _blobs(self, located: Located) -> list[npt.NDArray[np.uint8]]:
        """Return the blobs of some rows, in the map of the heap; an empty one for None."""
        heap, spans = self._heap.heap.numpy(), zip(located.starts.tolist(), located.lengths.tolist(), strict=True)
        return [heap[start : start + max(length, 0)] for start, length in spans]

    def _shape(self, row: int, blob: npt.NDArray[np.uint8]) -> tuple[int, ...]:
        """Return the shape of a row. Raises CorruptStoreError if its field admits no such row."""
        expected = self.field.shape
        try:
            shape = self.codec.shape(blob)
            if len(shape) != len(expected) or any(
                dim not in (None, found) for dim, found in zip(expected, shape, strict=True)
            ):
                raise CorruptStoreError(
                    f"found a row of shape {list(shape)}; expected {self.field.describe()}: {_DAMAGED}"
                )
            if math.prod(shape) * self._dtype.itemsize >= ROW_BYTES:
                raise CorruptStoreError(f"found shape {list(shape)}; expected less than 4 GiB: {_DAMAGED}")
        except CorruptStoreError as error:
            raise self._named(row, error) from None
        return shape

    def _decode(self, row: int, blob: npt.NDArray[np.uint8], out: npt.NDArray[Any]) -> None:
        """Write row number ``row`` into ``out``, which has its shape and dtype."""
        try:
            self.codec.decode(blob, out)
        except CorruptStoreError as error:
            raise self._named(row, error) from None

    def _named(self, row: int, error: CorruptStoreError) -> CorruptStoreError:
        """Return the error of a damaged blob with its row and field."""
        return CorruptStoreError(f"{self._heap.path}, row {row} of field {self.field.name}: {error.args[0]}")

    def blobs(self, rows: Int64Array) -> list[torch.Tensor]:
        """Return the blobs of some rows, uint8 [bytes] each, in the map of the heap: nobody may write to them.

        Raises CorruptStoreError for one that is cut off, or whose header has a shape that the field does not admit.
        """
        located = self._heap.locate(rows)
        for row, blob in zip(rows.tolist(), self._blobs(located), strict=True):
            self._shape(row, blob)
            try:
                self.codec.check(blob)
            except CorruptStoreError as error:
                raise self._named(row, error) from None
        return [self._heap.view(*span) for span in zip(located.starts.tolist(), located.lengths.tolist(), strict=True)]

    @property
    def stored(self) -> Column:
        """See ``Column.stored``."""
        return self._heap

    def switch_to_committed(self, root: Path, check: Callable[[], None]) -> None:
        """See ``FixedColumn.switch_to_committed``."""
        self._heap.switch_to_committed(root, check)  # type: ignore[attr-defined]

    def files(self, begin: int = 0) -> Iterator[FileRows]:
        """See ``Column.files``."""
        for rows in self._heap.files(begin):
            yield replace(rows, begin=begin)

    @property
    def nbytes(self) -> int:
        """The bytes of all blobs."""
        return self._heap.nbytes


class CodedFixedColumn(CodedColumn, ComputedColumn):
    """Compressed rows of one shape. In another place than the map a loader keeps them decoded."""

    def gather_into(self, rows: Int64Array, out: torch.Tensor) -> torch.Tensor:
        """See ``Column.gather_into``. Blobs are decoded in the threads of the caller, straight into ``out``."""
        blobs, array = self._blobs(self._heap.locate(rows)), codec.as_array(out)

        def decode(begin: int, end: int) -> None:
            for index in range(begin, end):
                self._decode(int(rows[index]), blobs[index], array[index, ...])

        share.share(len(rows), decode, kind="decode", work=out.nbytes, is_heavy=out.nbytes >= HEAVY_BYTES)
        return out


class CodedRaggedColumn(CodedColumn, RaggedRows):
    """Compressed rows of different shapes, or such that may be None.

    The start of a row is its number times `ROW_BYTES`: a place within a decoded row is added to it.
    """

    def locate(self, rows: Int64Array) -> Located:
        """See ``RaggedRows.locate``; the dims are read from the beginning of each blob."""
        stored, width = self._heap.locate(rows), max(self.field.rank, 1)
        dims = np.ones((len(rows), width), np.int64)
        dims[stored.lengths < 0] = -1
        if self.field.rank:
            for index, (row, blob) in enumerate(zip(rows.tolist(), self._blobs(stored), strict=True)):
                if dims[index, 0] >= 0:
                    dims[index] = self._shape(row, blob)
        lengths = np.where(dims[:, 0] < 0, -1, dims.prod(axis=1) * self.field.itemsize)
        return Located(rows.astype(np.int64) * ROW_BYTES, lengths, dims)

    def copy(self, starts: Int64Array, lengths: Int64Array, out: npt.NDArray[np.uint8]) -> None:
        """See ``RaggedRows.copy``. Blobs are decoded in the threads of the caller, whole rows straight into ``out``."""
        rows, first_bytes = np.divmod(starts, ROW_BYTES)
        blobs, ends, itemsize = self._blobs(self._heap.locate(rows)), np.cumsum(lengths), self._dtype.itemsize

        def decode(begin: int, end: int) -> None:
            for index in range(begin, end):
                row, blob, first = int(rows[index]), blobs[index], int(first_bytes[index])
                shape, place = self._shape(row, blob), out[int(ends[index] - lengths[index]) : int(ends[index])]
                whole = place
                if first or len(place) != math.prod(shape) * itemsize:
                    whole = np.empty(math.prod(shape) * itemsize, np.uint8)
                self._decode(row, blob, whole.view(self._dtype).reshape(shape))
                if whole is not place:
                    place[:] = whole[first : first + len(place)]

        share.share(len(starts), decode, kind="decode", work=len(out), is_heavy=len(out) >= HEAVY_BYTES)

    def view(self, start: int, length: int) -> torch.Tensor:
        """See ``RaggedRows.view``: here new memory."""
        out = torch.empty(length, dtype=torch.uint8, device="cpu")
        self.copy(np.array([start]), np.array([length]), out.numpy())
        return out

    @property
    def mean_row_bytes(self) -> int:
        """The average bytes of a few rows, decoded."""
        if not self.row_count:
            return 0
        rows = np.unique(np.linspace(0, self.row_count - 1, SAMPLED_ROWS).astype(np.int64))
        rows = rows[self._heap.locate(rows).lengths > 0]  # a row that is not there yet has no blob
        return math.ceil(self.locate(rows).lengths.mean()) if len(rows) else 0
