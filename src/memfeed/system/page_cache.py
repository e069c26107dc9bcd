"""The kernel's page cache: ask what is in it, and give pages back."""

from __future__ import annotations

import ctypes
import os
import sys

from memfeed.system.files import LIBC


def page_out(address: int, size: int) -> None:
    """Takes whole pages of a map out of this process and, where nobody else maps them, out of the page cache.

    Pages that the process has changed are kept (in swap). Does nothing where the system cannot (before Linux 5.4).
    """
    page, pageout = os.sysconf("SC_PAGE_SIZE"), 21
    first, last = -(-address // page) * page, (address + size) // page * page
    if sys.platform == "linux" and last > first:
        LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), pageout)


def in_page_cache(address: int) -> bool:
    """Whether the page at an address of a mapped file is in the page cache; asks mincore(2), which starts no read.

    Also true where the system does not say so: of files that this process neither owns nor may write, since Linux 5.2.
    """
    page, answer = os.sysconf("SC_PAGE_SIZE"), ctypes.c_ubyte(1)
    if sys.platform == "linux":
        LIBC.mincore(ctypes.c_void_p(address // page * page), ctypes.c_size_t(1), ctypes.byref(answer))
    return bool(answer.value & 1)
