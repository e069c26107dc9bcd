"""File descriptors: open files to read, limit how many are open, raise the system's limit when it is reached.

Forked children get positions of their own in files that are open for reading.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import resource
import stat
import sys
import threading
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


@functools.cache
def separate_positions() -> None:
    """Let each child that is forked from now on have positions of its own in all files that are open for reading.

    A forked child shares the position of an open file with its parent and its other children: where one of them seeks,
    another one reads. A dataset that opens its file when the first sample is read has one of its own in each worker of
    a DataLoader. If its samples are read before the workers are forked, they would read other bytes than they ask for.
    """
    os.register_at_fork(before=_note_positions, after_in_parent=_forget_positions, after_in_child=_reopen)


class _Noted(threading.local):
    opened: tuple[tuple[int, int, int], ...] = ()  # descriptors, their flags and positions, when this thread forks


_noted = _Noted()
_DIRECTORY = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"


def _note_positions() -> None:
    opened = []
    with contextlib.suppress(OSError):
        for fd in map(int, os.listdir(_DIRECTORY)):
            with contextlib.suppress(OSError):  # of the listing itself, which is closed
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                if fd > 2 and flags & os.O_ACCMODE == os.O_RDONLY and stat.S_ISREG(os.fstat(fd).st_mode):
                    opened.append((fd, flags, os.lseek(fd, 0, os.SEEK_CUR)))
    _noted.opened = tuple(opened)


def _forget_positions() -> None:
    _noted.opened = ()


def _reopen() -> None:
    for fd, flags, position in _noted.opened:
        with contextlib.suppress(OSError):
            new = os.open(_path_of(fd), flags | os.O_CLOEXEC)
            try:
                if os.path.samestat(os.fstat(new), os.fstat(fd)):
                    os.lseek(new, position, os.SEEK_SET)
                    os.dup2(new, fd, inheritable=os.get_inheritable(fd))
            finally:
                os.close(new)


def _path_of(fd: int) -> str | bytes:
    if sys.platform == "darwin":  # a file below /dev/fd has the position of the open one
        return fcntl.fcntl(fd, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")
    return f"{_DIRECTORY}/{fd}"
