"""The columns of a store that is still being filled: mapped at once, because its files get another path at the commit.

The maps are private to the process, as those of finished stores are. A page that was not edited here shows what other
processes write to the file, and nobody can edit one: `Store.column` waits for the finished store.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from memfeed.errors import CorruptStoreError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field, Schema
from memfeed.store.columns import FixedColumn
from memfeed.store.mapping import ORDINARY, map_descriptor
from memfeed.store.ragged import Located, RaggedFiles, fixed_file, ragged_files
from memfeed.store.ragged_columns import RaggedColumn
from memfeed.system.descriptors import open_read


class GrowingColumn(RaggedColumn):
    """A ragged column of a build. Its heap is mapped again when a row lies behind what was mapped so far."""

    def __init__(self, field: Field, files: RaggedFiles, row_count: int) -> None:
        self._fd = open_read(files.heap)
        weakref.finalize(self, os.close, self._fd)
        super().__init__(field, files, row_count, 0)
        self._map_heap()
        _ = self._arrays  # maps start and dims

    def locate(self, rows: Int64Array) -> Located:
        """See ``RaggedRows.locate``. The rows must be present."""
        try:
            return super().locate(rows)
        except CorruptStoreError:
            if os.fstat(self._fd).st_size <= self.heap_bytes:
                raise
        self._map_heap()
        return super().locate(rows)

    @ORDINARY
    def _map_heap(self) -> None:
        size, heap = self._mapped_heap()
        self.__dict__["heap"] = heap
        if "_arrays" in self.__dict__:
            self.__dict__["_arrays"] = (*self._arrays[:2], heap.numpy())
        self.heap_bytes = size  # last: another thread may locate rows meanwhile

    def _mapped_heap(self) -> tuple[int, torch.Tensor]:
        """Return the size of the heap, and a map of it. A commit may cut it meanwhile, behind its last row."""
        while True:
            size = os.fstat(self._fd).st_size
            try:
                return size, map_descriptor(self._fd, self.path, size)
            except CorruptStoreError:
                if os.fstat(self._fd).st_size >= size:
                    raise

    def switch_to_committed(self, root: Path, check: Callable[[], None]) -> None:
        """See ``FixedColumn.switch_to_committed``: the files are the same under other names."""
        self._map_heap()
        files = ragged_files(root, self.field)
        self.path, self._files, self._check = files.heap, files, check


def growing_columns(root: Path, schema: Schema, row_count: int) -> list[FixedColumn | GrowingColumn]:
    """Return the columns of the build at ``root``, all of them mapped."""
    columns: list[FixedColumn | GrowingColumn] = []
    for field in schema:
        if field.kind == "fixed":
            fixed = FixedColumn(field, fixed_file(root, field), row_count)
            _ = fixed.data
            columns.append(fixed)
        else:
            columns.append(GrowingColumn(field, ragged_files(root, field), row_count))
    return columns
