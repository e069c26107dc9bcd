"""A device that does its work as late as it may, for tests without a GPU of what waits for what."""

import threading
from collections import deque
from contextlib import nullcontext

import torch

GARBAGE = 0xA5


class Event:
    def __init__(self, device, number):
        self._device, self._number = device, number

    def synchronize(self):
        self._device.run(self._number)


class SlowDevice:
    """Streams (see `memfeed.transfer.streams`) whose work waits until somebody waits for it.

    Its memory is the CPU's, and holds garbage until then: what is read too early, or written over too early, shows.
    """

    def __init__(self, free=1 << 40, total=1 << 40, sees_host=True):
        self.device = torch.device("cpu")
        self.free, self.total, self.sees_host = free, total, sees_host
        self.arrivals = []
        self.copies = self.selects = self.locked_bytes = 0
        self.fails_at = None  # the select that runs out of memory
        self.stream = 0
        self._queue, self._done, self._lock = deque(), 0, threading.Lock()

    def room(self):
        return self.free, self.total

    def page_locked(self, nbytes):
        self.locked_bytes += nbytes
        return torch.full((nbytes,), GARBAGE, dtype=torch.uint8)

    def seen_from_device(self, host):
        if not self.sees_host:
            raise RuntimeError("not on this device")
        return host

    def aside(self):
        return nullcontext()

    def copy(self, source):
        self.copies += 1
        return self._later(source.shape, source.dtype, lambda out: out.copy_(source))

    def select(self, table, index):
        self.selects += 1
        if self.selects == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        shape = (len(index), *table.shape[1:])
        return self._later(shape, table.dtype, lambda out: torch.index_select(table, 0, index, out=out))

    def mark(self):
        with self._lock:
            return Event(self, self._done + len(self._queue))

    def current(self):
        return self.stream

    def arrive(self, event, tensors):
        assert all(isinstance(tensor, torch.Tensor) and not tensor.is_nested for tensor in tensors)
        self.arrivals.append(self.stream)
        event.synchronize()

    def run(self, number):
        with self._lock:
            while self._done < number:
                self._queue.popleft()()
                self._done += 1

    def _later(self, shape, dtype, work):
        out = torch.empty(shape, dtype=dtype)
        out.reshape(-1).view(torch.uint8).fill_(GARBAGE)
        with self._lock:
            self._queue.append(lambda: work(out))
        return out
