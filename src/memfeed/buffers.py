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

import numpy as np
import numpy.typing as npt
import torch

IDLE = 4  # idle buffers kept per pool; what is lent out is not bounded, so list(loader) works


class Pool:
    """Buffers for batches of one column. ``lease`` never blocks and takes no lock.

    A slab comes back by one ``deque.append`` in a finalizer: a lock there would deadlock when the garbage collector
    runs inside it.
    """

    def __init__(self) -> None:
        self._idle: deque[npt.NDArray[np.uint8]] = deque(maxlen=IDLE)
        self._pid = os.getpid()

    def lease(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised CPU tensor; its memory returns when nothing shares it any more."""
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        if self._pid != os.getpid():  # a forked child shares no buffers with its parent's pool
            self._idle, self._pid = deque(maxlen=IDLE), os.getpid()
        slab = self._fitting(size)
        if slab is None:  # ragged batches differ: a slab serves sizes near its own
            slab = np.empty(size + size // 8 if self._idle else size, np.uint8)
        lent = slab[:size]
        weakref.finalize(lent, self._idle.append, slab).atexit = False
        return torch.from_numpy(lent).view(dtype).view(tuple(shape))

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
        """An uninitialised CPU tensor."""
        return torch.empty(tuple(shape), dtype=dtype)
