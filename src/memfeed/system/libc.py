"""System calls that Python's ``os`` lacks. Each raises OSError if it fails, or if the system does not have it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
_FICLONERANGE = 0x4020940D


def fallocate(fd: int, offset: int, size: int) -> None:
    """Reserve bytes of a file on the disk: fallocate(2)."""
    _call("fallocate", fd, 0, ctypes.c_int64(offset), ctypes.c_int64(size))


def punch_hole(fd: int, offset: int, size: int) -> None:
    """Give the blocks of some bytes of a file back to the file system: fallocate(2), FALLOC_FL_PUNCH_HOLE."""
    keep_size, punch = 1, 2
    _call("fallocate", fd, keep_size | punch, ctypes.c_int64(offset), ctypes.c_int64(size))


def exchange(one: Path, other: Path) -> None:
    """Exchange two paths in one step: renameat2(2), RENAME_EXCHANGE."""
    at_cwd, swap = -100, 2
    _call("renameat2", at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), swap)


def clone_range(source: int, fd: int, offset: int) -> None:
    """Let an open file share all blocks of another from byte ``offset`` on: ioctl(2), FICLONERANGE."""
    fcntl.ioctl(fd, _FICLONERANGE, struct.pack("=qQQQ", source, 0, 0, offset))


def _call(name: str, *arguments: Any) -> None:
    function = getattr(LIBC, name, None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if function(*arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
