"""Page-locked memory for a CUDA device: how it is made, and who gives it back.

Nobody who drops a tensor waits for the device: the finalizer hands the memory to a thread, which waits for an event
after the work that may still read it, and then unlocks it. docs/notes/streams.md says why.
"""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import threading
import weakref
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from memfeed.system.pages import map_pages, unmap_pages

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class _Retired(NamedTuple):
    """Page-locked memory that no tensor uses any more, but perhaps the work queued on ``stream``."""

    address: int
    nbytes: int
    stream: torch.cuda.Stream


_retired: queue.SimpleQueue[_Retired] = queue.SimpleQueue()  # its put may be called by the garbage collector
_waiting: set[int] = set()
_thread: threading.Thread | None = None
_start_lock = threading.Lock()


def lock_pages(nbytes: int, stream: torch.cuda.Stream) -> torch.Tensor:
    """Return page-locked memory, uint8 [nbytes], that is read by work on ``stream``.

    When the last tensor that shares it is freed, it is given back after the work queued on ``stream`` by then. In a
    forked child it is not there.

    Raises:
        MemoryError: the system gives no more memory.
        RuntimeError: the system locks no more, or cannot lock.
    """
    _start_thread()
    # torch's own page-locked memory comes in powers of two: a column of 40 GB would take 64
    address = map_pages(nbytes)
    try:
        with torch.cuda.device(stream.device):
            _check(int(_runtime().cudaHostRegister(address, nbytes, 0)), stream.device)
    except BaseException:
        unmap_pages(address, nbytes)
        raise
    memory = np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))
    # tensors over this memory keep the array alive, and so the lock
    weakref.finalize(memory, _retire, _Retired(address, nbytes, stream), os.getpid()).atexit = False
    return torch.from_numpy(memory)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if memory ran out: of the device, of the CPU, or for page-locking."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


def retired_count() -> int:
    """Return how many pieces of page-locked memory are handed over and not given back yet."""
    return len(_waiting)


def _check(error_code: int, device: torch.device) -> None:
    if error_code:
        with suppress(RuntimeError):  # CUDA reports the error again at the next kernel: let that be this one
            torch.empty(1, device=device).add_(1)
        torch.cuda.check_error(error_code)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _retire(retired: _Retired, pid: int) -> None:
    """Hand memory over. Runs wherever the last reference is dropped: it must not block, nor call CUDA."""
    if os.getpid() == pid:  # a forked child has neither the pages nor CUDA
        _waiting.add(retired.address)
        _retired.put(retired)


def _start_thread() -> None:
    global _thread
    with _start_lock:
        if _thread is None:
            _thread = threading.Thread(target=_give_back_all, name="memfeed page-locked memory", daemon=True)
            _thread.start()


def _give_back_all() -> None:
    _leave_captures_alone()
    while True:
        retired = _retired.get()
        with suppress(RuntimeError):  # of a broken device, which says so at its next use
            _give_back(retired)
        _waiting.discard(retired.address)
        del retired


def _give_back(retired: _Retired) -> None:
    with torch.cuda.device(retired.stream.device):
        try:
            event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(retired.stream)
            event.synchronize()
        finally:
            _runtime().cudaHostUnregister(retired.address)
            unmap_pages(retired.address, retired.nbytes)


def _leave_captures_alone() -> None:
    """Let this thread call CUDA while another thread captures a graph, without breaking the capture."""
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
