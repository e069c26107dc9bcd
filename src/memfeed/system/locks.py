"""Locks of files. A lock ends with the process that took it: no forked child keeps one."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from memfeed.system import files

_descriptors: set[int] = set()


def _forget() -> None:
    # a flock lives as long as any copy of its descriptor: a child that outlives its parent would keep it
    while _descriptors:
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_forget)


def open_lock(path: Path, flags: int = os.O_CREAT) -> int:
    """Open a file that is to be locked, and return its descriptor, which forked children close; for `close_lock`."""
    fd = files.open_write(path, flags)
    _descriptors.add(fd)
    return fd


def close_lock(fd: int) -> None:
    """Close a descriptor of `open_lock`, and so end its lock. Not in a forked child, which has closed it already."""
    _descriptors.discard(fd)
    os.close(fd)


def lock(fd: int, path: Path, *, wait: bool = False, is_shared: bool = False) -> None:
    """Lock an open file, for this process alone or shared with others.

    Without ``wait`` raises BlockingIOError if another process holds the lock.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        raise files.refused(error, path, "locking it: some network file systems have no locks") from error


@contextlib.contextmanager
def locked(path: Path, flags: int = 0) -> Iterator[int]:
    """Open a file for the block, with ``flags`` such as ``os.O_CREAT``, and lock it. Waits for the lock."""
    fd, pid = open_lock(path, flags), os.getpid()
    try:
        lock(fd, path, wait=True)
        yield fd
    finally:
        if os.getpid() == pid:  # a forked child leaves the block of its parent, who still has the lock
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked just now has not closed it yet
            close_lock(fd)
