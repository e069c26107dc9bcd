"""One builder at a time: the process that holds the lock of a build makes the store, the others wait."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from memfeed.errors import BuildError, MemfeedError, StoreError
from memfeed.store import format
from memfeed.store.format import WORK_DIRECTORY
from memfeed.system import files, locks, machine, trust
from memfeed.system.progress import write_line

WAIT_SECONDS = 0.1
REPORT_SECONDS = 60.0
FILLERS = "fillers"  # the processes that fill one build together hold a shared lock on this file
FORMS = "forms"  # the forms that were chosen for a budget
_MOST_MISSING = 20  # how often a directory is seen without a lock file before it counts as a dead builder's
_held: dict[tuple[Path, int], int] = {}  # (build, thread) -> descriptor of the lock, of this process


class ClaimedError(BuildError):
    """Another process holds the lock of a build."""


class _Owner(msgspec.Struct, frozen=True):
    """The process that holds the lock, for the message of those that wait."""

    pid: int
    host: str


os.register_at_fork(after_in_child=_held.clear)


def clear(root: Path) -> None:
    """Remove all of a build except its lock, which stays while others may wait for it, and the choice of its forms.

    The settings are removed first: after an interruption the rest does not count as a build.
    """
    work = root / WORK_DIRECTORY
    files.remove(work / "settings.json")
    files.remove_tree(root, keep=[work / "lock", work / "owner", work / FORMS])


def refusal_at(root: Path) -> Path:
    """Return the file that says what ended the build at ``root``, if a sample did that does not fit the cut."""
    return root / WORK_DIRECTORY / "refused"


@contextlib.contextmanager
def claim(path: Path, *, wait: bool = True, thread: int | None = None) -> Iterator[Path]:
    """Make this process the one builder of the store at ``path``, and yield the build's directory.

    Raises StoreError if the store that is to be replaced, or the build, may be another user's.
    While another process builds the store, waits, and names that process on stderr once a minute; without ``wait``
    raises ClaimedError. The lock ends with its process; child processes do not share it. ``thread`` is the thread that
    would wait for itself if it claimed it too, by default the caller's.
    """
    if path.name.endswith((format.BUILD_SUFFIX, f"{format.BUILD_SUFFIX}.old")):
        raise StoreError(f"{path}: found a name that only unfinished stores have; expected one that ends in no .build")
    root = format.build_path(path)
    trust.require_own_directory(path)
    _require_build(root)
    fd = _wait_for_lock(root, path, wait)
    key, pid = (root, threading.get_ident() if thread is None else thread), os.getpid()
    try:
        _held[key] = fd
        yield root
    finally:
        if os.getpid() == pid:  # a forked child leaves the block of its parent, who still has the lock
            _held.pop(key, None)
            try:
                _leave(root, fd)
            finally:
                locks.close_lock(fd)


def ends_by_itself(root: Path) -> None:
    """Note that who holds the lock of the build at ``root`` gives it back soon: each thread may wait for that."""
    for key in [key for key in list(_held) if key[0] == root]:  # other threads claim other builds meanwhile
        _held.pop(key, None)


def is_claimed(root: Path) -> bool:
    """Return True if this thread holds the lock of the build at ``root``, and the lock counts.

    A lock counts only while its file is the one at that path: one that was moved or removed keeps nobody out.
    """
    fd = _held.get((root, threading.get_ident()))
    return fd is not None and _counts(fd, root)


def _require_build(root: Path) -> None:
    """Raise StoreError if something else is at ``root``, or the build of another user."""
    try:
        is_file = root.is_file()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(root.with_suffix(format.APPENDED_SUFFIX))
    except OSError as error:
        raise StoreError(
            f"{root}: found a path that the disk does not take ({error.strerror}); expected one that also fits with "
            f"{format.APPENDED_SUFFIX} at its end: choose a shorter name"
        ) from None
    if not is_file:
        trust.require_own_directory(root)
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        names = [root.name]
    except PermissionError as error:
        raise StoreError(
            f"{root}: found a directory that cannot be read ({error.strerror}); expected a build: give yourself the "
            f"permission (chmod u+rwx {shlex.quote(str(root))}), or remove it"
        ) from None
    if names and WORK_DIRECTORY not in names and format.MANIFEST not in names:
        raise StoreError(
            f"{root}: found something that is no build of memfeed's, at the path of the build; expected "
            "nothing there: move it away, or choose another path"
        )
    trust.require_own_directory(root / WORK_DIRECTORY)


def _wait_for_lock(root: Path, path: Path, wait: bool) -> int:
    """Return the descriptor of the lock, once this process holds it."""
    missing, seen, reported, due, since = 0, None, None, 0.0, time.monotonic()
    while True:
        try:
            # a root without its work directory is the last moment of a commit, or the remains of one: give it time
            if not root.exists() or missing > _MOST_MISSING:
                files.make_directory(root / WORK_DIRECTORY)
            fd = _try_lock(root / WORK_DIRECTORY)
        except FileNotFoundError:  # another process removes it
            missing += 1
        else:
            if fd is not None:
                return fd
            owner = _read_owner(root)
            if not wait:
                raise ClaimedError(f"{path}: found another process that builds it; expected none")
            require_no_import(root, path)  # which would wait for it
            if (root, threading.get_ident()) in _held:
                raise BuildError(
                    f"{path}: found that this very thread is building it already (a Writer, a store that is being "
                    "filled, or a dataset that calls cache() on its own store); expected another path, as it would "
                    "wait for itself, or store.finish() first (of a Loader: loader.store.finish())"
                )
            waited = time.monotonic() - since
            if owner != reported:
                due = 0.0
            if owner is not None and owner == seen and waited >= due:  # seen twice: not the name of a dead builder
                _report(owner, path, waited)
                reported, due = owner, waited + REPORT_SECONDS
            seen = owner
        time.sleep(WAIT_SECONDS)


def require_no_import(root: Path, path: Path) -> None:
    """Raise BuildError in a process that imports the program of the builder, for which the builder waits."""
    owner = _read_owner(root)
    if owner is not None and machine.imports_program_of(owner.pid):
        raise BuildError(
            f"{path}: found that a process which starts for the builder imports the program, and builds it again; "
            f"expected that only the builder does, as processes start with {machine.start_method()!r} here: put what "
            "the script runs below if __name__ == '__main__':"
        )


def _report(owner: _Owner, path: Path, waited: float) -> None:
    so_far = f" ({waited / 60:.0f} min so far)" if waited >= REPORT_SECONDS else ""
    write_line(f"memfeed: process {owner.pid} on {owner.host} is building {path}; waiting for it{so_far}")


def _try_lock(work: Path) -> int | None:
    """Return the descriptor that holds the lock, or None if another process holds it.

    Raises FileNotFoundError if the directory does not exist, or was removed meanwhile.
    """
    with unwrap_missing():
        fd = locks.open_lock(work / "lock")
    try:
        locks.lock(fd, work / "lock")
        if _is_at(fd, work / "lock"):
            with unwrap_missing():
                files.write_file(work / "owner", msgspec.json.encode(_Owner(os.getpid(), machine.host_name())))
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        locks.close_lock(fd)
        raise
    locks.close_lock(fd)
    return None


@contextlib.contextmanager
def unwrap_missing() -> Iterator[None]:
    """Raise the FileNotFoundError itself where `files` raises a BuildError because of it."""
    try:
        yield
    except BuildError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from None
        raise


def _counts(fd: int, root: Path) -> bool:
    try:
        return _is_at(fd, root / WORK_DIRECTORY / "lock")
    except FileNotFoundError:
        return False


def _is_at(fd: int, path: Path) -> bool:
    """Return True if the file at ``path`` is the open one."""
    return os.path.samestat(os.stat(path), os.fstat(fd))


def _leave(root: Path, fd: int) -> None:
    """Remove the owner's name before the lock is released, and the whole directory if no build was begun in it."""
    work = root / WORK_DIRECTORY
    with contextlib.suppress(OSError, MemfeedError):
        if not _counts(fd, root):
            return  # the build was finished or dropped, and another process may hold the lock of a new one
        files.remove(work / "owner")
        if not (work / "settings.json").exists() and os.listdir(root) == [WORK_DIRECTORY]:
            files.remove(work / "lock")
            files.remove_directory(work)
            files.remove_directory(root)


def _read_owner(root: Path) -> _Owner | None:
    try:
        return msgspec.json.decode((root / WORK_DIRECTORY / "owner").read_bytes(), type=_Owner)
    except (OSError, msgspec.DecodeError):
        return None


def share(root: Path) -> int:
    """Say, until the descriptor returned is given to `close_lock`, that this process writes rows into a build.

    Several processes may share one. Raises FileNotFoundError if the build is gone.
    """
    path = root / WORK_DIRECTORY / FILLERS
    with unwrap_missing():
        fd = locks.open_lock(path)
    try:
        locks.lock(fd, path, wait=True, is_shared=True)
        if not _is_at(fd, path):
            raise FileNotFoundError(path)
    except BaseException:
        locks.close_lock(fd)
        raise
    return fd


def is_shared_by(fd: int, root: Path) -> bool:
    """Return True if ``share`` returned ``fd`` of the build at ``root``, and not of one that was there before."""
    try:
        return _is_at(fd, root / WORK_DIRECTORY / FILLERS)
    except FileNotFoundError:
        return False


def is_shared(root: Path) -> bool:
    """Return True if a process, this one included, writes rows into the build at ``root`` as ``share`` says."""
    try:
        fd = os.open(root / WORK_DIRECTORY / FILLERS, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
