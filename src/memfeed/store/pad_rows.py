"""Pad rows of varying length, of any dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.schema.codec import Int64Array
from memfeed.system.buffers import Allocator, Fresh

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
