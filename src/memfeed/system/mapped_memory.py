"""Files in memory: map parts of them privately, which ones are mapped, whether a page is cached, how to release it.

An edit of a map never reaches the file, and nothing is read before it is used.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import mmap
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from memfeed.errors import CorruptStoreError, StoreError
from memfeed.system.descriptors import open_read, with_descriptors
from memfeed.system.libc import LIBC

# Python has had this name only since 3.13; the value is that of x86, Arm, RISC-V, POWER and s390
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
# before Python 3.13 every map keeps a descriptor of its own open, which is not needed
_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
_REMEDY = (
    "restore it from a copy, or make the store again; if it is in the cache of a store at an address (cache_dir=), "
    "remove that directory"
)
ORDINARY = torch.inference_mode(False)  # decorates what outlives the caller's block


def _open(path: Path) -> int:
    try:
        return open_read(path)
    except PermissionError as error:
        raise StoreError(
            f"{path}: found a file that cannot be opened ({error.strerror}); expected one that can be read: give "
            "yourself the permission (chmod u+r)"
        ) from error


def map_file(path: Path, size: int) -> torch.Tensor:
    """Map the first ``size`` bytes of a file as a uint8 tensor [size] over a private, writable map.

    MAP_NORESERVE, because without it the system refuses a private map larger than memory and swap. The tensor keeps the
    map alive; nothing else has to be closed. Raises CorruptStoreError if the file is shorter.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    fd = _open(path)
    try:
        return map_descriptor(fd, path, size)
    finally:
        os.close(fd)


def map_descriptor(fd: int, path: Path, size: int) -> torch.Tensor:
    """Map bytes of an open file as `map_file` does; ``path`` names it in errors."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    _require_bytes(fd, path, size)
    try:
        flags, prot = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        mapped = with_descriptors(lambda: mmap.mmap(fd, size, flags=flags, prot=prot, **_UNTRACKED))
    except ValueError:
        _require_bytes(fd, path, size)  # it was cut since
        raise
    except (OverflowError, OSError) as error:  # a sparse file can be larger than the address space
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        raise StoreError(f"{path}: found {size:,} bytes, more than this process can map ({error})") from None
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _require_bytes(fd: int, path: Path, size: int) -> None:
    """Raise CorruptStoreError for a file of less than ``size`` bytes: touching a map after its end is a SIGBUS."""
    found = os.fstat(fd).st_size
    if found < size:
        raise CorruptStoreError(f"{path}: found {found:,} bytes; expected {size:,}: the file was cut; {_REMEDY}")


def read_file(path: Path, out: npt.NDArray[np.uint8], offset: int = 0) -> None:
    """Fill ``out`` with bytes of a file, from byte ``offset``: faster than a map where each byte is needed once.

    Raises CorruptStoreError if the file ends before these bytes.
    """
    done, data = 0, out.data
    fd = _open(path)
    try:
        while done < len(data):
            count = os.preadv(fd, [data[done:]], offset + done)
            if not count:
                found = offset + done
                raise CorruptStoreError(
                    f"{path}: found {found:,} bytes; expected {offset + len(data):,}: the file was cut; {_REMEDY}"
                )
            done += count
    finally:
        os.close(fd)


def map_checked(path: Path, size: int, check: Callable[[], None]) -> torch.Tensor:
    """Map a file, then call ``check``, which raises if the store was replaced meanwhile."""
    try:
        return map_file(path, size)
    finally:
        check()  # also after an error: the file may be that of another store


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
