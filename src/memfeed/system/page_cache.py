"""The kernel's page cache: ask if a page is in it, and release pages."""

from __future__ import annotations

import ctypes
import os
import sys

from memfeed.system.libc import LIBC


def page_out(address: int, size: int) -> None:
    """Release the full pages of a range of a map from this process and, unless others map them, from the page cache.

    Pages that the process has changed are kept (in swap). Does nothing on other systems and before Linux 5.4.
    """
    page, pageout = os.sysconf("SC_PAGE_SIZE"), 21
    first, last = -(-address // page) * page, (address + size) // page * page
    if sys.platform == "linux" and last > first:
        LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), pageout)


def in_page_cache(address: int) -> bool:
    """Return True if the page at an address of a mapped file is in the page cache. mincore(2) starts no read.

    Also True if the system does not tell: since Linux 5.2 for files that this process neither owns nor may write.
    """
    page, answer = os.sysconf("SC_PAGE_SIZE"), ctypes.c_ubyte(1)
    if sys.platform == "linux":
        LIBC.mincore(ctypes.c_void_p(address // page * page), ctypes.c_size_t(1), ctypes.byref(answer))
    return bool(answer.value & 1)
