"""What a process does to files, one operation after another: whoever watches may let it happen, or not."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from memfeed.system import file_copies, files, libc


@dataclass(frozen=True)
class Operation:
    """One operation: ``create``, ``open`` (to write), ``write``, ``truncate``, ``reserve``, ``sync``, ``rename``,
    ``exchange``, ``link``, ``chmod``, ``mkdir``, ``unlink``, ``rmdir`` or ``punch``.

    ``path`` is absolute, ``to`` the second one of a rename, exchange or link; ``data`` goes to ``offset`` of a file;
    ``size`` is the new length of a file that is truncated, the end of what is reserved, or the
    bytes that are punched.
    """

    kind: str
    path: str
    to: str = ""
    data: bytes = b""
    offset: int = 0
    size: int = 0

    def __str__(self) -> str:
        much = f" {len(self.data)} bytes at {self.offset}" if self.kind == "write" else ""
        return f"{self.kind} {self.path}{' ' + self.to if self.to else ''}{much}"


Watch = Callable[[Operation, Callable[..., Any]], Any]
"""Called in place of each operation, one at a time; the second argument does it. Of a write that can be told to take
only so many bytes: ``do(limit)``."""


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Within the block `memfeed.system.files` and ``file_copies`` do their operations through ``watch``."""
    lock = threading.Lock()

    def each(operation: Operation, do: Callable[..., Any]) -> Any:
        with lock:
            return watch(operation, do)

    names: list[Any] = [files, file_copies]
    calls: Any = libc
    fallocate, punch_hole, swap = libc.fallocate, libc.punch_hole, libc.exchange

    def reserve(fd: int, offset: int, size: int) -> None:
        end = max(offset + size, os.fstat(fd).st_size)
        each(Operation("reserve", _path(fd), size=end), lambda: fallocate(fd, offset, size))

    def exchange(one: Any, other: Any) -> None:
        each(Operation("exchange", _absolute(one), _absolute(other)), lambda: swap(one, other))

    def punch(fd: int, offset: int, size: int) -> None:
        each(Operation("punch", _path(fd), offset=offset, size=size), lambda: punch_hole(fd, offset, size))

    calls.fallocate, calls.punch_hole, calls.exchange = reserve, punch, exchange
    for one in names:
        one.os = _System(each)
    try:
        yield
    finally:
        calls.fallocate, calls.punch_hole, calls.exchange = fallocate, punch_hole, swap
        for one in names:
            one.os = os


def _path(fd: int) -> str:
    """The path that an open file has now; it ends in " (deleted)" if it has none any more."""
    return os.readlink(f"/proc/self/fd/{fd}")


def _absolute(path: Any, dir_fd: int | None = None) -> str:
    return str(os.path.abspath(path if dir_fd is None else os.path.join(_path(dir_fd), path)))


class _System:
    """The module ``os``, whose functions that change files are done by ``each``."""

    def __init__(self, each: Watch) -> None:
        self._each = each

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        """See os.open."""
        if not flags & (os.O_WRONLY | os.O_RDWR):
            return os.open(path, flags, mode)
        new = not os.path.exists(path) and flags & os.O_CREAT
        cut = flags & os.O_TRUNC and not new

        def do() -> int:
            return os.open(path, flags, mode)

        kind = "create" if new else "truncate" if cut else "open"
        fd: int = self._each(Operation(kind, _absolute(path)), do)
        return fd

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        """See os.pwrite."""
        return self.pwritev(fd, [data], offset)

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        """See os.pwritev."""
        data = b"".join(bytes(buffer) for buffer in buffers)

        def do(limit: int = len(data)) -> int:
            return os.pwrite(fd, data[:limit], offset)

        wrote: int = self._each(Operation("write", _path(fd), data=data, offset=offset), do)
        return wrote

    def ftruncate(self, fd: int, size: int) -> None:
        """See os.ftruncate."""
        self._each(Operation("truncate", _path(fd), size=size), lambda: os.ftruncate(fd, size))

    def truncate(self, path: Any, size: int) -> None:
        """See os.truncate."""
        self._each(Operation("truncate", _absolute(path), size=size), lambda: os.truncate(path, size))

    def fsync(self, fd: int) -> None:
        """See os.fsync."""
        self._each(Operation("sync", _path(fd)), lambda: os.fsync(fd))

    def fdatasync(self, fd: int) -> None:
        """See os.fdatasync."""
        self._each(Operation("sync", _path(fd)), lambda: os.fdatasync(fd))

    def rename(self, path: Any, to: Any) -> None:
        """See os.rename."""
        self._each(Operation("rename", _absolute(path), _absolute(to)), lambda: os.rename(path, to))

    def link(self, path: Any, to: Any) -> None:
        """See os.link."""
        self._each(Operation("link", _absolute(path), _absolute(to)), lambda: os.link(path, to))

    def fchmod(self, fd: int, mode: int) -> None:
        """See os.fchmod."""
        self._each(Operation("chmod", _path(fd), size=mode), lambda: os.fchmod(fd, mode))

    def mkdir(self, path: Any, mode: int) -> None:
        """See os.mkdir."""
        self._each(Operation("mkdir", _absolute(path)), lambda: os.mkdir(path, mode))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        """See os.unlink."""
        self._each(Operation("unlink", _absolute(path, dir_fd)), lambda: os.unlink(path, dir_fd=dir_fd))

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        """See os.rmdir."""
        self._each(Operation("rmdir", _absolute(path, dir_fd)), lambda: os.rmdir(path, dir_fd=dir_fd))
