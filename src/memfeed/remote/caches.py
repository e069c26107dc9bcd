"""Begin the cache directory of a store at an address, or go on with one: after a kill, a power loss, or an append.

A directory that is the cache of another store, or that others use in another way, is refused.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from memfeed.building.partial import Units
from memfeed.errors import StoreError
from memfeed.remote.directory import REMEDY, CacheDirectory, CacheSettings, offset_files
from memfeed.remote.layout import RANGES, range_hashes
from memfeed.remote.ranges import ChunkTable, aligned_steps
from memfeed.store import format
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.manifest import CHUNK_BYTES, Manifest
from memfeed.store.tensordict_dir import METADATA
from memfeed.system import files, trust
from memfeed.system.messages import format_bytes

SETTINGS = format.CACHE_SETTINGS
LEAVE_SECONDS = 3.0  # in which users of another size or generation may leave: a store that was dropped, say


class Remote(msgspec.Struct, frozen=True):
    """The bytes of memfeed.json, checksums.bin and, if it is there, ranges.bin at an address.

    ``generations`` are the digests of what the store was before rows were appended.
    """

    manifest: bytes
    checksums: bytes
    ranges: bytes = b""
    generations: tuple[str, ...] = ()


def cached_remote(root: Path, address: str) -> Remote | None:
    """Return what a cache directory has of the store at ``address``; None if there is no cache yet.

    Raises StoreError for a directory that is no cache, that of another address, and one that others may write.
    """
    trust.require_own_directory(root)
    if not root.exists() or not os.listdir(root):
        return None
    settings = read_settings(root)
    if settings is None:
        if (root / WORK_DIRECTORY / "users").exists():
            return None  # of a process that begins it now, or that was killed then
        raise StoreError(
            f"{root}: found a directory that is no cache of a store at an address; expected one, or nothing: pass "
            "another directory as cache_dir="
        )
    trust.require_own_files(root)
    if settings.address != address:
        raise StoreError(
            f"{root}: found the cache of {settings.address}; expected that of {address}, or nothing: pass another "
            "directory as cache_dir="
        )
    work = root / WORK_DIRECTORY
    try:
        ranges = (work / RANGES).read_bytes() if (work / RANGES).exists() else b""
        return Remote((work / format.MANIFEST).read_bytes(), (work / format.CHECKSUMS).read_bytes(), ranges)
    except OSError as error:
        raise StoreError(f"{root}: found a cache that cannot be read ({error}); {REMEDY}") from None


def open_directory(root: Path, address: str, size: int | None, remote: Remote) -> CacheDirectory:
    """Return the cache of the store that ``remote`` describes, begun if there is none.

    ``size`` is the most bytes of its chunks; None for all. Raises StoreError if other processes use it with another
    size, if it has another store, or if the file system cannot give room of a file back.
    """
    manifest = format.decode(remote.manifest, address)
    digest, total = format.digest(remote.manifest), sum(manifest.files.values())
    if format.digest(remote.checksums) != manifest.checksums:
        raise StoreError(f"{address}: found checksums that are not those of its manifest; expected them: push it again")
    size = bounded(size, manifest)
    offsets = sum(manifest.files[name] for name in offset_files(manifest))
    steps = aligned_steps(manifest) if remote.ranges else dict.fromkeys(manifest.files, CHUNK_BYTES)
    least = 2 * offsets + max((min(size, steps[name]) for name, size in manifest.files.items()), default=0)
    if size is not None and size < least:
        raise StoreError(
            f"found size={format_bytes(size)} for the cache of {address}; expected at least {format_bytes(least)}, "
            f"or none, for all {format_bytes(total)}"
        )
    own = CacheSettings(address=address, digest=digest, size=size)
    files.make_directory(root / WORK_DIRECTORY)
    users = files.open_write(root / WORK_DIRECTORY / "users", os.O_CREAT)
    until = time.monotonic() + LEAVE_SECONDS
    try:
        while True:
            is_alone = _is_alone(users)
            if is_alone:
                _prepare(root, own, manifest, remote)
            fcntl.flock(users, fcntl.LOCK_SH)
            found = read_settings(root)
            if found is None:
                continue  # the process that began it has failed
            if is_alone or own == found or time.monotonic() > until:
                break
            fcntl.flock(users, fcntl.LOCK_UN)
            time.sleep(LEAVE_SECONDS / 50)
        _require_same(root, own, found)
        return CacheDirectory(root, own, manifest, _hashes(remote), users)
    except BaseException:
        os.close(users)
        raise


def _hashes(remote: Remote) -> npt.NDArray[np.uint64]:
    """Return the checksum of each chunk, uint64 [chunks]."""
    return range_hashes(remote.ranges) if remote.ranges else np.frombuffer(remote.checksums, "<u8")


def bounded(size: int | None, manifest: Manifest) -> int | None:
    """Return the most bytes of a cache's chunks; None if the whole store has room."""
    return None if size is None or size >= sum(manifest.files.values()) else size


def _is_alone(users: int) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _require_same(root: Path, own: CacheSettings, found: CacheSettings) -> None:
    if found.digest != own.digest or found.address != own.address:
        raise StoreError(
            f"{root}: found the cache of another store than the one that is at {own.address} now (manifest "
            f"{found.digest[:8]}, expected {own.digest[:8]}): the store was replaced; {REMEDY}, or pass another "
            "cache_dir=. If rows were appended to it: wait until no other process uses this cache"
        )
    if found.size != own.size:
        used, wanted = ("all" if size is None else format_bytes(size) for size in (found.size, own.size))
        raise StoreError(
            f"{root}: found a cache that other processes use with size={used}; expected size={wanted}, as here: pass "
            "the same size= in each, or wait for their end"
        )


def _prepare(root: Path, own: CacheSettings, manifest: Manifest, remote: Remote) -> None:
    """Begin a cache, or go on with the one that is there, while no other process uses it."""
    work, found = root / WORK_DIRECTORY, read_settings(root)
    if found is None:
        _begin(root, own, manifest, remote)
    elif found.address != own.address or (
        found.digest != own.digest and not _grown(root, own, found, manifest, remote)
    ):
        return  # it is refused
    if own.size is not None:
        _require_holes(work)
    for name, size in manifest.files.items():
        format.check_file(root, name, size)
    with files.opened(work / "taken", os.O_CREAT):
        pass
    files.truncate(work / "taken", 8)
    directory = CacheDirectory(root, own, manifest, _hashes(remote))
    if found is not None:
        directory.recover()
        directory.shrink()
    directory.recount()
    files.write_atomically(work / SETTINGS, msgspec.json.encode(own))


def _check_room(root: Path, needed: int, address: str) -> None:
    less = f"read it with a smaller cache: memfeed.open({address!r:.150}, cache_dir=..., size=...)"
    advice = f"free some space, choose another directory, or {less}"
    files.check_room(root, needed, f"all rows of {address}", advice)


def _begin(root: Path, own: CacheSettings, manifest: Manifest, remote: Remote) -> None:
    work = root / WORK_DIRECTORY
    if own.size is None:
        _check_room(root, sum(manifest.files.values()), own.address)
    if (root / format.GENERATIONS).exists():
        files.remove(root / format.GENERATIONS)  # its files will be new ones
    for name, size in manifest.files.items():
        path = root / name
        files.make_directory(path.parent)
        files.write_file(path, b"")
        files.truncate(path, size)
        files.sync_data(path)  # a power loss would leave it without its length
    files.sync_directories(root, manifest.files)  # chunks will be called durable: their files must exist then
    count = len(_hashes(remote))
    Units.create(work, count)
    files.write_file(work / "used", b"")
    files.truncate(work / "used", 8 * count)
    _write_remote(work, remote)


def _grown(root: Path, own: CacheSettings, found: CacheSettings, manifest: Manifest, remote: Remote) -> bool:
    """Go on with the cache of an older generation of a store. Return False if it is that of another store.

    Also if it is complete and should become smaller: others may have mapped it.
    """
    kept = cached_remote(root, found.address)
    is_mapped = (root / format.MANIFEST).exists() and own.size is not None
    if kept is None or is_mapped or found.digest not in remote.generations:
        return False
    table = ChunkTable(manifest.files, aligned_steps(manifest) if remote.ranges else None)
    old = CacheDirectory(root, found, format.decode(kept.manifest, found.address), _hashes(kept))
    chunks = _chunks_kept(old, manifest, table, _hashes(remote))
    if chunks is not None:
        if found.size is None:
            _check_room(root, sum(manifest.files.values()) - old.bytes_present, found.address)
        _grow(old, manifest, table, chunks, remote.generations)
        _write_remote(root / WORK_DIRECTORY, remote)
    old.units.close()
    return chunks is not None


def _chunks_kept(
    old: CacheDirectory, manifest: Manifest, table: ChunkTable, hashes: npt.NDArray[np.uint64]
) -> dict[str, tuple[slice, slice]] | None:
    """Return for each file which chunks of a cache are chunks of the new store too, by their numbers in both.

    None if a file of the old store is not the beginning of the new one, by the checksums of its whole chunks.
    """
    kept = {}
    if old.manifest.schema != manifest.schema or old.table.steps != table.steps:
        return None
    for name, size in old.manifest.files.items():
        if manifest.files[name] < size:
            return None
        is_same = manifest.files[name] == size
        first, last = old.table.of_file(name)
        whole = last - first if is_same else size // table.steps[name]
        begin, _ = table.of_file(name)
        kept[name] = slice(first, first + whole), slice(begin, begin + whole)
        if (old.hashes[kept[name][0]] != hashes[kept[name][1]]).any():
            return None
    return kept


def _grow(
    old: CacheDirectory,
    manifest: Manifest,
    table: ChunkTable,
    kept: dict[str, tuple[slice, slice]],
    generations: tuple[str, ...],
) -> None:
    """Make the files of a cache those of the new store, which has more rows. Only while no other process uses it.

    If the process is killed, the cache is either the old one, or without settings: the next process begins it anew.
    """
    root, work = old.root, old.root / WORK_DIRECTORY
    presence, used = np.zeros(table.count, np.uint8), np.zeros(table.count)
    for name, (before, after) in kept.items():
        presence[after], used[after] = old.units.states[before], old.used[before]
        if old.settings.size is not None:  # only then room is counted; and the file is not mapped by anyone
            for chunk in range(before.stop, old.table.of_file(name)[1]):
                old.remove(chunk)
    # a process that reads the complete cache as a store keeps its rows: no byte of them changes
    files.write_atomically(root / format.GENERATIONS, "\n".join(generations).encode())
    for path in (root / format.MANIFEST, root / METADATA, work / SETTINGS):
        if path.exists():
            files.remove(path)
    files.sync_directory(work)
    files.sync_directory(root)
    for name, size in manifest.files.items():
        files.truncate(root / name, size)
        files.sync_data(root / name)
    Units.create(work, table.count, presence)
    files.write_file(work / "used", used.tobytes())


def _write_remote(work: Path, remote: Remote) -> None:
    """Write what a cache is a cache of. The settings come after it, so all of it is durable then."""
    if remote.ranges:
        files.write_file(work / RANGES, remote.ranges)
    files.write_file(work / format.MANIFEST, remote.manifest)
    files.write_file(work / format.CHECKSUMS, remote.checksums)
    for name in ("used", format.MANIFEST, format.CHECKSUMS, *([RANGES] if remote.ranges else [])):
        files.sync_data(work / name)
    files.sync_directory(work)


def _require_holes(work: Path) -> None:
    path = work / "hole"
    files.write_file(path, bytes(2 * files.BLOCK_BYTES))
    with files.opened(path) as fd:
        can = files.punch(fd, [(0, files.BLOCK_BYTES)])
    files.remove(path)
    if not can:
        raise StoreError(
            f"{work.parent}: found a file system that cannot give back room inside of a file; expected one that can "
            "(ext4, xfs, btrfs, tmpfs), for a cache that is smaller than its store: leave size= out, or move the cache"
        )


def read_settings(root: Path) -> CacheSettings | None:
    """Return what the users of a cache directory share; None if it is none. Raises StoreError if it is damaged."""
    path = root / WORK_DIRECTORY / SETTINGS
    try:
        return msgspec.json.decode(path.read_bytes(), type=CacheSettings)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: found settings that cannot be read ({error}); {REMEDY}") from None
