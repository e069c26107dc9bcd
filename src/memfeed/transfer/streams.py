"""A GPU that copies while it computes: a side stream, page-locked memory, events.

The races that this guards against, and why it is done so: docs/notes/streams.md.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import numpy as np
import torch


class Event(Protocol):
    """A place in a stream's queue."""

    def synchronize(self) -> None:
        """Returns when everything queued before it is done."""


class Streams(Protocol):
    """What `memfeed.transfer.transfer` needs of a device.

    ``copy``, ``select`` and ``mark`` only queue work, on a stream of their own, and are called within ``aside``. What
    they read must stay as it is until an event marked after them has come.
    """

    device: torch.device

    def room(self) -> tuple[int, int]:
        """Bytes of the device's memory that are free, and that there are."""

    def count(self) -> int:
        """How many such devices the machine has."""

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """CPU memory that the device copies from by itself: uint8 [nbytes], at least one."""

    def seen_from_device(self, host: torch.Tensor) -> torch.Tensor:
        """Memory from ``page_locked`` as a tensor of the device, which reads it over the bus. Raises RuntimeError where
        that cannot be had."""

    def aside(self) -> AbstractContextManager[Any]:
        """What is done on the device within the block is queued on the side stream."""

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """A copy of ``source``, from page-locked or device memory, on the device."""

    def select(self, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Rows of a device tensor, by an index on the device."""

    def mark(self) -> Event:
        """An event behind all that has been queued."""

    def current(self) -> object:
        """The stream that is current in the calling thread."""

    def arrive(self, event: Event, tensors: Iterable[torch.Tensor]) -> None:
        """Lets the stream that is current in the calling thread use ``tensors``, made before ``event``."""


class CudaStreams:
    """See ``Streams``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def room(self) -> tuple[int, int]:
        """See ``Streams.room``."""
        return room(self.device)

    def count(self) -> int:
        """See ``Streams.count``."""
        return torch.cuda.device_count()

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """See ``Streams.page_locked``. Raises RuntimeError where the system locks no more."""
        # torch's own page-locked memory comes in powers of two: a column of 40 GB would take 64
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_DONTFORK"):  # a fork would give this process other pages than those that are locked
            pages.madvise(mmap.MADV_DONTFORK)
        memory = np.frombuffer(pages, np.uint8)
        address = memory.ctypes.data
        with torch.cuda.device(self.device):
            failed = _runtime().cudaHostRegister(address, nbytes, 0)
            if int(failed):
                with suppress(RuntimeError):  # CUDA keeps the error for the next kernel, which would not be the user's
                    torch.empty(1, device=self.device).add_(1)
                torch.cuda.check_error(failed)
        # the tensors made of it keep the array alive, and so the lock
        weakref.finalize(memory, _unlock, address, self.device, os.getpid()).atexit = False
        return torch.from_numpy(memory)

    def seen_from_device(self, host: torch.Tensor) -> torch.Tensor:
        """See ``Streams.seen_from_device``."""
        with torch.cuda.device(self.device):
            seen = torch.as_tensor(_Seen(host), device=self.device)
        if seen.data_ptr() != host.data_ptr():  # a copy, which would fill the device
            raise RuntimeError("found that torch copies page-locked memory to the device when asked to look at it")
        return seen

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See ``Streams.aside``."""
        # a new thread is on GPU 0: to leave a stream of another would make a context there, of 500 MB
        with torch.cuda.device(self.device), torch.cuda.stream(self._side):
            yield

    def current(self) -> object:
        """See ``Streams.current``."""
        return torch.cuda.current_stream(self.device)

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """See ``Streams.copy``."""
        return torch.empty_like(source, device=self.device).copy_(source, non_blocking=True)

    def select(self, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """See ``Streams.select``."""
        return torch.index_select(table, 0, index)

    def mark(self) -> Event:
        """See ``Streams.mark``."""
        # a thread that waits for it sleeps, and leaves its core to the gather
        event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._side)  # type: ignore[attr-defined]
        return event

    def arrive(self, event: Event, tensors: Iterable[torch.Tensor]) -> None:
        """See ``Streams.arrive``."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)  # type: ignore[arg-type]
        for tensor in tensors:
            # the allocator knows only the stream that a tensor was made on: it must not hand its memory to the next
            # copy while this stream still reads it
            tensor.record_stream(stream)


class _Seen:
    """Page-locked memory described as memory of the device, which it can address.

    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
    """

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host  # torch keeps this object, and so the memory, for as long as its tensor lives
        self.__cuda_array_interface__ = {
            "shape": (host.numel(),),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 3,
        }


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _unlock(address: int, device: torch.device, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has neither the pages nor CUDA
        torch.cuda.synchronize(device)  # rows may still be on their way
        _runtime().cudaHostUnregister(address)


def room(device: torch.device) -> tuple[int, int]:
    """Bytes of a CUDA device's memory that are free, what torch keeps for reuse among them, and that there are."""
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + kept, total


def streams_of(device: torch.device | None) -> Streams | None:
    """Streams of a device; None for one that has none of ours (the CPU, MPS, XPU)."""
    return CudaStreams(device) if device is not None and device.type == "cuda" else None
