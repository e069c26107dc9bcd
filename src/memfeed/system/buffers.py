"""Lent memory: a buffer comes back by itself when the last tensor that shares it has died.

A fresh output per batch costs its page faults again (a quarter of the gather's speed for 200 KB rows), so buffers are
used again; but memory that a user can still see is never written.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

HUGE_PAGES_FROM_BYTES = 4 << 20  # as NumPy has it
IDLE = 4  # idle buffers kept per pool; what is lent out is not bounded, so list(loader) works

# what numpy can lay over a buffer at once; other dtypes (bfloat16, float8) are viewed by torch, which takes longer
_BY_NUMPY = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32)
_NUMPY = {dtype: torch.empty(0, dtype=dtype).numpy().dtype for dtype in (*_BY_NUMPY, torch.float64, torch.complex64)}

_forks = 0


def _after_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_after_fork)


class Lender(Protocol):
    """Gives out memory for one batch of one column."""

    def lease(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised CPU tensor."""


class Pool:
    """Buffers for batches of one column. ``lease`` never blocks and takes no lock.

    A slab comes back by one ``deque.append`` in a weak reference's callback: a lock there would deadlock when the
    garbage collector runs inside it.
    """

    def __init__(self) -> None:
        self._forks = _forks
        self._idle: deque[npt.NDArray[np.uint8]] = deque(maxlen=IDLE)
        self._lent: dict[int, tuple[Any, npt.NDArray[np.uint8]]] = {}
        idle, lent = self._idle, self._lent

        def give_back(reference: Any) -> None:
            idle.append(lent.pop(id(reference))[1])

        self._give_back = give_back

    def lease(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised CPU tensor; its memory returns when nothing shares it any more."""
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        if self._forks != _forks:  # a forked child shares no buffers with its parent's pool
            self.__init__()  # type: ignore[misc]
        try:
            slab = self._idle.pop() if self._idle[-1].size == size else self._fitting(size)  # mostly the last one fits
        except IndexError:
            slab = None
        if slab is None:  # ragged batches differ: a slab serves sizes near its own
            slab = np.empty(size + size // 8 if self._idle else size, np.uint8)
        known = _NUMPY.get(dtype)
        array: npt.NDArray[Any] = slab[:size] if known is None else np.ndarray(shape, known, slab)
        # every tensor that shares the memory keeps the array alive; weakref.finalize takes three times as long
        reference = weakref.ref(array, self._give_back)
        self._lent[id(reference)] = reference, slab
        tensor = torch.from_numpy(array)
        return tensor if known is not None else tensor.view(dtype).view(tuple(shape))

    def _fitting(self, size: int) -> npt.NDArray[np.uint8] | None:
        """An idle slab that holds ``size`` bytes and is not far larger; None if there is none.

        Those of other sizes stay, the next to go when there are too many: the last batch of an epoch is smaller, and
        thrown away they would be paged in anew in each epoch, its first batch's too.
        """
        for _ in range(len(self._idle)):
            try:
                slab = self._idle.pop()
            except IndexError:  # another thread took it
                return None
            if size <= slab.size <= 2 * size:
                return slab
            self._idle.appendleft(slab)
        return None


class Fresh:
    """New memory every time, owned by the caller: for single reads, and the reference for ``Pool``."""

    def lease(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialised CPU tensor, from 4 MiB on in huge pages where Linux has them.

        NumPy asks for huge pages (madvise) and torch does not. Fresh memory costs more than a transform: crop, flip and
        normalise of 64 images of 3 x 224 x 224 took 12 ms into memory of torch.empty, 4.4 ms into this, and 3.3 ms into
        a buffer used before.
        """
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes < HUGE_PAGES_FROM_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.from_numpy(np.empty(size_bytes, np.uint8)).view(dtype).view(tuple(shape))
