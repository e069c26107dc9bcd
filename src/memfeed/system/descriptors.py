"""File descriptors: open files to read, keep a bounded number open, raise the limit when they run out."""

from __future__ import annotations

import errno
import os
import resource
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from memfeed.system.files import open_write

T = TypeVar("T")


def with_descriptors(action: Callable[[], T]) -> T:
    """What ``action`` returns; if it runs out of file descriptors, once more with as many as the system grants.

    A store may have ten thousand columns, and many systems start a process with 1,024 descriptors of a million allowed.
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
    """A descriptor to read a file: follows no symbolic link, and waits for nobody at the other end of a pipe."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return with_descriptors(lambda: os.open(path, flags))


class FileHandles:
    """Open file descriptors by path, at most ``most`` at once: a store may have ten thousand columns.

    They are closed with this object, if not before.
    """

    def __init__(self, *, write: bool, most: int = 128) -> None:
        self._write, self._most = write, most
        self._open: dict[Path, int] = {}
        weakref.finalize(self, _close_all, self._open)

    def __call__(self, path: Path) -> int:
        """The descriptor for ``path``; valid until the next call."""
        fd = self._open.pop(path, None)
        if fd is None:
            if len(self._open) >= self._most:
                os.close(self._open.pop(next(iter(self._open))))
            fd = open_write(path) if self._write else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._open[path] = fd  # last used, last in line to be closed
        return fd

    def close(self) -> None:
        """Closes them all."""
        _close_all(self._open)


def _close_all(descriptors: dict[Path, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
