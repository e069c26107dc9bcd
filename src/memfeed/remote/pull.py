"""`memfeed.pull`: from an address to a store on this machine, visible all at once."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from memfeed.building import commit
from memfeed.building.claim import claim, clear, is_claimed
from memfeed.building.recovery import finish_interrupted
from memfeed.errors import StoreError
from memfeed.remote.address import Address
from memfeed.remote.chunks import CHUNKS_AT_ONCE, expected_chunks, in_threads, read_chunk
from memfeed.remote.layout import RemoteStore, read_manifest
from memfeed.store import format
from memfeed.store.checksums import Chunk, chunk_hash, hash_pool
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.store import Store, open_store
from memfeed.system import files
from memfeed.system.progress import Progress

_PULLED = "pull.json"  # in the work directory: which store is being pulled


def pull(
    address: str | Address, path: str | os.PathLike[str], *, overwrite: bool = False, progress: bool = False
) -> Store:
    """Copy the store at an address to ``path`` on this machine, and open it.

    The copy has the same bytes, and so the same ``digest``; it is there when all of it is. Every chunk is compared with
    its checksum as it arrives. After an interruption the same call asks only for the chunks that are missing; they
    wait in ``NAME.build``. If the store is there already, it is only opened.

    Raises StoreNotFoundError if there is no store at the address; StoreError if ``path`` is another store, unless
    ``overwrite``, or something else; CorruptStoreError if bytes at the address are wrong; ObjectReplacedError if the
    store is replaced meanwhile; RemoteError if the address cannot be read; SpaceError if the disk is full.

    Example::

        store = memfeed.pull("s3://bucket/ants.mf", "ants.mf")
    """
    remote = read_manifest(address)
    target = format.resolve(path, to_write=True)
    while True:
        with claim(target) as root:
            if (root / format.MANIFEST).exists():
                finish_interrupted(target)  # which may move the lock
                if not is_claimed(root):
                    continue
            if not _is_there(remote, target, overwrite):
                _begin(remote, root)
                _fetch(remote, root, progress)
                _commit(remote, root, target, overwrite)
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


def _begin(remote: RemoteStore, root: Path) -> None:
    """Make the files of the claimed build, unless an interrupted pull of the same store has made them."""
    work = root / WORK_DIRECTORY
    if (work / "settings.json").exists():
        raise StoreError(
            f"{root}: found the unfinished store of a dataset; expected nothing there: finish it with the call of "
            f"cache() that began it, or remove it: rm -r {root}"
        )
    wanted = msgspec.json.encode({"digest": remote.digest})
    if not ((work / _PULLED).exists() and (work / _PULLED).read_bytes() == wanted):
        clear(root)
        files.make_directory(work)
        files.write_atomically(work / _PULLED, wanted)
    missing = {name: size for name, size in remote.manifest.files.items() if _size(root / name) != size}
    files.check_room(root, sum(missing.values()), f"a copy of {remote.address}")
    for name, size in missing.items():
        files.make_directory((root / name).parent)
        with files.opened(root / name, os.O_CREAT | os.O_TRUNC) as fd:
            files.preallocate(fd, size)
    for name in remote.manifest.files:  # read-only, if the commit was interrupted
        files.chmod(root / name, 0o644)


def _size(path: Path) -> int | None:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return None


def _fetch(remote: RemoteStore, root: Path, progress: bool) -> None:
    """Write the chunks that the files do not have yet."""
    chunks = expected_chunks(remote)
    with hash_pool() as pool:
        hashes = pool.map(lambda item: chunk_hash(root / item[0].name, item[0].first, item[0].size), chunks)
        missing = [item for item, found in zip(chunks, hashes, strict=True) if item[1] != found]
    total, left = sum(chunk.size for chunk, _ in chunks), sum(chunk.size for chunk, _ in missing)

    def fetch(item: tuple[Chunk, int]) -> None:
        chunk, expected = item
        data = read_chunk(remote, chunk, expected)
        with files.opened(root / chunk.name) as fd:
            files.write_at(fd, data, chunk.first)

    with Progress(f"pull {remote.address.name}", total, unit="B", shown=progress, done=total - left) as bar:
        for first in range(0, len(missing), 4 * CHUNKS_AT_ONCE):
            group = missing[first : first + 4 * CHUNKS_AT_ONCE]
            in_threads(fetch, group, CHUNKS_AT_ONCE)
            bar.advance(sum(chunk.size for chunk, _ in group))


def _commit(remote: RemoteStore, root: Path, target: Path, overwrite: bool) -> None:
    """Make the files a store. Its manifest has the bytes of the one at the address, and so the same digest."""
    files.write_file(root / format.CHECKSUMS, remote.read_checksum_file())
    commit.write_metadata(root, remote.manifest.schema, remote.manifest.rows)
    for name in remote.manifest.files:
        files.sync_data(root / name)
    commit.seal(root, remote.manifest, remote.manifest_bytes)
    commit.publish(root, target, overwrite=overwrite)
