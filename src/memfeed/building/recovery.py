"""Finish what a crash interrupted: a commit whose manifest is written, or the replacement of a store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from memfeed.building import commit
from memfeed.building.claim import claim, clear, is_claimed
from memfeed.errors import MemfeedError
from memfeed.store import format
from memfeed.store.format import WORK_DIRECTORY
from memfeed.system import files


@contextlib.contextmanager
def claim_recovered(path: Path, *, wait: bool = True) -> Iterator[Path]:
    """Claim the store at ``path``, finish an interrupted commit or replacement of it, and yield the build's directory.

    To finish may move or remove the build's directory with the lock file in it. Then the lock keeps nobody out, so the
    store is claimed again. See ``claim`` for ``wait``.
    """
    while True:
        with claim(path, wait=wait) as root:
            finish_interrupted(path)
            if is_claimed(root):
                yield root
                return


def finish_interrupted(path: Path) -> None:
    """Finish a commit that was interrupted after its manifest was written, or after the exchange.

    Only for the process that has claimed the store. The lock file may be moved with the build.
    """
    root, old = format.build_path(path), commit.old_path(path)
    is_begun = (root / WORK_DIRECTORY / "settings.json").exists()
    if (root / format.MANIFEST).exists():
        files.sync_directory(root)  # the sync of its name may be what failed
    if not path.exists() and old.exists() and (root / format.MANIFEST).exists():
        files.rename(root, path)
        files.sync_directory(path.parent)
    elif (root / format.MANIFEST).exists():
        if not path.exists():
            commit.publish(root, path, overwrite=False)
        elif is_begun:
            commit.publish(root, path, overwrite=True)
        else:
            files.remove_tree(old)
            files.rename(root, old)
            files.sync_directory(path.parent)
    elif not is_begun:  # the remains of a store that was being removed
        clear(root)
    if (path / format.MANIFEST).exists():
        commit.remove_remains(path)


def remove_remains(path: Path) -> None:
    """Remove what an interrupted replacement left beside the store, unless another process works on it."""
    root = format.build_path(path)
    remains = (path / WORK_DIRECTORY, commit.old_path(path), commit.appended_path(path), root / format.MANIFEST)
    if any(place.exists() for place in remains):
        with contextlib.suppress(MemfeedError), claim_recovered(path, wait=False):
            pass  # a store on a read-only disk can be opened all the same
