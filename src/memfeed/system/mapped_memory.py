"""Files in memory: which ones are mapped, whether a page is cached, and how to release it."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator

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


_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+) +(/.*)")
# memory that processes share without a file of the user's
_UNNAMED = re.compile(r"/dev/zero|/dev/shm/torch_|/memfd:|/SYSV|.* \(deleted\)$")


def file_maps() -> Iterator[tuple[int, int, str]]:
    """Yield where this process has mapped files, by address, and their paths; nothing on other systems than Linux."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as lines:
        for line in lines:
            found = _LINE.match(line)
            if found is not None and found[3] != "0":
                yield int(found[1], 16), int(found[2], 16), found[4]


def file_lookup() -> Callable[[int], str | None]:
    """Return a function from an address to the path of the file that is mapped there, or None.

    It knows the maps of this moment. On other systems than Linux it returns None for every address.
    """
    maps = [one for one in file_maps() if not _UNNAMED.match(one[2])]
    starts = [start for start, _, _ in maps]

    def lookup(address: int) -> str | None:
        at = bisect.bisect_right(starts, address) - 1
        return maps[at][2] if at >= 0 and address < maps[at][1] else None

    return lookup


def evict(files: Iterable[str]) -> None:
    """Remove files from the page cache, where the system can. Pages that another process has mapped stay."""
    wanted = {os.path.realpath(name) for name in files}
    for start, end, path in list(file_maps()):
        if path in wanted:
            page_out(start, end - start)
    for name in wanted if hasattr(os, "posix_fadvise") else ():
        with contextlib.suppress(OSError):
            fd = os.open(name, os.O_RDONLY)
            try:
                os.fsync(fd)  # pages that are not yet written would stay
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
