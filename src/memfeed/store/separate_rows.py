"""Columns whose rows are tensors of their own, in files or in memory: those of tensordict's lazy stacks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from memfeed.errors import CorruptStoreError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field
from memfeed.schema.values import bytes_of
from memfeed.store.mapping import Place, map_file
from memfeed.store.ragged import Located, dims_width


class SeparateRowsColumn:
    """Rows that are separate tensors, as in tensordict's lazy stacks; each column type says how one is read.

    The field's kind is "fixed" if all rows have one shape.
    """

    in_memory: bool

    def __init__(self, field: Field, shapes: Sequence[tuple[int, ...]]) -> None:
        self.field, self.row_count = field, len(shapes)
        dims = torch.tensor([shape or (1,) for shape in shapes], dtype=torch.int64, device="cpu")
        self.dims = dims.view(self.row_count, dims_width(field))

    def locate(self, rows: Int64Array) -> Located:
        """See ``RaggedRows.locate``; here the start is the row's number."""
        dims = self.dims.numpy()[rows]
        return Located(rows, dims.prod(axis=1) * self.field.itemsize, dims)

    def copy(self, starts: Int64Array, lengths: Int64Array, out: npt.NDArray[np.uint8]) -> None:
        """See ``RaggedRows.copy``."""
        done = 0
        for row, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            if length:  # tensordict writes no file for a row without elements
                out[done : done + length] = self._read(row, length)
                done += length

    def _read(self, row: int, length: int) -> npt.NDArray[np.uint8]:
        raise NotImplementedError

    def view(self, start: int, length: int) -> torch.Tensor:
        """See ``RaggedRows.view``."""
        raise NotImplementedError


class FilePerRowColumn(SeparateRowsColumn):
    """Rows that each have a file of their own, as tensordict writes lazy stacks; read, not mapped."""

    in_memory = False

    def __init__(self, field: Field, places: Sequence[Place], shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__(field, shapes)
        self.places = places

    def _read(self, row: int, length: int) -> npt.NDArray[np.uint8]:
        path, offset = self.places[row]
        read = np.fromfile(path, np.uint8, length, offset=offset)
        if len(read) < length:
            raise CorruptStoreError(
                f"{path}: found {len(read):,} bytes; expected {length:,}: the file was cut after opening"
            )
        return read

    def view(self, start: int, length: int) -> torch.Tensor:
        """See ``RaggedRows.view``; a private map of the row's own file."""
        return map_file(self.places[start].path, length, self.places[start].offset)


class InMemoryRowsColumn(SeparateRowsColumn):
    """Rows that are tensors in memory, each by itself: those of a lazy stack."""

    in_memory = True

    def __init__(self, field: Field, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(field, [tuple(tensor.shape) for tensor in tensors])
        self.tensors = tensors

    def _read(self, row: int, length: int) -> npt.NDArray[np.uint8]:
        return bytes_of(self.tensors[row])

    def view(self, start: int, length: int) -> torch.Tensor:
        """See ``RaggedRows.view``."""
        return torch.from_numpy(bytes_of(self.tensors[start]))
