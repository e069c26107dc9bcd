"""Memory for batches: new memory, or buffers that are used again when the last tensor that shares them is freed.

A new output per batch costs its page faults each time (a quarter of the gather's speed for 200 KB rows), so buffers are
used again; but memory that a user can still see is never written.
"""

from __future__ import annotations

import math
import mmap
import operator
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

MOST_IDLE = 4  # idle buffers kept per pool; buffers in use are not limited, so list(loader) works
HUGE_PAGE_BYTES = 4 << 20  # from this size on NumPy asks the system for huge pages (Linux, madvise)

# dtypes that numpy can lay over a buffer in one step; others (bfloat16, float8) are viewed by torch, which takes longer
_BY_NUMPY = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32)
_NUMPY = {
    dtype: torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    for dtype in (*_BY_NUMPY, torch.float64, torch.complex64)
}

_fork_count = 0


def _after_fork() -> None:
    global _fork_count
    _fork_count += 1


os.register_at_fork(after_in_child=_after_fork)


@torch.inference_mode(False)  # it outlives the caller's block
def shared_number(value: int) -> torch.Tensor:
    """Return an int64 [] in memory that worker processes share.

    Where /dev/shm is full, only forked processes share it; to send it to another process raises what torch raises.
    """
    number = torch.full((), value, dtype=torch.int64, device="cpu")
    try:
        number.share_memory_()  # type: ignore[no-untyped-call]
    except RuntimeError:
        number = torch.frombuffer(mmap.mmap(-1, number.nbytes), dtype=torch.int64)[0].fill_(value)
    return number


class Allocator(Protocol):
    """Gives memory for batches."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous, uninitialised CPU tensor that nobody else uses."""


class Fresh:
    """New memory for every call, which belongs to the caller; in huge pages if it is large.

    The kernel gives new memory page by page, and for a batch of images that costs more than the work on it: crop, flip
    and normalise of 64 images of 3 x 224 x 224 took 12 ms into memory of torch.empty, 4.4 ms into this, and 3.3 ms into
    a buffer used before.
    """

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See ``Allocator.allocate``."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes < HUGE_PAGE_BYTES:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        return torch.from_numpy(np.empty(size_bytes, np.uint8)).view(dtype).view(tuple(shape))


class _Lease(weakref.ref[Any]):
    """A reference to an array that is lent, the memory of that array, and the ``extend`` that its callback calls."""

    __slots__ = ("extend", "memory")
    extend: Callable[[Iterable[npt.NDArray[np.uint8]]], None]
    memory: npt.NDArray[np.uint8]


_memory_of = operator.attrgetter("memory")


class Pool:
    """Buffers for batches of one column. ``allocate`` never blocks and takes no lock.

    The pool holds the leases: versions of NumPy differ in whether an array has let go of its base when the references
    to it are called. The callback of a lease takes it out and gives its memory back, by one ``deque.extend``. No Python
    code runs there: a lock would deadlock when the garbage collector runs while it is held, and Ctrl-C in a callback is
    printed and lost.

    Args:
        most_idle: buffers that are kept while nobody uses them.
        least_bytes: of a buffer. One of this size serves all smaller requests; pages that nobody touches cost nothing.
    """

    def __init__(self, most_idle: int = MOST_IDLE, least_bytes: int = 0) -> None:
        self._most_idle, self._least_bytes = most_idle, least_bytes
        self._fork_count = _fork_count
        self._idle: deque[npt.NDArray[np.uint8]] = deque(maxlen=most_idle)
        self._lent: dict[int, _Lease] = {}

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor whose memory comes back when nothing shares it any more. See ``Allocator.allocate``."""
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        if self._fork_count != _fork_count:  # a forked child shares no buffers with its parent's pool
            self.__init__(self._most_idle, self._least_bytes)  # type: ignore[misc]
        try:
            # most often the buffer that came back last fits
            last = self._idle[-1].size
            is_fitting = last == size or size < last == self._least_bytes
            memory = self._idle.pop() if is_fitting else self._take_fitting(size)
        except IndexError:
            memory = None
        if memory is None:  # ragged batches differ in size: a buffer serves sizes near its own
            memory = np.empty(max(size + size // 8 if self._idle else size, self._least_bytes), np.uint8)
        known = _NUMPY.get(dtype)
        array: npt.NDArray[Any] = np.ndarray(size if known is None else shape, known or np.uint8, memory)
        # every tensor that shares the memory keeps the array alive; weakref.finalize takes three times as long
        key = id(memory)
        lease = _Lease(array, operator.methodcaller("extend", map(_memory_of, map(self._lent.pop, (key,)))))
        lease.extend, lease.memory = self._idle.extend, memory
        self._lent[key] = lease
        tensor = torch.from_numpy(array)
        return tensor if known is not None else tensor.view(dtype).view(tuple(shape))

    def _take_fitting(self, size: int) -> npt.NDArray[np.uint8] | None:
        """Take an idle buffer of ``size`` to twice ``size`` bytes, or of the least size; return None if there is none.

        Buffers of other sizes stay, as the first to be dropped when there are too many. The last batch of an epoch is
        smaller: if it dropped them, the first batch of each epoch would pay for page faults again.
        """
        for _ in range(len(self._idle)):
            try:
                memory = self._idle.pop()
            except IndexError:  # another thread took it
                return None
            if size <= memory.size <= max(2 * size, self._least_bytes):
                return memory
            self._idle.appendleft(memory)
        return None
