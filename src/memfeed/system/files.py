"""Write files: complete writes, atomic replacement, preallocation, sync, free space.

Everything that changes a file calls this module, so that the tests can make each operation fail. A refusal of the disk
is raised as SpaceError if the disk is full, else as BuildError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from memfeed.errors import BuildError, MemfeedError, SpaceError, StoreError
from memfeed.system import libc
from memfeed.system.messages import path_text

IOV_MAX = 1024
COPY_BYTES, BLOCK_BYTES = 16 << 20, 4096  # the latter of most file systems
_TRIES = 100  # to make a directory that others remove meanwhile
NO_SUPPORT = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` as a Path. Raise StoreError for a URL (``s3://bucket/x``), which would make a folder ``s3:``."""
    text = path_text(path)
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", text)  # Path("s3://x") is "s3:/x"
    if scheme is None:
        return Path(text)
    is_file, rest = scheme[1].lower() == "file", text[scheme.end() :].lstrip("/")
    first, line = ("", f"/{rest}") if is_file else (", to which you copied or mounted it", rest)
    raise StoreError(f"found {text!r:.150}, a URL; expected a path of this machine{first}: path = {line!r:.150}")


def refused(error: OSError, path: object, action: str, size: int = 0) -> MemfeedError:
    """Return the error to raise if the disk refused ``action``: SpaceError if it is full, else BuildError."""
    reason = error.strerror or str(error)
    if error.errno in _NO_ROOM:
        found, of_whom, hint = None, "no room on the disk", "free some space"
        with contextlib.suppress(OSError):
            found = free_bytes(Path(os.path.dirname(str(path))))
        if error.errno == errno.EDQUOT:  # the disk has room, of files or of bytes, for other users
            found, of_whom = None, "your disk quota used up"
            hint = "remove files of yours (quota -s), or get a larger quota,"
        elif error.errno == errno.EFBIG:
            hint = "raise the limit of a file's size (ulimit -f)"
        free = "" if found is None else f", {found:,} bytes free"
        room = f"room for {size:,} bytes more" if size else "room for a few bytes more"
        return SpaceError(
            error.errno,
            f"{path}: found {of_whom} while {action} ({reason}{free}); expected {room}: {hint} and run this again",
        )
    return BuildError(
        f"{path}: found that the disk refused while {action} ({reason}); expected the write to succeed: "
        "check the disk and its permissions and run this again"
    )


def _name_of(fd: int) -> str:
    """Return the path of an open file, for messages."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"file {fd}"


@contextlib.contextmanager
def wrap_disk_errors(path: object, action: str, size: int = 0) -> Iterator[None]:
    """Raise an OSError of the block as SpaceError or BuildError, naming ``path`` and ``action``."""
    try:
        yield
    except OSError as error:
        if isinstance(error, MemfeedError):
            raise
        raise refused(error, path, action, size) from error


def open_write(path: Path, flags: int = 0, *, access: int = os.O_RDWR) -> int:
    """Return a descriptor to read and write a file, which must be no link; ``flags``: O_CREAT, O_TRUNC."""
    with wrap_disk_errors(path, "opening it to write"):
        return os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o644)


@contextlib.contextmanager
def opened(path: Path, flags: int = 0) -> Iterator[int]:
    """Open a file as ``open_write`` does, for the block."""
    fd = open_write(path, flags)
    try:
        yield fd
    finally:
        with wrap_disk_errors(path, "closing it"):  # NFS tells of a full disk or a quota here
            os.close(fd)


def write_at(fd: int, data: Any, offset: int) -> int:
    """Write all of ``data`` (bytes or a C-contiguous buffer) at ``offset``; return the bytes written."""
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
    """Write all of several byte buffers, one after another, at ``offset``; return the bytes written."""
    done = 0
    for first in range(0, len(buffers), IOV_MAX):
        group = buffers[first : first + IOV_MAX]
        size = sum(len(buffer) for buffer in group)
        try:
            wrote = os.pwritev(fd, group, offset + done) if len(group) > 1 else 0
        except OSError as error:
            raise refused(error, _name_of(fd), f"writing {size:,} bytes", size) from error
        if wrote < size:  # one buffer, or a short write: finish it buffer by buffer
            at = 0
            for buffer in group:
                skip = min(max(wrote - at, 0), len(buffer))
                write_at(fd, buffer[skip:], offset + done + at + skip)
                at += len(buffer)
        done += size
    return done


def write_file(path: Path, data: Any) -> None:
    """Create the file with these bytes; an existing one, perhaps read-only, is replaced. Neither atomic nor synced."""
    remove(path)
    with opened(path, os.O_CREAT) as fd:
        write_at(fd, data, 0)


def preallocate(fd: int, size: int, offset: int = 0) -> None:
    """Reserve ``size`` bytes at ``offset`` on the disk, growing the file, so that no later write runs out of room.

    Calls fallocate(2) itself: posix_fallocate rewrites every block if the file system does not support it. In that case
    the file only gets its length. Raises SpaceError if the disk is full.
    """
    if size <= 0:
        return
    with wrap_disk_errors(_name_of(fd), f"reserving {size:,} bytes", size):
        try:
            libc.fallocate(fd, offset, size)
        except OSError as error:
            if error.errno not in NO_SUPPORT:
                raise
            if os.fstat(fd).st_size < offset + size:
                os.ftruncate(fd, offset + size)


def punch(fd: int, ranges: Iterable[tuple[int, int]]) -> bool:
    """Give the disk back the space of byte ranges (first, last + 1) of an open file, whose length stays.

    Whole blocks are given back; they read as zeros afterwards. Returns False if the file system refuses: then the file
    keeps the space, and is right all the same.
    """
    try:
        for first, last in ranges:
            first, last = -(-first // BLOCK_BYTES) * BLOCK_BYTES, last // BLOCK_BYTES * BLOCK_BYTES
            if last > first:
                libc.punch_hole(fd, first, last - first)
    except OSError:
        return False
    return True


def truncate(path: Path, size: int) -> None:
    """Cut or lengthen a file to ``size`` bytes."""
    with opened(path) as fd, wrap_disk_errors(path, f"making it {size:,} bytes long", size):
        os.ftruncate(fd, size)


def sync(fd: int) -> None:
    """Wait until the bytes of an open file are on the disk.

    The system reports a failure once, and the next sync succeeds without the bytes. So whoever calls this writes them
    again afterwards, or sees to it that they count as missing, as `Units.sync` does.
    """
    try:
        (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)
    except OSError as error:
        raised: Any = refused(error, _name_of(fd), "waiting for the disk")
        raised.unsynced = True
        raise raised from error


def sync_data(path: Path) -> None:
    """Wait until the bytes of a file are on the disk; see ``sync``."""
    with open(path, "rb") as file:
        sync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the entries of a directory are on the disk.

    A file system that cannot write the entries writes nothing more until it is mounted again (ext4, xfs, btrfs). So
    after a failure the entries are not made again, but whoever goes on syncs the directory again before anything
    depends on them.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        with wrap_disk_errors(path, "waiting for the disk"):
            os.fsync(fd)
    finally:
        os.close(fd)


def sync_directories(root: Path, names: Iterable[str]) -> None:
    """Wait until the entries of files, named from ``root``, and of the directories down to them are on the disk."""
    directories = {root, *(root / above for name in names for above in Path(name).parents)}
    for directory in sorted(directories, reverse=True):  # the target of a move is synced before its source
        sync_directory(directory)


def write_atomically(path: Path, data: Any) -> None:
    """Replace a file so that it always has either its old content or all of ``data``; synced.

    After an error the next call writes all bytes again.
    """
    temporary = path.with_name(path.name + ".tmp")
    with opened(temporary, os.O_CREAT | os.O_TRUNC) as fd:
        write_at(fd, data, 0)
        sync(fd)
    rename(temporary, path)
    sync_directory(path.parent)


def rename(path: Path, to: Path) -> None:
    """Rename a file or directory, replacing a file that has the new name."""
    with wrap_disk_errors(path, f"renaming it to {to}"):
        os.rename(path, to)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one step (renameat2, RENAME_EXCHANGE); return False if the system cannot."""
    try:
        libc.exchange(one, other)
    except OSError as error:
        if error.errno in NO_SUPPORT:
            return False
        raise refused(error, one, f"exchanging it with {other}") from error
    return True


def chmod(path: Path, mode: int) -> None:
    """Set the permissions of a file, which must be readable and no link.

    A file of this user's stays as it is where the file system keeps no permissions (FAT, exFAT).
    """
    with wrap_disk_errors(path, "setting its permissions"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            os.fchmod(fd, mode)
        except OSError as error:
            if error.errno not in {errno.EPERM, *NO_SUPPORT} or os.fstat(fd).st_uid != os.geteuid():
                raise
        finally:
            os.close(fd)


def make_directory(path: Path) -> None:
    """Make a directory and those above it, unless they exist. They are never writable for all users.

    Raises BuildError if that is impossible, for instance where a link leads nowhere.
    """
    for tries_left in reversed(range(_TRIES)):  # others may make and remove the same directories, between any two lines
        try:
            os.mkdir(path, 0o775)  # never writable for all, whatever the umask is: see `memfeed.system.trust`
            return
        except OSError as error:
            try:
                if stat.S_ISDIR(os.stat(path).st_mode):
                    return
                can_be_made = False
            except FileNotFoundError:
                if path.is_symlink():
                    raise BuildError(
                        f"{path}: found a symbolic link that leads nowhere; expected a directory: remove the link, or "
                        "make the directory that it leads to"
                    ) from error
                can_be_made = isinstance(error, (FileExistsError, FileNotFoundError))
            except OSError:  # what it is cannot be seen: what mkdir said is the better reason
                can_be_made = False
            if not can_be_made or not tries_left:
                raise refused(error, path, "making a directory") from error
            if isinstance(error, FileNotFoundError):
                make_directory(path.parent)


def remove(path: Path) -> None:
    """Remove a file if it exists."""
    with wrap_disk_errors(path, "removing it"), contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_directory(path: Path) -> None:
    """Remove an empty directory."""
    with wrap_disk_errors(path, "removing it"):
        os.rmdir(path)


def remove_tree(path: Path, keep: Sequence[Path] = ()) -> None:
    """Remove a directory and everything in it except the files ``keep``.

    A missing directory, and files that others remove meanwhile, are no errors. Of a symbolic link only the link is
    removed.
    """
    if os.path.islink(path) and not keep:
        remove(path)
        return
    with wrap_disk_errors(path, "removing it"):
        while os.path.exists(path):
            try:
                _remove_all(path, keep)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise  # else a process that waits for the build has created its lock meanwhile
            else:
                if keep:
                    return


def _remove_all(path: Path, keep: Sequence[Path]) -> None:
    """Remove names by the descriptor of their directory: a link that another user puts into a path leads nowhere."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    unless_missing = contextlib.suppress(FileNotFoundError)
    with unless_missing:
        for top, directories, names, fd in os.fwalk(path, topdown=False, onerror=refuse):
            for name in names:
                if Path(top, name) not in keep:
                    with unless_missing:
                        os.unlink(name, dir_fd=fd)
            for name in directories:
                with unless_missing:
                    if stat.S_ISLNK(os.lstat(name, dir_fd=fd).st_mode):
                        os.unlink(name, dir_fd=fd)
                    elif not any(Path(top, name) in kept.parents for kept in keep):
                        os.rmdir(name, dir_fd=fd)
    if not keep:
        with unless_missing:
            os.rmdir(path)


def free_bytes(path: Path) -> int | None:
    """Return the bytes that this user may still write on the file system of ``path``, which need not exist.

    None if the file system does not tell: ramfs and some network and FUSE file systems report a size of 0.
    """
    whole = path.absolute()
    existing = next(one for one in (whole, *whole.parents) if one.exists())
    found = shutil.disk_usage(existing)
    return found.free if found.total else None


def check_room(path: Path, needed: int, purpose: str, advice: str = "free some space") -> None:
    """Raise SpaceError unless ``needed`` bytes are free on the file system of ``path``; ``advice``: what to do then."""
    free = free_bytes(path)
    if free is not None and needed > free:
        raise SpaceError(
            errno.ENOSPC,
            f"{path}: found {free:,} bytes free; expected at least {needed:,} for {purpose}: {advice}",
        )
