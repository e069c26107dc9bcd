"""File descriptors: open files to read, limit how many are open, raise the system's limit, part from a parent's."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import stat
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from memfeed.system.files import open_write

T = TypeVar("T")


def with_descriptors(action: Callable[[], T]) -> T:
    """Call ``action`` and return its result. If file descriptors run out, raise their limit and call it again.

    A store may have ten thousand columns, and many systems start a process with a limit of 1,024 where a million are
    allowed.
    """
    try:
        return action()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft >= hard:
            raise OSError(
                errno.EMFILE,
                f"found all {soft:,} file descriptors in use; raise the limit (ulimit -n), or select fields",
            ) from error
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return action()


def open_read(path: Path) -> int:
    """Return a descriptor to read a file. Follows no symbolic link, and does not wait for the writer of a pipe."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return with_descriptors(lambda: os.open(path, flags))


def part_from_parent() -> None:
    """Give a forked process its own position in each file that it has open to read.

    It shares that of its parent: where both seek in a file of a dataset and then read, one reads at the other's place.
    Where the system has no /proc, as macOS, nothing changes.
    """
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of the listing itself, or a file that cannot be opened any more
                _open_again(int(name))


def _open_again(fd: int) -> None:
    """Open the file of a descriptor again, under the same number, if it is a regular file that is only read."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if fd <= 2 or flags & os.O_ACCMODE != os.O_RDONLY or not stat.S_ISREG(os.fstat(fd).st_mode):
        return
    place = os.lseek(fd, 0, os.SEEK_CUR)
    own = with_descriptors(lambda: os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC))
    try:
        os.lseek(own, place, os.SEEK_SET)
        os.dup2(own, fd, os.get_inheritable(fd))
    finally:
        os.close(own)


class FileHandles:
    """Open file descriptors by path, at most ``most`` at once: a store may have ten thousand columns.

    All are closed when this object is freed.
    """

    def __init__(self, *, write: bool, most: int = 128) -> None:
        self._write, self._most = write, most
        self._open: dict[Path, int] = {}
        weakref.finalize(self, close_all, self._open)

    def __call__(self, path: Path) -> int:
        """Return the descriptor for ``path``; valid until the next call."""
        fd = self._open.pop(path, None)
        if fd is None:
            if len(self._open) >= self._most:
                os.close(self._open.pop(next(iter(self._open))))
            # not to read too: NFS would then write whole pages, over what another machine wrote beside these rows
            fd = open_write(path, access=os.O_WRONLY) if self._write else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._open[path] = fd  # the descriptor used last is closed last
        return fd

    def close(self) -> None:
        """Close all of them."""
        close_all(self._open)


def close_all(descriptors: dict[Any, int]) -> None:
    """Close the descriptors of a dict, and empty it."""
    while descriptors:
        os.close(descriptors.popitem()[1])
