"""A device that does its work as late as possible, to test without a GPU what waits for what."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

GARBAGE = 0xA5


class _Event:
    def __init__(self, device: SlowDevice, position: int) -> None:
        self._device, self.position = device, position

    def synchronize(self) -> None:
        self._device.run(self.position)


class SlowDevice:
    """Streams (see `memfeed.transfer.streams`) whose work waits until it is waited for.

    Its memory is the CPU's, and holds garbage until the work is done: tests see what is read or overwritten too early.

    Args:
        free, total: bytes of memory that it reports.
        sees_host: True if it can read page-locked memory itself.

    ``copies``, ``selects`` and ``locked_bytes`` count the calls and the bytes; ``waiting_streams`` are the streams that
    waited; ``stream`` is the caller's; the select number ``fails_at`` runs out of memory.
    """

    def __init__(self, free: int = 1 << 40, total: int = 1 << 40, sees_host: bool = True) -> None:
        self.device = torch.device("cpu")
        self.free, self.total, self.sees_host = free, total, sees_host
        self.copies = self.selects = self.locked_bytes = self.stream = 0
        self.waiting_streams: list[int] = []
        self.fails_at: int | None = None
        self.done = 0
        self._queue: deque[Callable[[], Any]] = deque()
        self._lock = threading.Lock()

    def memory_info(self) -> tuple[int, int]:
        """Return the bytes given to the constructor."""
        return self.free, self.total

    def device_count(self) -> int:
        """Return 1."""
        return 1

    def allocate_page_locked(self, nbytes: int) -> torch.Tensor:
        """Return ordinary memory, full of garbage."""
        self.locked_bytes += nbytes
        return torch.full((nbytes,), GARBAGE, dtype=torch.uint8)

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        """Return the same."""
        return self.allocate_page_locked(nbytes)

    def device_view(self, host: torch.Tensor) -> torch.Tensor:
        """Return the same memory."""
        if not self.sees_host:
            raise RuntimeError("not on this device")
        return host

    def on_side_stream(self) -> AbstractContextManager[Any]:
        """Do nothing: there is one queue."""
        return nullcontext()

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """Return garbage, until it is waited for."""
        self.copies += 1
        return self._later(source.shape, source.dtype, lambda out: out.copy_(source))

    def select(self, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return garbage, until it is waited for."""
        self.selects += 1
        if self.selects == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        shape = (len(index), *table.shape[1:])
        return self._later(shape, table.dtype, lambda out: torch.index_select(table, 0, index, out=out))

    def record_event(self) -> _Event:
        """Return an event after all work queued so far."""
        with self._lock:
            return _Event(self, self.done + len(self._queue))

    def current_stream(self) -> object:
        """Return ``stream``."""
        return self.stream

    def record_use(self) -> _Event:
        """Return an event after all work queued so far."""
        return self.record_event()

    def wait_before_use(self, event: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Do the work queued before the event."""
        if any(tensor.is_nested for tensor in tensors):
            raise TypeError("found a nested tensor; expected its dense parts")
        self.waiting_streams.append(self.stream)
        event.synchronize()

    def run(self, position: int) -> None:
        """Do the work of the queue up to this position, counted from the first work."""
        with self._lock:
            while self.done < position:
                self._queue.popleft()()
                self.done += 1

    def _later(self, shape: Sequence[int], dtype: torch.dtype, work: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        out = torch.empty(tuple(shape), dtype=dtype)
        out.reshape(-1).view(torch.uint8).fill_(GARBAGE)
        with self._lock:
            self._queue.append(lambda: work(out))
        return out
