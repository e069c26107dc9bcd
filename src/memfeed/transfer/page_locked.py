"""Page-locked memory for a CUDA device: how it is made, and who gives it back.

Nobody who drops a tensor waits for the device: the finalizer hands the memory to a thread, which waits for an event
after the work that may still read it, and then unlocks it. docs/notes/streams.md says why.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import queue
import threading
import weakref
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from memfeed.system.libc import LIBC
from memfeed.system.threads import end_at_exit

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
EXIT_SECONDS = 5.0  # that a program which ends waits for the device


class _Retired(NamedTuple):
    """Page-locked memory that no tensor uses any more, but perhaps the work queued on ``stream``."""

    address: int
    nbytes: int
    stream: torch.cuda.Stream


# memory, or a thread that is to end; its put may be called by the garbage collector
_retired: queue.SimpleQueue[_Retired | threading.Thread] = queue.SimpleQueue()
_waiting: set[int] = set()  # the addresses of memory that is handed over, and not given back yet
_thread: _GivingBack | None = None
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


def is_of_capture(error: BaseException) -> bool:
    """Return True if CUDA refused a call because a graph was being captured."""
    return "captur" in str(error) and "stream" in str(error)


def _check(error_code: int, device: torch.device) -> None:
    if error_code:
        with suppress(RuntimeError):  # CUDA reports the error again at the next kernel: let that be this one
            torch.empty(1, device=device).add_(1)
        torch.cuda.check_error(error_code)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _retire(retired: _Retired, pid: int) -> None:
    """Hand memory over. Runs wherever the last reference is dropped: it must not block, nor call CUDA."""
    has_ended = _thread is not None and not _thread.is_alive()  # then the end of the process gives it back
    if os.getpid() == pid and not has_ended:  # a forked child has neither the pages nor CUDA
        _waiting.add(retired.address)
        _retired.put(retired)


class _GivingBack(threading.Thread):
    """Gives memory back, and ends before the interpreter does: within CUDA it would abort the process."""

    def __init__(self) -> None:
        super().__init__(name="memfeed page-locked memory", daemon=True)

    def run(self) -> None:
        """Give memory back until ``release``."""
        _leave_captures_alone()
        while (retired := _retired.get()) is not self:
            if isinstance(retired, threading.Thread):  # it has ended already
                continue
            with suppress(RuntimeError):  # of a broken device, which says so at its next use
                _give_back(retired)
            _waiting.discard(retired.address)
            del retired

    def release(self, *, at_exit: bool = False) -> None:
        """See `ThreadedWork`."""
        _retired.put(self)

    def join(self, timeout: float | None = EXIT_SECONDS) -> None:
        """See `ThreadedWork`."""
        super().join(timeout)


def _start_thread() -> None:
    global _thread
    with _start_lock:
        if _thread is None or not _thread.is_alive():
            _thread = _GivingBack()
            _thread.start()
            end_at_exit(_thread)


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


HUGE_PAGES_FROM = 4 << 20
_FAILED = ctypes.c_void_p(-1).value


def map_pages(nbytes: int) -> int:
    """Return the address of ``nbytes`` bytes of zeros; the caller gives them back with `unmap_pages`.

    A forked child has no memory at this address, and must not unmap it: other memory of its own may lie there.

    Raises:
        MemoryError: the system gives no more memory or address space.
    """
    libc_mmap = LIBC.mmap
    libc_mmap.restype = ctypes.c_void_p
    libc_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc_mmap(None, nbytes, protection, flags, -1, 0)
    if address is None or address == _FAILED:
        raise MemoryError(f"found no {nbytes} bytes of memory: {os.strerror(ctypes.get_errno())}")
    _advise(address, nbytes, "MADV_DONTFORK")
    if nbytes >= HUGE_PAGES_FROM:
        _advise(address, nbytes, "MADV_HUGEPAGE")
    return int(address)


def unmap_pages(address: int, nbytes: int) -> None:
    """Give memory of `map_pages` back to the system."""
    LIBC.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def _advise(address: int, nbytes: int, name: str) -> None:
    advice = getattr(mmap, name, None)  # not every system has each
    if advice is not None:
        LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)
