"""One builder at a time: who holds the lock of a build makes the store, the others wait."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from memfeed import files, format
from memfeed.format import WORK

WAIT_SECONDS = 0.1
_MOST_MISSING = 20  # looks at a directory without a lock file in it, before it is taken for a dead builder's
_held: set[int] = set()


class _Owner(msgspec.Struct, frozen=True):
    """Who holds the lock, for the message of those who wait."""

    pid: int
    host: str


def _forget() -> None:
    # a flock lives as long as any copy of its descriptor: a child that outlives a dead builder would keep it
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def claim(path: Path, *, tell: bool = True) -> Iterator[Path]:
    """Makes this process the one builder of the store at ``path``; yields the build's directory.

    Waits while another process builds it, saying on stderr which. The lock dies with its holder, whose children have no
    part in it.
    """
    root = format.build_path(path)
    fd = _wait_for(root, path, tell)
    try:
        yield root
    finally:
        try:
            _leave(root, fd)
        finally:
            _close(fd)


def _wait_for(root: Path, path: Path, tell: bool) -> int:
    missing, seen, told = 0, None, None
    while True:
        try:
            # a root without its work directory is a commit's last moment, or what was left of one: give it time
            if not root.exists() or missing > _MOST_MISSING:
                (root / WORK).mkdir(parents=True, exist_ok=True)
            fd = _try_lock(root / WORK)
        except (FileNotFoundError, FileExistsError):  # another removes it, before or while mkdir looks again
            missing += 1
        else:
            if fd is not None:
                return fd
            owner = _read_owner(root)
            if tell and owner is not None and owner == seen != told:  # seen twice: no dead builder's name
                print(
                    f"memfeed: process {owner.pid} on {owner.host} is building {path}; waiting for it",
                    file=sys.stderr,
                    flush=True,
                )
                told = owner
            seen = owner
        time.sleep(WAIT_SECONDS)


def _try_lock(work: Path) -> int | None:
    """The descriptor that holds the lock, or None if another process has it.

    Raises FileNotFoundError if the directory is not there, or was taken away meanwhile.
    """
    fd = os.open(work / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    _held.add(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(fd, work / "lock"):
            (work / "owner").write_bytes(msgspec.json.encode(_Owner(os.getpid(), files.host_name())))
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        _close(fd)
        raise
    _close(fd)
    return None


def _is_at(fd: int, path: Path) -> bool:
    """Whether the file at ``path`` is the open one: a lock on a file that was removed keeps nobody out."""
    return os.path.samestat(os.stat(path), os.fstat(fd))


def _close(fd: int) -> None:
    _held.discard(fd)
    os.close(fd)


def _leave(root: Path, fd: int) -> None:
    """Before the lock is given back: removes the owner's name, and all of it if nothing was begun."""
    with contextlib.suppress(OSError):
        if not _is_at(fd, root / WORK / "lock"):
            return  # the build was finished or dropped, and another may hold a new one's lock
        (root / WORK / "owner").unlink(missing_ok=True)
        if not (root / WORK / "settings.json").exists() and not (root / format.MANIFEST).exists():
            (root / WORK / "lock").unlink()
            (root / WORK).rmdir()
            root.rmdir()


def _read_owner(root: Path) -> _Owner | None:
    try:
        return msgspec.json.decode((root / WORK / "owner").read_bytes(), type=_Owner)
    except (OSError, msgspec.DecodeError):
        return None
