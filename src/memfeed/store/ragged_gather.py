"""Gather located rows of one column whose rows differ in size, in the form that a batch has them, or one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.errors import RowError
from memfeed.schema import codec
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import HEAP_OF_BYTES
from memfeed.schema.jagged import RaggedList, SharedOffsets, batch_shape, jagged_batches
from memfeed.store.columns import INTS, Column
from memfeed.store.ragged import Located
from memfeed.store.ragged_columns import RaggedRows
from memfeed.system.buffers import Allocator, Fresh


def gather_jagged(
    column: RaggedRows, located: Located, batch_size: int, allocator: Allocator, shared: SharedOffsets
) -> list[torch.Tensor]:
    """Return rows as nested tensors of ``batch_size`` rows each; see ``jagged_batches``."""
    flat = _gather_flat(column, located, batch_size, allocator)
    return jagged_batches(flat, located.dims[:, column.field.ragged_dim], batch_size, column.field, shared)


def gather_padded(
    column: RaggedRows, located: Located, batch_size: int, value: Any, allocator: Allocator, mask_allocator: Allocator
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return rows as padded tensors of ``batch_size`` rows each, and their masks; see ``pad_rows``."""
    field = column.field
    flat = _gather_flat(column, located, batch_size, Fresh())
    lengths = located.dims[:, field.ragged_dim].reshape(-1 if batch_size else 1, batch_size)
    shapes = [batch_shape(field, total) for total in lengths.sum(axis=1).tolist()]
    parts = zip(torch.split(flat, [*map(math.prod, shapes)]), shapes, lengths, strict=True)
    padded, masks = zip(
        *(
            pad_rows(part.view(shape), of_batch, value, allocator, mask_allocator, field.ragged_dim)
            for part, shape, of_batch in parts
        ),
        strict=True,
    )
    return list(padded), list(masks)


def gather_list(column: RaggedRows, located: Located, allocator: Allocator) -> Any:
    """Return rows as a list, with None for those that are None; rows of one shape as a tensor [k, *shape]."""
    field = column.field
    if field.kind in HEAP_OF_BYTES:
        ranges = zip(located.starts.tolist(), located.lengths.tolist(), strict=True)
        encoded = [None if length < 0 else column.view(start, length).numpy().tobytes() for start, length in ranges]
        return [None if data is None else codec.decode_bytes(field, data) for data in encoded]
    present = located.part(located.lengths >= 0) if field.optional else located
    flat = _gather_in_turn(column, present, allocator)
    if field.kind == "fixed":  # rows of one shape, each in a file of its own
        return flat.view(len(located.lengths), *field.row_shape)
    rows = iter(torch.split(flat, (present.lengths // field.itemsize).tolist()))
    shapes = located.dims[:, : len(field.shape)].tolist()
    return [
        next(rows).view(shape) if length >= 0 else None
        for shape, length in zip(shapes, located.lengths.tolist(), strict=True)
    ]


def view_rows(column: RaggedRows, located: Located, own: Callable[[], Any]) -> RaggedList:
    """Return rows, all present, as views of the map; ``own`` returns them copied."""
    dtype = column.field.torch_dtype
    ranges = zip(located.starts.tolist(), located.lengths.tolist(), located.dims.tolist(), strict=True)
    return RaggedList((column.view(start, length).view(dtype).view(shape) for start, length, shape in ranges), own)


def _gather_in_turn(column: RaggedRows, located: Located, allocator: Allocator) -> torch.Tensor:
    """Return rows, all present, one after another in one flat tensor."""
    field, total = column.field, located.nbytes
    flat = allocator.allocate((total // field.itemsize,), field.torch_dtype)
    if total:
        column.copy(located.starts, located.lengths, flat.view(torch.uint8).numpy())
    return flat


def _gather_flat(column: RaggedRows, located: Located, batch_size: int, allocator: Allocator) -> torch.Tensor:
    """Return rows of a jagged column in one flat tensor: batches in turn, as ``batch_shape`` says."""
    field = column.field
    if math.prod(batch_shape(field, 1)[: field.ragged_dim]) == 1:
        return _gather_in_turn(column, located, allocator)
    flat = allocator.allocate((located.nbytes // field.itemsize,), field.torch_dtype)
    if located.nbytes:
        _copy_side_by_side(column, located, batch_size, flat)
    return flat


def _copy_side_by_side(column: RaggedRows, located: Located, batch_size: int, flat: torch.Tensor) -> None:
    """Copy rows into ``flat``, batch by batch; the rows of a batch are side by side along the dim that varies."""
    field, end = column.field, 0
    dtype = INTS.get(field.itemsize, field.torch_dtype)  # torch joins tensors of a few dtypes only
    for first in range(0, len(located.starts), batch_size):
        batch = located.part(slice(first, first + batch_size))
        shape = batch_shape(field, int(batch.dims[:, field.ragged_dim].sum()))
        begin, end = end, end + math.prod(shape)
        # not views of the column: one with a file per row would map each of them
        read = torch.empty(end - begin, dtype=dtype, device="cpu")
        column.copy(batch.starts, batch.lengths, read.view(torch.uint8).numpy())
        rows = torch.split(read, (batch.lengths // field.itemsize).tolist())
        shaped = [row.view(shape) for row, shape in zip(rows, batch.dims.tolist(), strict=True)]
        torch.cat(shaped, dim=field.ragged_dim, out=flat[begin:end].view(dtype).view(shape))


_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def raw(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a contiguous tensor as an array that NumPy can copy, whatever its dtype; they share memory."""
    flat = tensor.reshape(-1).view(torch.uint8).numpy()  # a dim of 1 may have any stride, which ``view`` refuses
    array: NDArray[Any] = flat.view(_RAW[tensor.itemsize]).reshape(tuple(tensor.shape))
    return array


def pad_rows(
    flat: torch.Tensor, lengths: Int64Array, value: Any, allocator: Allocator, mask_allocator: Allocator, dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of ``lengths`` [k] as one tensor, [k, longest, ...] for the ``dim`` 0.

    The rows are side by side along ``dim`` of ``flat``, [sum, ...] for 0. ``value`` fills up shorter rows. Also returns
    the mask, bool [k, longest], which is True where values are real. The memory comes from the two allocators.
    """
    if dim:
        first = flat.movedim(dim, 0).contiguous()
        padded, mask = pad_rows(first, lengths, value, Fresh(), mask_allocator)
        moved = padded.movedim(1, dim + 1)
        return allocator.allocate(tuple(moved.shape), flat.dtype).copy_(moved), mask
    longest = int(lengths.max(initial=0))
    padded = allocator.allocate((len(lengths), longest, *flat.shape[1:]), flat.dtype)
    mask = mask_allocator.allocate((len(lengths), longest), torch.bool)
    np.less(np.arange(longest), lengths[:, None], out=mask.numpy())
    if padded.numel():
        array, is_real = raw(padded), mask.numpy()
        array[~is_real] = raw(torch.full((1,), value, dtype=flat.dtype, device="cpu"))[0]
        array[is_real] = raw(flat.contiguous())
    return padded, mask


class RaggedView(Sequence[Any]):
    """The rows of a ragged column, each a view of the map (str, bytes and json: decoded)."""

    def __init__(self, column: Column, rows: Int64Array, owner: object) -> None:
        self._column, self._rows, self._owner = column, rows, owner  # a temporary store lives as long as its views

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return RaggedView(self._column, self._rows[which], self._owner)
        try:
            row = int(self._rows[which])
        except IndexError:
            raise RowError(f"found row {which}; expected at most {len(self) - 1}") from None
        return self._column.view_row(row)
