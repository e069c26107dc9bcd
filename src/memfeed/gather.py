"""Copying the rows of one batch out of the columns into one buffer per column.

``reference`` is the slow, obviously right way; ``Gather`` is the fast one, and a property test compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from memfeed import codec
from memfeed.columns import Column, FixedColumn, Ints, Ragged, Values
from memfeed.schema import HEAP_OF_BYTES


class Lender(Protocol):
    """Gives out memory for one batch of one column."""

    def lease(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised CPU tensor."""


def read_row(column: Column, row: int) -> Any:
    """One row of a column as the sample had it, in memory of its own."""
    field = column.field
    if isinstance(column, FixedColumn):
        return codec.unpack(field, column.data[row].clone())
    if isinstance(column, Values):
        return column.values[row]
    starts, lengths, dims = column.extents(np.array([row]))
    if lengths[0] < 0:
        return None
    raw = column.view(int(starts[0]), int(lengths[0]))
    if field.kind in HEAP_OF_BYTES:
        return codec.decode_bytes(field, raw.numpy().tobytes())
    shape = dims[0, : len(field.shape)].tolist()
    return codec.unpack(field, raw.clone().view(field.torch_dtype).view(shape))


def reference(columns: Sequence[Column], ids: Sequence[int]) -> list[list[Any]]:
    """Each column's rows, read one by one: what every batch must equal before it is stacked."""
    return [[read_row(column, row) for row in ids] for column in columns]


class Gather:
    """Plans once for some columns; a call returns one leaf per column for the rows ``ids``.

    A fixed column gives a tensor [k, *shape], a jagged one a jagged nested tensor, any other a list of k. Tensors
    live in memory leased from ``lenders``, one per column.
    """

    def __init__(self, columns: Sequence[Column], lenders: Sequence[Lender]) -> None:
        self._columns, self._lenders = list(columns), list(lenders)
        self._fixed = [
            (number, column.data, lender, column.field.torch_dtype, column.field.row_shape)
            for number, (column, lender) in enumerate(zip(columns, lenders, strict=True))
            if isinstance(column, FixedColumn)
        ]
        self._others = [number for number, column in enumerate(columns) if not isinstance(column, FixedColumn)]

    def __call__(self, ids: Ints) -> list[Any]:
        """The leaves of one batch; ``ids`` (int64 [k], rows of the columns) must be in range."""
        leaves: list[Any] = [None] * len(self._columns)
        index = torch.from_numpy(ids)
        k = len(ids)
        for number, data, lender, dtype, row_shape in self._fixed:
            leaves[number] = torch.index_select(data, 0, index, out=lender.lease((k, *row_shape), dtype))
        offsets: dict[int, tuple[Ints, torch.Tensor]] = {}
        for number in self._others:
            column = self._columns[number]
            if isinstance(column, Values):
                leaves[number] = [column.values[row] for row in ids]
            else:
                leaves[number] = self._ragged(column, ids, self._lenders[number], offsets)  # type: ignore[arg-type]
        return leaves

    def _ragged(self, column: Ragged, ids: Ints, lender: Lender, offsets: dict[int, tuple[Ints, torch.Tensor]]) -> Any:
        field = column.field
        starts, lengths, dims = column.extents(ids)
        if field.kind in HEAP_OF_BYTES:
            texts = [
                None if n < 0 else column.view(at, n).numpy().tobytes()
                for at, n in zip(starts.tolist(), lengths.tolist(), strict=True)
            ]
            return [None if text is None else codec.decode_bytes(field, text) for text in texts]
        present = lengths >= 0
        total = int(lengths[present].sum())
        flat = lender.lease((total // field.itemsize,), field.torch_dtype)
        if total:
            column.copy(starts[present], lengths[present], flat.view(torch.uint8).numpy())
        if field.kind == "fixed":  # rows of one shape, in pieces
            return flat.view(len(ids), *field.row_shape)
        if field.kind == "list":
            sizes = np.where(present, lengths, 0) // field.itemsize
            shapes = dims[:, : len(field.shape)].tolist()
            parts = torch.split(flat, sizes.tolist())
            return [
                part.view(shape) if here else None
                for part, shape, here in zip(parts, shapes, present.tolist(), strict=True)
            ]
        rows = dims[:, 0]
        group = field.lengths_of
        shared = offsets.get(group) if group is not None else None
        if shared is None or not np.array_equal(shared[0], rows):
            ends = np.zeros(len(rows) + 1, np.int64)
            np.cumsum(rows, out=ends[1:])
            shared = (rows, torch.from_numpy(ends))
            if group is not None:
                offsets[group] = shared
        tail = [dim for dim in field.shape[1:] if dim is not None]
        longest, shortest = (int(rows.max()), int(rows.min())) if len(rows) else (0, 0)
        return torch.nested.nested_tensor_from_jagged(
            flat.view(int(rows.sum()), *tail), shared[1], min_seqlen=shortest, max_seqlen=longest
        )
