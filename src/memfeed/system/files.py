"""Disk primitives: whole writes, atomic replacement, preallocation, sync, free space.

Everything that changes a file goes through here, so that the tests can make each of these fail. What the disk
refuses is raised as SpaceError where it is full, else as BuildError.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from memfeed.errors import BuildError, MemfeedError, SpaceError

T = TypeVar("T")
IOV_MAX = 1024
COPY_BYTES = 16 << 20
_NO_SUPPORT = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_NO_LINKS = _NO_SUPPORT | {errno.EPERM, errno.EXDEV, errno.EMLINK}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
LIBC = ctypes.CDLL(None, use_errno=True)


def refused(error: OSError, path: object, doing: str, size: int = 0) -> MemfeedError:
    """What to raise where the disk refused to do something: SpaceError if it is full, else BuildError."""
    reason = error.strerror or str(error)
    if error.errno in _NO_ROOM:
        try:
            free = f", {shutil.disk_usage(os.path.dirname(str(path)) or '.').free:,} bytes free"
        except OSError:
            free = ""
        hint = "free some space" if error.errno != errno.EFBIG else "raise the limit of a file's size (ulimit -f)"
        return SpaceError(
            error.errno,
            f"{path}: found no room on the disk while {doing} ({reason}{free}); expected room for {size:,} bytes more: "
            f"{hint} and run this again",
        )
    return BuildError(
        f"{path}: found that the disk refused while {doing} ({reason}); expected it to take what is written: "
        "see to the disk or its permissions and run this again"
    )


def _name_of(fd: int) -> str:
    """The path of an open file, for messages."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"file {fd}"


@contextlib.contextmanager
def wrap_disk_errors(path: object, doing: str, size: int = 0) -> Iterator[None]:
    """Raise an OSError of the block as SpaceError or BuildError, naming ``path`` and what was being done."""
    try:
        yield
    except OSError as error:
        if isinstance(error, MemfeedError):
            raise
        raise refused(error, path, doing, size) from error


def open_write(path: Path, flags: int = 0) -> int:
    """A descriptor to read and write a file; ``flags`` may have O_CREAT or O_TRUNC."""
    with wrap_disk_errors(path, "opening it to write"):
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644)


def write_at(fd: int, data: Any, offset: int) -> int:
    """All of ``data`` (bytes or a C-contiguous buffer) at ``offset``; returns the bytes written."""
    view = memoryview(data).cast("B")
    done = 0
    try:
        while done < len(view):
            wrote = os.pwrite(fd, view[done:], offset + done)
            if not wrote:
                raise OSError(errno.EIO, "the system wrote nothing")
            done += wrote
    except OSError as error:
        raise refused(error, _name_of(fd), f"writing {len(view):,} bytes", len(view) - done) from error
    return done


def write_all_at(fd: int, buffers: Sequence[Any], offset: int) -> int:
    """All of several byte buffers, one behind the other, at ``offset``; returns the bytes written."""
    done = 0
    for first in range(0, len(buffers), IOV_MAX):
        group = buffers[first : first + IOV_MAX]
        want = sum(len(buffer) for buffer in group)
        try:
            wrote = os.pwritev(fd, group, offset + done) if len(group) > 1 else 0
        except OSError as error:
            raise refused(error, _name_of(fd), f"writing {want:,} bytes", want) from error
        if wrote < want:  # one buffer, or a short write: finish it piece by piece
            at = 0
            for buffer in group:
                skip = min(max(wrote - at, 0), len(buffer))
                write_at(fd, buffer[skip:], offset + done + at + skip)
                at += len(buffer)
        done += want
    return done


def write_file(path: Path, data: Any) -> None:
    """Makes the file anew with these bytes; it may have been read-only. Neither atomic nor synced."""
    remove(path)
    fd = open_write(path, os.O_CREAT)
    try:
        write_at(fd, data, 0)
    finally:
        os.close(fd)


def _fallocate(fd: int, offset: int, size: int) -> None:
    """fallocate(2) itself; raises OSError, also where there is none."""
    call = getattr(LIBC, "fallocate", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(fd, 0, ctypes.c_int64(offset), ctypes.c_int64(size)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _swap(one: Path, other: Path) -> None:
    """renameat2(2) with RENAME_EXCHANGE; raises OSError, also where there is none."""
    call = getattr(LIBC, "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    at_cwd, swap = -100, 2
    if call(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), swap) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def preallocate(fd: int, size: int, offset: int = 0) -> None:
    """Reserves ``size`` bytes at ``offset`` on the disk, growing the file, so that no later write runs out of room.

    Calls fallocate(2) itself: posix_fallocate rewrites every block where the file system lacks it. There the file is
    only made long enough. Raises SpaceError when the disk is full.
    """
    if size <= 0:
        return
    try:
        try:
            _fallocate(fd, offset, size)
        except OSError as error:
            if error.errno not in _NO_SUPPORT:
                raise
            if os.fstat(fd).st_size < offset + size:
                os.ftruncate(fd, offset + size)
    except OSError as error:
        raise refused(error, _name_of(fd), f"reserving {size:,} bytes", size) from error


def truncate(path: Path, size: int) -> None:
    """Cuts or lengthens a file."""
    with wrap_disk_errors(path, f"making it {size:,} bytes long", size):
        os.truncate(path, size)


def sync(fd: int) -> None:
    """Waits until an open file's bytes are on the disk.

    An error has the attribute ``unsynced``: the system tells of it once, drops what it could not write, and lets the
    next sync succeed.
    """
    try:
        (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)
    except OSError as error:
        raised: Any = refused(error, _name_of(fd), "waiting for the disk")
        raised.unsynced = True
        raise raised from error


def sync_data(path: Path) -> None:
    """Waits until the file's bytes are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        sync(fd)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Waits until the directory's entries are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with wrap_disk_errors(path, "waiting for the disk"):
            os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, data: Any) -> None:
    """The file has either its old content or all of ``data``, whatever happens."""
    temporary = path.with_name(path.name + ".tmp")
    fd = open_write(temporary, os.O_CREAT | os.O_TRUNC)
    try:
        write_at(fd, data, 0)
        sync(fd)
    finally:
        os.close(fd)
    rename(temporary, path)
    sync_directory(path.parent)


def rename(path: Path, to: Path) -> None:
    """Gives a file or directory another name, replacing a file that has it."""
    with wrap_disk_errors(path, f"renaming it to {to}"):
        os.rename(path, to)


def lock(fd: int, path: Path) -> None:
    """Takes the lock of an open file; raises BlockingIOError where another process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        raise refused(error, path, "locking it: some network file systems have no locks") from error


def link(path: Path, to: Path) -> bool:
    """Gives a file a second name; False where the file system has no such."""
    try:
        os.link(path, to)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise refused(error, to, f"linking it to {path}") from error
    return True


def copy(path: Path, to: Path) -> None:
    """Makes a file anew with the bytes of another; not synced."""
    with open(path, "rb") as source:
        size, done = os.fstat(source.fileno()).st_size, 0
        check_room(to, size, f"a copy of {path}")
        fd = open_write(to, os.O_CREAT | os.O_TRUNC)
        try:
            while block := source.read(COPY_BYTES):
                done += write_at(fd, block, done)
        finally:
            os.close(fd)


def exchange(one: Path, other: Path) -> bool:
    """Swaps two directories in one step (renameat2, RENAME_EXCHANGE); False where the system cannot."""
    try:
        _swap(one, other)
    except OSError as error:
        if error.errno in _NO_SUPPORT:
            return False
        raise refused(error, one, f"exchanging it with {other}") from error
    return True


def chmod(path: Path, mode: int) -> None:
    """Sets a file's permissions."""
    with wrap_disk_errors(path, "setting its permissions"):
        os.chmod(path, mode)


def make_directory(path: Path) -> None:
    """Makes a directory and those above it; one that is there is fine."""
    while not path.is_dir():
        try:
            os.mkdir(path)
        except FileNotFoundError:
            make_directory(path.parent)
        except FileExistsError as error:
            with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                if not stat.S_ISDIR(os.stat(path).st_mode):
                    raise refused(error, path, "making a directory") from error
        except OSError as error:
            raise refused(error, path, "making a directory") from error


def remove(path: Path) -> None:
    """Removes a file; one that is not there is fine."""
    with wrap_disk_errors(path, "removing it"), contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_directory(path: Path) -> None:
    """Removes an empty directory."""
    with wrap_disk_errors(path, "removing it"):
        os.rmdir(path)


def remove_tree(path: Path, keep: Sequence[Path] = ()) -> None:
    """Removes a directory of ours and all in it but the files ``keep``.

    What is not there, or what others remove meanwhile, is fine. Of a symbolic link only the link is removed.
    """
    if path.is_symlink() and not keep:
        remove(path)
        return
    with wrap_disk_errors(path, "removing it"):
        while path.exists():
            try:
                _remove_all(path, keep)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise  # else who waits for the build has looked for its lock meanwhile
            else:
                if keep:
                    return


def _remove_all(path: Path, keep: Sequence[Path]) -> None:
    gone = contextlib.suppress(FileNotFoundError)
    for top, directories, names in os.walk(path, topdown=False):
        for name in names:
            if Path(top, name) not in keep:
                with gone:
                    os.unlink(os.path.join(top, name))
        for name in directories:
            at = Path(top, name)
            with gone:
                if at.is_symlink():
                    os.unlink(at)
                elif not any(at in one.parents for one in keep):
                    os.rmdir(at)
    if not keep:
        with gone:
            os.rmdir(path)


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
