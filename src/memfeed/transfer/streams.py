"""Copy to a GPU while it computes: a side stream, page-locked memory, events.

docs/notes/streams.md describes the races that this code prevents, and how.
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
    """A position in a stream's queue."""

    def synchronize(self) -> None:
        """Block until all work queued before the event is done."""


class Streams(Protocol):
    """The operations of a device that `memfeed.transfer.transfer` needs.

    ``copy``, ``select`` and ``record_event`` only queue work, on a side stream, and are called within
    ``on_side_stream``. The memory that they read must not be written until an event recorded after them is done.
    """

    device: torch.device

    def memory_info(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device's memory."""

    def device_count(self) -> int:
        """Return how many such devices the machine has."""

    def allocate_page_locked(self, nbytes: int) -> torch.Tensor:
        """Return CPU memory, uint8 [nbytes], that the device copies from by itself; ``nbytes`` is 1 or more."""

    def device_view(self, host: torch.Tensor) -> torch.Tensor:
        """Return memory from ``allocate_page_locked`` as a tensor of the device, which reads it over the bus.

        Raises RuntimeError where this is not possible.
        """

    def on_side_stream(self) -> AbstractContextManager[Any]:
        """Queue the work of the block on the side stream."""

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``source``, in page-locked or device memory, on the device."""

    def select(self, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return rows of a device tensor, by an index on the device."""

    def record_event(self) -> Event:
        """Return an event after all work queued so far."""

    def current_stream(self) -> object:
        """Return the stream that is current in the calling thread."""

    def wait_before_use(self, event: Event, tensors: Iterable[torch.Tensor]) -> None:
        """Make the calling thread's current stream wait for ``event``, after which it may use ``tensors``.

        The tensors must have been made before the event.
        """


class CudaStreams:
    """The `Streams` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def memory_info(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device's memory; see `memory_info`."""
        return memory_info(self.device)

    def device_count(self) -> int:
        """Return how many CUDA devices the machine has."""
        return torch.cuda.device_count()

    def allocate_page_locked(self, nbytes: int) -> torch.Tensor:
        """Return page-locked memory, uint8 [nbytes]. Raises RuntimeError where the system locks no more."""
        # torch's own page-locked memory comes in powers of two: a column of 40 GB would take 64
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_DONTFORK"):  # after a fork this process would have other pages than the locked ones
            pages.madvise(mmap.MADV_DONTFORK)
        memory = np.frombuffer(pages, np.uint8)
        address = memory.ctypes.data
        with torch.cuda.device(self.device):
            error_code = _runtime().cudaHostRegister(address, nbytes, 0)
            if int(error_code):
                with suppress(RuntimeError):  # CUDA reports the error again at the next kernel: let that be this one
                    torch.empty(1, device=self.device).add_(1)
                torch.cuda.check_error(error_code)
        # tensors over this memory keep the array alive, and so the lock
        weakref.finalize(memory, _unlock, address, self.device, os.getpid()).atexit = False
        return torch.from_numpy(memory)

    def device_view(self, host: torch.Tensor) -> torch.Tensor:
        """Return page-locked memory as a tensor of the device; see `Streams.device_view`."""
        with torch.cuda.device(self.device):
            view = torch.as_tensor(_CudaArray(host), device=self.device)
        if view.data_ptr() != host.data_ptr():
            raise RuntimeError(
                "found that torch copied page-locked memory to the device; expected a view of it: place the column as "
                "'mapped'"
            )
        return view

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Queue the work of the block on the side stream."""
        # A new thread is on GPU 0: without the outer block, torch would make a context of 500 MB there at the end
        with torch.cuda.device(self.device), torch.cuda.stream(self._side):
            yield

    def current_stream(self) -> object:
        """Return the stream that is current in the calling thread."""
        return torch.cuda.current_stream(self.device)

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``source`` on the device."""
        return torch.empty_like(source, device=self.device).copy_(source, non_blocking=True)

    def select(self, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return rows of a device tensor, by an index on the device."""
        return torch.index_select(table, 0, index)

    def record_event(self) -> Event:
        """Return an event after all work queued on the side stream so far."""
        # blocking: a thread that waits for it sleeps, and leaves its core to the gather
        event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._side)  # type: ignore[attr-defined]
        return event

    def wait_before_use(self, event: Event, tensors: Iterable[torch.Tensor]) -> None:
        """Make the calling thread's current stream wait for ``event``; see `Streams.wait_before_use`."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)  # type: ignore[arg-type]
        for tensor in tensors:
            # the allocator knows only the stream that a tensor was made on: without this it could give the memory to
            # the next copy while this stream still reads it
            tensor.record_stream(stream)


class _CudaArray:
    """Page-locked memory described as memory of the device, which can address it.

    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
    """

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host  # torch keeps this object, and so the memory, while its tensor lives
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
        torch.cuda.synchronize(device)  # a kernel may still read rows
        _runtime().cudaHostUnregister(address)


def memory_info(device: torch.device) -> tuple[int, int]:
    """Return the free and the total bytes of a CUDA device's memory; what torch keeps for reuse counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached, total


def streams_of(device: torch.device | None) -> Streams | None:
    """Return the streams of a CUDA device; None for the CPU, MPS and XPU, where batches are moved without streams."""
    return CudaStreams(device) if device is not None and device.type == "cuda" else None
