"""Pad rows of varying length, of any dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.schema.codec import Int64Array
from memfeed.system.buffers import Allocator

_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def raw(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a contiguous tensor as an array that NumPy can copy, whatever its dtype; they share memory."""
    array: NDArray[Any] = tensor.view(torch.uint8).numpy().view(_RAW[tensor.itemsize])
    return array


def pad_rows(
    flat: torch.Tensor, lengths: Int64Array, value: Any, allocator: Allocator, mask_allocator: Allocator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of ``lengths`` [k], one after another in ``flat`` [sum, ...], as one tensor [k, longest, ...].

    ``value`` fills up shorter rows. Also returns the mask, bool [k, longest], which is True where values are real. The
    memory comes from the two allocators.
    """
    longest = int(lengths.max(initial=0))
    padded = allocator.allocate((len(lengths), longest, *flat.shape[1:]), flat.dtype)
    mask = mask_allocator.allocate((len(lengths), longest), torch.bool)
    np.less(np.arange(longest), lengths[:, None], out=mask.numpy())
    if padded.numel():
        array, is_real = raw(padded), mask.numpy()
        array[~is_real] = raw(torch.full((1,), value, dtype=flat.dtype))[0]
        array[is_real] = raw(flat.contiguous())
    return padded, mask
