"""Disk primitives: whole writes, atomic replacement, preallocation, sync, free space.

Everything that changes a file goes through here, so that a test can make each of these fail.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from memfeed.errors import SpaceError

T = TypeVar("T")
IOV_MAX = 1024
_NO_SUPPORT = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


def write_at(fd: int, data: Any, offset: int) -> int:
    """All of ``data`` (bytes or a C-contiguous buffer) at ``offset``; returns the bytes written. Raises OSError."""
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
    return done


def write_all_at(fd: int, buffers: Sequence[Any], offset: int) -> int:
    """All of several byte buffers, one behind the other, at ``offset``; returns the bytes written."""
    done = 0
    for first in range(0, len(buffers), IOV_MAX):
        group = buffers[first : first + IOV_MAX]
        want = sum(len(buffer) for buffer in group)
        wrote = os.pwritev(fd, group, offset + done) if len(group) > 1 else 0
        if wrote < want:  # one buffer, or a short write: finish it piece by piece
            at = 0
            for buffer in group:
                skip = min(max(wrote - at, 0), len(buffer))
                write_at(fd, buffer[skip:], offset + done + at + skip)
                at += len(buffer)
        done += want
    return done


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def preallocate(fd: int, size: int, offset: int = 0) -> None:
    """Reserves ``size`` bytes at ``offset`` on the disk, growing the file, so that no later write runs out of room.

    Calls fallocate(2) itself: posix_fallocate rewrites every block where the file system lacks it. There the file is
    only made long enough. Raises OSError (ENOSPC) when the disk is full.
    """
    if size <= 0:
        return
    fallocate = getattr(_libc(), "fallocate", None)
    if fallocate is not None:
        result = fallocate(fd, 0, ctypes.c_int64(offset), ctypes.c_int64(size))
        if result == 0:
            return
        code = ctypes.get_errno()
        if code not in _NO_SUPPORT:
            raise OSError(code, f"{os.strerror(code)} while reserving {size} bytes")
    if os.fstat(fd).st_size < offset + size:
        os.ftruncate(fd, offset + size)


def sync_data(path: Path) -> None:
    """Waits until the file's bytes are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Waits until the directory's entries are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, data: bytes) -> None:
    """The file has either its old content or all of ``data``, whatever happens."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_at(fd, data, 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, path)
    sync_directory(path.parent)


def exchange(one: Path, other: Path) -> bool:
    """Swaps two directories in one step (renameat2, RENAME_EXCHANGE); False where the system cannot."""
    renameat2 = getattr(_libc(), "renameat2", None)
    if renameat2 is None:
        return False
    at_cwd, swap = -100, 2
    if renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), swap) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_SUPPORT:
        return False
    raise OSError(code, os.strerror(code), str(one))


def remove_tree(path: Path) -> None:
    """Removes a directory of ours and all in it; one that is not there, or that others remove too, is fine."""
    while path.exists():
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # who waits for the build has looked for its lock
                raise


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write on the file system that holds ``path`` (or will hold it)."""
    at = path.absolute()
    while not at.exists():
        at = at.parent
    return shutil.disk_usage(at).free


def check_room(path: Path, needed: int, what: str) -> None:
    """Raises SpaceError unless ``needed`` bytes fit beside what is there."""
    free = free_bytes(path)
    if needed > free:
        raise SpaceError(
            errno.ENOSPC,
            f"{path}: found {free:,} bytes free; expected at least {needed:,} for {what}: "
            "free some space, choose another path, or store fewer or smaller fields (dtypes=)",
        )


def memory_limit() -> int:
    """Bytes of memory that this process can expect to have, page cache included: what is available, or its cgroup's."""
    limits = [line.split()[1] for line in _read("/proc/meminfo").splitlines() if line.startswith("MemAvailable:")]
    found = [int(limit) * 1024 for limit in limits] or [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        names = {"": "/sys/fs/cgroup{}/memory.max", "memory": "/sys/fs/cgroup/memory{}/memory.limit_in_bytes"}
        for at in (group.rstrip("/"), ""):  # inside a container the group's own directory is the root
            limit = _read(names.get(controllers, "").format(at)).strip()
            found += [int(limit)] if limit.isdigit() else []
    return min(found)


def page_out(address: int, size: int) -> None:
    """Takes whole pages of a map out of this process and, where nobody else maps them, out of the page cache.

    Pages that the process has changed are kept (in swap). Does nothing where the system cannot (before Linux 5.4).
    """
    page, pageout = os.sysconf("SC_PAGE_SIZE"), 21
    first, last = -(-address // page) * page, (address + size) // page * page
    if sys.platform == "linux" and last > first:
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), pageout)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def die_with_parent() -> None:
    """Has the kernel kill this process once the one that started it is dead (Linux; nothing elsewhere)."""
    set_parent_death_signal, kill = 1, 9
    if sys.platform == "linux":
        _libc().prctl(set_parent_death_signal, kill, 0, 0, 0)


def boot_id() -> str:
    """Names this boot of this machine: after another one, writes that were not synced may be gone."""
    return _read("/proc/sys/kernel/random/boot_id").strip()


def host_name() -> str:
    """This machine's name."""
    return socket.gethostname()


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


class Handles:
    """Open file descriptors by path, at most ``most`` at once: a store may have ten thousand columns."""

    def __init__(self, flags: int, most: int = 128) -> None:
        self._flags, self._most = flags | getattr(os, "O_CLOEXEC", 0), most
        self._open: dict[Path, int] = {}

    def __call__(self, path: Path) -> int:
        """The descriptor for ``path``; valid until the next call."""
        fd = self._open.pop(path, None)
        if fd is None:
            if len(self._open) >= self._most:
                os.close(self._open.pop(next(iter(self._open))))
            fd = os.open(path, self._flags, 0o644)
        self._open[path] = fd  # last used, last in line to be closed
        return fd

    def close(self) -> None:
        """Closes them all."""
        while self._open:
            os.close(self._open.popitem()[1])
