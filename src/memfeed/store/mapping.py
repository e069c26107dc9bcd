"""Map a file into memory, privately and without a limit by RAM and swap."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memfeed.errors import CorruptStoreError, StoreError
from memfeed.system.descriptors import open_read, with_descriptors

# Python has had this name only since 3.13; the value is that of x86, Arm, RISC-V, POWER and s390
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
# before Python 3.13 every map keeps a descriptor of its own open, which is not needed
_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def map_file(path: Path, size: int) -> torch.Tensor:
    """Map the first ``size`` bytes of a file as a uint8 tensor [size] over a private, writable map.

    MAP_NORESERVE, because without it the system refuses a private map larger than memory and swap. The tensor keeps the
    map alive; nothing else has to be closed. Raises CorruptStoreError if the file is shorter than ``size``.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    fd = open_read(path)
    try:
        found = os.fstat(fd).st_size
        if found < size:  # touching a map after the file's end is a SIGBUS
            raise CorruptStoreError(f"{path}: found {found:,} bytes; expected {size:,}: the file was cut")
        flags = mmap.MAP_PRIVATE | _NORESERVE
        mapped = with_descriptors(
            lambda: mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE, **_UNTRACKED)
        )
    except (OverflowError, OSError) as error:  # a sparse file can be larger than the address space
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        raise StoreError(f"{path}: found {size:,} bytes, more than this process can map ({error})") from None
    finally:
        os.close(fd)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def map_checked(path: Path, size: int, check: Callable[[], None]) -> torch.Tensor:
    """Map a file, then call ``check``, which raises if the store was replaced meanwhile."""
    try:
        return map_file(path, size)
    finally:
        check()  # also after an error: the file may be that of another store
