"""File descriptors: open files to read, limit how many are open, raise the system's limit when it is reached."""

from __future__ import annotations

import errno
import os
import resource
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
