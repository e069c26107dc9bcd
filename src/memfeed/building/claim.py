"""One builder at a time: who holds the lock of a build makes the store, the others wait."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from memfeed.errors import BuildError, MemfeedError, StoreError
from memfeed.store import format
from memfeed.store.format import WORK
from memfeed.system import files, machine

WAIT_SECONDS = 0.1
TELL_SECONDS = 60.0
_MOST_MISSING = 20  # looks at a directory without a lock file in it, before it is taken for a dead builder's
_descriptors: set[int] = set()
_held: dict[Path, int] = {}  # builds of this process, and the threads that hold them


class _Owner(msgspec.Struct, frozen=True):
    """Who holds the lock, for the message of those who wait."""

    pid: int
    host: str


def _forget() -> None:
    # a flock lives as long as any copy of its descriptor: a child that outlives a dead builder would keep it
    _held.clear()
    while _descriptors:
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_forget)


def clear(root: Path) -> None:
    """Removes all of a build but its lock, which stays while others may wait for it.

    Its settings go first: what is left if this is cut short is no build any more.
    """
    files.remove(root / WORK / "settings.json")
    files.remove_tree(root, keep=[root / WORK / "lock", root / WORK / "owner"])


@contextlib.contextmanager
def claim(path: Path, *, first: Callable[[Path], None] | None = None, wait: bool = True) -> Iterator[Path]:
    """Makes this process the one builder of the store at ``path``; yields the build's directory.

    Waits while another process builds it, saying on stderr which, once a minute. The lock dies with its holder, whose
    children have no part in it. ``first`` is called with ``path`` once it is held; where that moves or removes the
    build's directory, the lock's file is gone with it and would keep nobody out: then the store is claimed once more.
    Without ``wait`` raises BuildError where another process holds it.
    """
    if path.name.endswith((format.BUILD_SUFFIX, f"{format.BUILD_SUFFIX}.old")):
        raise StoreError(f"{path}: found a name as only unfinished stores have it; expected one that ends in no .build")
    root = format.build_path(path)
    _require_ours(root)
    while True:
        fd = _wait_for(root, path, wait)
        try:
            if first is not None:
                first(path)
            if first is None or _holds(fd, root):
                _held[root] = threading.get_ident()
                yield root
                return
        finally:
            _held.pop(root, None)
            try:
                _leave(root, fd)
            finally:
                _close(fd)


def _require_ours(root: Path) -> None:
    """Raises StoreError if something else is where the build would be: it would be taken for leftovers of one."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        names = [root.name]
    if names and WORK not in names and format.MANIFEST not in names:
        raise StoreError(
            f"{root}: found something that is no build of memfeed's, at the place where one would be made; expected "
            "nothing there: move it away, or choose another path"
        )


def _wait_for(root: Path, path: Path, wait: bool) -> int:
    missing, seen, told, due, since = 0, None, None, 0.0, time.monotonic()
    while True:
        try:
            # a root without its work directory is a commit's last moment, or what was left of one: give it time
            if not root.exists() or missing > _MOST_MISSING:
                files.make_directory(root / WORK)
            fd = _try_lock(root / WORK)
        except FileNotFoundError:  # another removes it
            missing += 1
        else:
            if fd is not None:
                return fd
            if not wait:
                raise BuildError(f"{path}: found another process that builds it; expected none")
            owner = _read_owner(root)
            if _held.get(root) == threading.get_ident():
                raise BuildError(
                    f"{path}: found that this very thread is building it already (a Writer, or a dataset that calls "
                    "cache() on its own store); expected another path: it would wait for itself"
                )
            waited = time.monotonic() - since
            if owner != told:
                due = 0.0
            if owner is not None and owner == seen and waited >= due:  # seen twice: no dead builder's name
                _say(owner, path, waited)
                told, due = owner, waited + TELL_SECONDS
            seen = owner
        time.sleep(WAIT_SECONDS)


def _say(owner: _Owner, path: Path, waited: float) -> None:
    so_far = f" ({waited / 60:.0f} min so far)" if waited >= TELL_SECONDS else ""
    print(
        f"memfeed: process {owner.pid} on {owner.host} is building {path}; waiting for it{so_far}",
        file=sys.stderr,
        flush=True,
    )


def _try_lock(work: Path) -> int | None:
    """The descriptor that holds the lock, or None if another process has it.

    Raises FileNotFoundError if the directory is not there, or was taken away meanwhile.
    """
    with _missing():
        fd = files.open_write(work / "lock", os.O_CREAT)
    _descriptors.add(fd)
    try:
        files.lock(fd, work / "lock")
        if _is_at(fd, work / "lock"):
            with _missing():
                files.write_file(work / "owner", msgspec.json.encode(_Owner(os.getpid(), machine.host_name())))
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        _close(fd)
        raise
    _close(fd)
    return None


@contextlib.contextmanager
def _missing() -> Iterator[None]:
    """Raises FileNotFoundError itself where `files` tells of it as of a disk that refused."""
    try:
        yield
    except BuildError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from None
        raise


def _holds(fd: int, root: Path) -> bool:
    try:
        return _is_at(fd, root / WORK / "lock")
    except FileNotFoundError:
        return False


def _is_at(fd: int, path: Path) -> bool:
    """Whether the file at ``path`` is the open one: a lock on a file that was removed keeps nobody out."""
    return os.path.samestat(os.stat(path), os.fstat(fd))


def _close(fd: int) -> None:
    _descriptors.discard(fd)
    os.close(fd)


def _leave(root: Path, fd: int) -> None:
    """Before the lock is given back: removes the owner's name, and all of it if nothing was begun."""
    with contextlib.suppress(OSError, MemfeedError):
        if not _holds(fd, root):
            return  # the build was finished or dropped, and another may hold a new one's lock
        files.remove(root / WORK / "owner")
        if not (root / WORK / "settings.json").exists() and os.listdir(root) == [WORK]:  # else it tells whose all is
            files.remove(root / WORK / "lock")
            files.remove_directory(root / WORK)
            files.remove_directory(root)


def _read_owner(root: Path) -> _Owner | None:
    try:
        return msgspec.json.decode((root / WORK / "owner").read_bytes(), type=_Owner)
    except (OSError, msgspec.DecodeError):
        return None
