"""`memfeed.pull`: from an address to a store on this machine, visible all at once."""

from __future__ import annotations

import os
from pathlib import Path

from memfeed.building import commit
from memfeed.building.claim import claim, clear, is_claimed
from memfeed.building.recovery import finish_interrupted
from memfeed.errors import StoreError
from memfeed.remote.address import Address
from memfeed.remote.caches import Remote, open_directory, read_settings
from memfeed.remote.directory import CacheDirectory
from memfeed.remote.layout import RemoteStore, read_manifest
from memfeed.remote.remote_supply import RemoteSupply
from memfeed.store import format
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.opened import open_store
from memfeed.store.store import Store
from memfeed.system import files, trust
from memfeed.system.progress import Progress, is_shown


def pull(
    address: str | Address, path: str | os.PathLike[str], *, overwrite: bool = False, progress: bool | None = None
) -> Store:
    """Copy the store at an address to ``path`` on this machine, and open it.

    The copy has the same bytes, and so the same ``digest``; it is there when all of it is. Every chunk is compared with
    its checksum as it arrives. After an interruption the same call asks only for the chunks that are missing; they
    wait in ``NAME.build``. If the store is there already, it is only opened. ``progress`` is that of `memfeed.cache`.

    Raises StoreNotFoundError if there is no store at the address; StoreError if ``path`` is another store, unless
    ``overwrite``, or something else; CorruptStoreError if bytes at the address are wrong; ObjectReplacedError if the
    store is replaced meanwhile; RemoteError if the address cannot be read; SpaceError if the disk is full.

    Example::

        store = memfeed.pull("s3://bucket/ants.mf", "ants.mf")
    """
    is_shown(progress)  # raises for what has no meaning
    remote = read_manifest(address)
    target = format.resolve(path, to_write=True)
    while True:
        with claim(target) as root:
            if (root / format.MANIFEST).exists():
                finish_interrupted(target)  # which may move the lock
                if not is_claimed(root):
                    continue
            if not _is_there(remote, target, overwrite):
                _fill(remote, root, progress)
                commit.publish(root, target, overwrite=overwrite)
            break
    return open_store(target)


def _is_there(remote: RemoteStore, target: Path, overwrite: bool) -> bool:
    """Return True if the store is at ``target`` already. Raise StoreError if something else is."""
    if not os.path.lexists(target):
        return False
    found = format.read_manifest(target)
    if found is None:
        raise StoreError(f"{target}: found something that is no store; expected nothing there: choose another path")
    if found[1] != remote.digest and not overwrite:
        raise StoreError(
            f"{target}: found another store than that of {remote.address}; expected the same or none: choose another "
            "path, or replace it: overwrite=True"
        )
    return found[1] == remote.digest


def _fill(remote: RemoteStore, root: Path, progress: bool | None) -> None:
    """Make the claimed build a store: the complete cache of the one at the address, whose manifest has its bytes."""
    directory = _begin(remote, root)
    supply = RemoteSupply(directory, remote, read_only=True)
    total, done = sum(remote.manifest.files.values()), directory.bytes_present
    try:
        with Progress(f"pull {remote.address.name}", total, unit="B", progress=progress, done=done) as bar:
            supply.finish(lambda: bar.advance_to(directory.bytes_present, total))
    finally:
        supply.join()


def _begin(remote: RemoteStore, root: Path) -> CacheDirectory:
    """Return the cache in the claimed build, with the chunks that an interrupted pull of the same store has fetched."""
    if (root / WORK_DIRECTORY / "settings.json").exists():
        raise StoreError(
            f"{root}: found the unfinished store of a dataset; expected nothing there: finish it with the call of "
            f"cache() that began it, or remove it: rm -r {root}"
        )
    found = read_settings(root)
    if found is None or (found.address, found.digest) != (str(remote.address), remote.digest):
        clear(root)
    else:
        trust.require_own_files(root)
        for name in remote.manifest.files:  # read-only, if the commit was interrupted
            files.chmod(root / name, 0o644)
    content = Remote(remote.manifest_bytes, remote.read_checksum_file(), remote.read_range_file())
    return open_directory(root, str(remote.address), None, content)
