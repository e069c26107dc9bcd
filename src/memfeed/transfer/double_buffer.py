"""Copy columns to a CUDA device through two page-locked buffers: one is filled while the device reads the other.

A copy from ordinary memory goes through a buffer of the driver, and the caller waits for each part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from memfeed.transfer.streams import CudaStreams, Event, Streams

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
        buffer = DoubleBuffer(streams or CudaStreams(device))
        try:
            yield buffer.copy
        finally:
            buffer.finish()
