"""Copy to a GPU while it computes: a side stream, page-locked memory, events.

docs/notes/streams.md describes the races that this code prevents, and how.

Columns are copied through two page-locked buffers: one is filled while the device reads the other. A copy from ordinary
memory goes through a buffer of the driver, and the caller waits for each part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from memfeed.system.messages import say_once
from memfeed.transfer.page_locked import is_of_capture, is_out_of_memory, lock_pages


class Event(Protocol):
    """A position in a stream's queue."""

    def synchronize(self) -> None:
        """Block until all work queued before the event is done."""


class Streams:
    """The operations of a CUDA device that `memfeed.transfer.transfer` needs; another device has the same methods.

    ``copy``, ``select`` and ``record_event`` only queue work, on a side stream, and are called within
    ``on_side_stream``. The memory that they read must not be written until an event recorded after them is done.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._index = self.device.index  # torch takes a number in half of the time
        self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def memory_info(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device's memory; see `memory_info`."""
        return memory_info(self.device)

    def device_count(self) -> int:
        """Return how many such devices the machine has."""
        return torch.cuda.device_count()

    def allocate_page_locked(self, nbytes: int) -> torch.Tensor:
        """Return CPU memory, uint8 [nbytes], that the device copies from by itself; ``nbytes`` is 1 or more.

        See `lock_pages` for what is raised.
        """
        return lock_pages(nbytes, self._side)

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        """Return CPU memory, uint8 [nbytes], to copy batches from: page-locked where the system can do that.

        Where CUDA cannot lock memory of ours, it is torch's page-locked memory, then memory that is not locked.
        """
        try:
            return lock_pages(nbytes, self._side)
        except RuntimeError as error:
            if is_out_of_memory(error) or is_of_capture(error):
                raise  # columns may make room; the next call after a capture locks it
        try:
            with torch.cuda.device(self.device):
                memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            kind = "torch's page-locked memory, in powers of two"
        except RuntimeError:
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            kind = "memory that is not page-locked, from which copies are slower and wait"
        say_once(f"memfeed: CUDA cannot page-lock memory that is there already (cudaHostRegister); batches use {kind}")
        return memory

    def device_view(self, host: torch.Tensor) -> torch.Tensor:
        """Return memory from ``allocate_page_locked`` as a tensor of the device, which reads it over the bus.

        Raises RuntimeError where this is not possible.
        """
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

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``source``, in page-locked or device memory, on the device."""
        return torch.empty_like(source, device=self.device).copy_(source, non_blocking=True)

    def select(self, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return rows of a device tensor, by an index on the device."""
        return torch.index_select(table, 0, index)

    def record_event(self) -> Event:
        """Return an event after all work queued on the side stream so far."""
        return self._event_on(self._side)

    def current_stream(self) -> object:
        """Return the stream that is current in the calling thread."""
        return torch.cuda.current_stream(self._index)

    def record_use(self) -> Event:
        """Return an event after all work queued so far on the calling thread's current stream."""
        return self._event_on(torch.cuda.current_stream(self._index))

    def _event_on(self, stream: torch.cuda.Stream) -> Event:
        # blocking: a thread that waits for it sleeps, and leaves its core to the gather
        event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)  # type: ignore[attr-defined]
        return event

    def wait_before_use(self, event: Event, tensors: Iterable[torch.Tensor]) -> None:
        """Make the calling thread's current stream wait for ``event``, after which it may use ``tensors``.

        The tensors must have been made before the event.
        """
        stream = torch.cuda.current_stream(self._index)
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


def memory_info(device: torch.device) -> tuple[int, int]:
    """Return the free and the total bytes of a CUDA device's memory; what torch keeps for reuse counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached, total


def streams_of(device: torch.device | None) -> Streams | None:
    """Return the streams of a CUDA device; None for the CPU, MPS and XPU, where batches are moved without streams."""
    return Streams(device) if device is not None and device.type == "cuda" else None


# a copy below this size is over before two buffers are locked
LEAST_BYTES = 1 << 20

Copy = Callable[[torch.Tensor, torch.Tensor], object]
"""A function ``copy(target, source)`` for tensors of one shape and dtype; ``source`` may be written afterwards."""


class DoubleBuffer:
    """Two page-locked buffers, each used again when the device has read it. They grow to the largest source.

    Copies are queued on the calling thread's current stream. Call ``finish`` before you drop it.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._buffers: list[tuple[torch.Tensor, Event | None]] = [(nothing, None), (nothing, None)]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of ``source``, of the CPU, to ``target``; wait only until a buffer is free."""
        if source.nbytes < LEAST_BYTES:
            target.copy_(source)
            return
        buffer, read = self._buffers.pop(0)
        if read is not None:
            read.synchronize()
        if len(buffer) < source.nbytes:
            buffer = self._allocate(source.nbytes)
        staged = buffer[: source.nbytes].view(source.dtype).view(source.shape).copy_(source)
        target.copy_(staged, non_blocking=True)
        self._buffers.append((buffer, self._streams.record_use()))

    def finish(self) -> None:
        """Block until all copies are done."""
        for _, read in self._buffers:
            if read is not None:
                read.synchronize()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        try:
            return self._streams.allocate_staging(nbytes)
        except (RuntimeError, MemoryError):  # nothing is left to lock: copies wait, and the column still arrives
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


@contextmanager
def copies_to(device: torch.device, streams: Streams | None = None) -> Iterator[Copy]:
    """Yield a function that copies tensors of the CPU to a device; at the end of the block all copies are done.

    To devices without streams of ours it is `torch.Tensor.copy_`.
    """
    if device.type != "cuda":
        yield torch.Tensor.copy_
        return
    with torch.cuda.device(device):  # to wait for an event makes a context on the current device
        buffer = DoubleBuffer(streams or Streams(device))
        try:
            yield buffer.copy
        finally:
            buffer.finish()
