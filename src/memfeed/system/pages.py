"""Memory straight from the system: whole pages, which a forked child does not get."""

from __future__ import annotations

import ctypes
import mmap
import os

from memfeed.system.libc import LIBC

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
