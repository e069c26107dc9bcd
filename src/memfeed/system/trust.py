"""Refuse what another user may have put where this one is about to write.

Whoever may write into a directory decides where its files lead. So a directory to write into has to be a directory, no
link, has to belong to this user, and not all users may write into it. The group may: with umask 002 it is most often
the user's own.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from memfeed.errors import StoreError

_REMEDY = "remove it if nobody needs it, or choose another path"


def require_own_directory(path: Path) -> None:
    """Raise StoreError unless a directory of this user's is at ``path``, or nothing."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"{path}: found a path that leads nowhere ({error.strerror}); expected a directory") from None
    if stat.S_ISLNK(found.st_mode):
        raise StoreError(f"{path}: found a symbolic link; expected a directory, or nothing: {_REMEDY}")
    if not stat.S_ISDIR(found.st_mode):
        raise StoreError(f"{path}: found no directory; expected one, or nothing: {_REMEDY}")
    user, is_open = os.geteuid(), bool(found.st_mode & stat.S_IWOTH)
    if (found.st_uid, is_open) == (user, False) or (found.st_uid, is_open) == _seen_of_a_new_directory(path.parent):
        return
    whose = f"a directory of user {found.st_uid}"
    what = "a directory that all users may write into" if found.st_uid == user else whose
    raise StoreError(
        f"{path}: found {what}; expected one that only you (user {user}) and your group may write into, because others "
        f"could decide where its files lead: {_REMEDY}"
    )


def require_own_link(link: Path, target: Path) -> None:
    """Raise StoreError if another user than root made ``link``, which leads to ``target``."""
    owner = os.lstat(link).st_uid
    if owner not in (os.geteuid(), 0) and owner != _seen_of_a_new_directory(link.parent)[0]:
        raise StoreError(
            f"{link}: found a symbolic link of user {owner}; expected one of yours, because who made it decides what "
            f"is written: if that is what you want, pass {str(target)!r}"
        )


def _seen_of_a_new_directory(above: Path) -> tuple[int, bool]:
    """Return the owner that a new directory has, and if all may write into it.

    Some file systems (FAT, shared folders of virtual machines) show the same for every file: they tell nothing.
    """
    try:
        made = tempfile.mkdtemp(prefix=".memfeed-", dir=above)
    except OSError:
        return -1, False
    try:
        found = os.lstat(made)
        return found.st_uid, bool(found.st_mode & stat.S_IWOTH)
    finally:
        os.rmdir(made)


def require_own_files(root: Path) -> None:
    """Raise StoreError unless ``root``, a directory of this user's, has only plain directories and files of the same.

    A file with a second name (a hard link) is refused too: to write it would change that of the other name.
    """
    owner = os.lstat(root)
    allowed = owner.st_mode & stat.S_IWOTH
    for top, directories, names in os.walk(root, onerror=_refuse):
        for name in (*directories, *names):
            path = os.path.join(top, name)
            try:
                found = os.lstat(path)
            except FileNotFoundError:  # another process that waits for the build
                continue
            problem = ""
            if stat.S_ISLNK(found.st_mode):
                problem = "a symbolic link"
            elif not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
                problem = "neither a file nor a directory"
            elif stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
                problem = "a file that has a second name (a hard link)"
            elif found.st_uid != owner.st_uid:
                problem = f"a file of user {found.st_uid}"
            elif found.st_mode & stat.S_IWOTH & ~allowed:
                problem = "a file that all users may write"
            if problem:
                raise StoreError(
                    f"{path}: found {problem} in an unfinished store; expected only plain files that you alone may "
                    f"write: remove {root} to start over"
                )


def _refuse(error: OSError) -> None:
    if isinstance(error, FileNotFoundError):  # another process has removed it since it was listed
        return
    raise StoreError(
        f"{error.filename}: found a directory that cannot be read ({error.strerror}); expected the build's: give "
        "yourself the permission (chmod u+rwx), or remove it"
    ) from None
