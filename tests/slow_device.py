"""A device that does its work as late as it may, for tests without a GPU of what waits for what."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

GARBAGE = 0xA5


class _Event:
    def __init__(self, device: SlowDevice, number: int) -> None:
        self._device, self._number = device, number

    def synchronize(self) -> None:
        self._device.run(self._number)


class SlowDevice:
    """Streams (see `memfeed.transfer.streams`) whose work waits until somebody waits for it.

    Its memory is the CPU's, and holds garbage until then: what is read too early, or written over too early, shows.

    Args:
        free, total: bytes that it says it has.
        sees_host: whether it reads page-locked memory by itself.

    ``copies``, ``selects`` and ``locked_bytes`` count what was asked of it, ``arrivals`` are the streams that waited;
    ``stream`` is the caller's; the select of number ``fails_at`` runs out of memory.
    """

    def __init__(self, free: int = 1 << 40, total: int = 1 << 40, sees_host: bool = True) -> None:
        self.device = torch.device("cpu")
        self.free, self.total, self.sees_host = free, total, sees_host
        self.copies = self.selects = self.locked_bytes = self.stream = 0
        self.arrivals: list[int] = []
        self.fails_at: int | None = None
        self.done = 0
        self._queue: deque[Callable[[], Any]] = deque()
        self._lock = threading.Lock()

    def room(self) -> tuple[int, int]:
        """What it was made with."""
        return self.free, self.total

    def count(self) -> int:
        """It is the only one."""
        return 1

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """Ordinary memory, full of garbage."""
        self.locked_bytes += nbytes
        return torch.full((nbytes,), GARBAGE, dtype=torch.uint8)

    def seen_from_device(self, host: torch.Tensor) -> torch.Tensor:
        """The same memory."""
        if not self.sees_host:
            raise RuntimeError("not on this device")
        return host

    def aside(self) -> AbstractContextManager[Any]:
        """There is one queue."""
        return nullcontext()

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """Garbage, until it is waited for."""
        self.copies += 1
        return self._later(source.shape, source.dtype, lambda out: out.copy_(source))

    def select(self, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Garbage, until it is waited for."""
        self.selects += 1
        if self.selects == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        shape = (len(index), *table.shape[1:])
        return self._later(shape, table.dtype, lambda out: torch.index_select(table, 0, index, out=out))

    def mark(self) -> _Event:
        """An event behind all that has been queued."""
        with self._lock:
            return _Event(self, self.done + len(self._queue))

    def current(self) -> object:
        """``stream``."""
        return self.stream

    def arrive(self, event: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Does what was queued before the event."""
        if any(tensor.is_nested for tensor in tensors):
            raise TypeError("found a nested tensor; expected what it consists of")
        self.arrivals.append(self.stream)
        event.synchronize()

    def run(self, number: int) -> None:
        """Does the work of the queue up to this number since the beginning."""
        with self._lock:
            while self.done < number:
                self._queue.popleft()()
                self.done += 1

    def _later(self, shape: Sequence[int], dtype: torch.dtype, work: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        out = torch.empty(tuple(shape), dtype=dtype)
        out.reshape(-1).view(torch.uint8).fill_(GARBAGE)
        with self._lock:
            self._queue.append(lambda: work(out))
        return out
