"""`memfeed.push` and `memfeed.pull`: a store to an address and back, visible all at once."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import xxhash

from memfeed.building import commit
from memfeed.building.claim import claim, clear, is_claimed
from memfeed.building.commit import finish_interrupted
from memfeed.building.copy_rows import copy_rows
from memfeed.errors import CorruptStoreError, ObjectNotFoundError, StoreError
from memfeed.remote.caches import Remote, open_directory, read_settings
from memfeed.remote.connections import Address, is_address, parse_address
from memfeed.remote.directory import CacheDirectory
from memfeed.remote.layout import (
    POINTER,
    PUSHES,
    RANGES,
    Pointer,
    RemoteStore,
    in_threads,
    range_bytes,
    range_file,
    read_manifest,
    read_pointer,
)
from memfeed.remote.objects import Objects
from memfeed.remote.ranges import ChunkTable, aligned_steps
from memfeed.remote.remote_supply import RemoteSupply
from memfeed.store import format, memo_format
from memfeed.store.backing import memo_backing
from memfeed.store.checksums import chunks_of, describe_chunk, read_checksums
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.manifest import CHUNK_BYTES, Manifest
from memfeed.store.opened import open_store
from memfeed.store.store import Store
from memfeed.system import files, trust
from memfeed.system.messages import path_text
from memfeed.system.progress import Progress, is_shown

_FILES_AT_ONCE = 4
_TENSORDICT_META = "meta.json"


@dataclass(frozen=True)
class _Local:
    """A store on this machine: its directory, its manifest and the manifest's digest."""

    path: Path
    manifest: Manifest
    digest: str

    def sizes(self) -> dict[str, int]:
        """Return every file that is sent, with its size in bytes; memfeed.json is the last."""
        metas = (path for path in self.path.rglob(_TENSORDICT_META) if format.WORK_DIRECTORY not in path.parts)
        small = [format.CHECKSUMS, *sorted(path.relative_to(self.path).as_posix() for path in metas), format.MANIFEST]
        return {**self.manifest.files, **{name: (self.path / name).stat().st_size for name in small}}


def push(
    store: Store | str | os.PathLike[str],
    address: str | Address,
    *,
    remove_old: bool = False,
    progress: bool | None = None,
) -> int:
    """Write a finished store to an address such as ``s3://bucket/ants.mf``; return how many bytes were sent.

    Its files become objects with the same bytes. They are below a name of their own, and readers see them when the last
    one is there: an older store at the address is replaced at once, and who reads it goes on. Its objects stay until a
    push with ``remove_old``, which also removes what interrupted pushes left. The bytes are compared with the
    store's checksums as they are sent. After an interruption the same call sends only the files that are missing. Of
    the results of `memfeed.memoize` the rows that are there now are sent, as an ordinary store. ``progress`` is that of
    `memfeed.cache`.

    Raises StoreError if ``store`` is none, is a view, or is being filled; CorruptStoreError if it is damaged;
    ObjectReplacedError if another push to the address finished meanwhile; RemoteError if the address cannot be written;
    SpaceError if the disk of a ``file://`` address is full.

    Example::

        memfeed.push("ants.mf", "s3://bucket/ants.mf")
    """
    is_shown(progress)  # raises for what has no meaning
    if not isinstance(store, Store) and is_address(store):
        raise StoreError(
            f"found {str(parse_address(store))!r:.150}, an address, as what to push; expected a store or its path, and "
            "then the address: memfeed.push(store, address). From an address to this machine: memfeed.pull"
        )
    path = Path(store.path if isinstance(store, Store) else path_text(store, "a store, or its path, as 'ants.mf'"))
    if memo_format.is_memo(path):
        return _push_results(store, path, address, remove_old=remove_old, progress=progress)
    local, to = _local_store(store), parse_address(address)
    if to.kind == "http":
        raise StoreError(f"{to}: found a web server, which memfeed only reads; expected s3://, gs://, az:// or file://")
    objects, pointer = Objects(to), Pointer(digest=local.digest)
    before = read_pointer(objects)
    sizes, there = local.sizes(), objects.list(pointer.directory)
    missing = {
        name: size
        for name, size in sizes.items()
        if (found := there.get(f"{pointer.directory}/{name}")) is None or found.size != size
    }
    total = sum(sizes.values())
    with Progress(f"push {to.name}", total, unit="B", progress=progress, done=total - sum(missing.values())) as bar:
        table, ranges = ChunkTable(local.manifest.files, aligned_steps(local.manifest)), f"{pointer.directory}/{RANGES}"
        if ranges not in there or there[ranges].size != range_bytes(table):
            objects.put(ranges, range_file(table, local.path))
        if older := format.generations(local.path):
            objects.put(f"{pointer.directory}/{format.GENERATIONS}", "\n".join(older).encode())
        _send(local, objects, pointer, missing, bar.advance)
    if before is None or before[0] != pointer:
        content = msgspec.json.format(msgspec.json.encode(pointer), indent=1) + b"\n"
        objects.put(POINTER, content, replaces="nothing" if before is None else before[1])
    if remove_old:
        _remove_old(objects, pointer)
    return sum(missing.values())


def _push_results(
    store: Store | str | os.PathLike[str],
    path: Path,
    address: str | Address,
    *,
    remove_old: bool,
    progress: bool | None,
) -> int:
    """Push memoized results. The rows that are there now are written into a store first, which takes as much space."""
    backing = store._backing if isinstance(store, Store) else memo_backing(path)
    if isinstance(store, Store) and (store.schema, store.digest) != (backing.schema, backing.digest[:16]):
        raise StoreError(
            f"{path}: found a view of memoized results; expected all of them: memfeed.push({str(path)!r}, ...)"
        )
    if backing.verify is not None:
        backing.verify(None)  # the checksums of the store would vouch for damaged results
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        finished = Path(folder) / path.name
        copy_rows(backing, finished)
        return push(finished, address, remove_old=remove_old, progress=progress)


def _local_store(store: Store | str | os.PathLike[str]) -> _Local:
    """Return the finished store that is to be pushed."""
    path = format.resolve(store.path if isinstance(store, Store) else store)
    found = format.read_manifest(path)
    if found is None:
        if format.build_path(path).exists():
            raise StoreError(
                f"{path}: found a store that is still being filled; expected a finished one: wait until its last row "
                "is there, or run the call of cache() that builds it again"
            )
        if path.exists():
            raise StoreError(
                f"{path}: found something that is no store of memfeed's own; expected one: make it at another path, "
                "with memfeed.cache(data, path, allow='copy')"
            )
        raise StoreError(
            f"{path}: found no store of memfeed; expected one: memfeed cache MODULE:FACTORY {shlex.quote(str(path))}"
        )
    manifest, digest, _ = found
    is_all = not isinstance(store, Store) or (
        store.schema == manifest.schema.decoded and digest.startswith(store.digest)
    )
    if not is_all:  # the digest of a view has its rows in it
        raise StoreError(
            f"{path}: found a view of a store, or a store that was replaced; expected all of it: "
            f"memfeed.push(memfeed.open({str(path)!r}), ...)"
        )
    return _Local(path, manifest, digest)


def _send(
    local: _Local, objects: Objects, pointer: Pointer, missing: dict[str, int], sent: Callable[[int], None]
) -> None:
    """Send files, several at a time; the manifest when all others are there."""
    hashes = read_checksums(local.path, local.manifest)

    def send(name: str) -> None:
        _send_file(local, objects, f"{pointer.directory}/{name}", name, missing[name], hashes.get(name))

    columns = [name for name in missing if name != format.MANIFEST]
    columns.sort(key=lambda name: -missing[name])
    for first in range(0, len(columns), 4 * _FILES_AT_ONCE):
        group = columns[first : first + 4 * _FILES_AT_ONCE]
        in_threads(send, group, _FILES_AT_ONCE)
        sent(sum(missing[name] for name in group))
    if format.MANIFEST in missing:
        send(format.MANIFEST)
        sent(missing[format.MANIFEST])


def _send_file(local: _Local, objects: Objects, to: str, name: str, size: int, expected: list[int] | None) -> None:
    """Send ``size`` bytes of a file; nothing is written at the address if they are not those of the checksums."""
    chunks, hashes, done = chunks_of({name: size}), expected or [], 0

    def check(data: bytes) -> None:
        nonlocal done
        done = done if data else 0  # it is sent from its beginning
        for first in range(0, len(data), CHUNK_BYTES) if hashes else ():
            number = (done + first) // CHUNK_BYTES
            if xxhash.xxh3_64_intdigest(data[first : first + CHUNK_BYTES]) != hashes[number]:
                raise CorruptStoreError(
                    f"{local.path / name}: found other bytes than were written, in "
                    f"{describe_chunk(local.manifest, chunks[number])}; nothing was pushed: restore the file from a "
                    "copy, or compute these rows again: memfeed.repair(dataset, path)"
                )
        done += len(data)

    objects.put_file(to, local.path / name, size, sent=check)


def _remove_old(objects: Objects, pointer: Pointer) -> None:
    """Remove the objects of other pushes, and of a store that was copied to the address file by file."""
    try:
        data, _ = objects.read_whole(format.MANIFEST, most_bytes=format.LARGEST_JSON)
        copied = {*format.decode(data, objects.address).files, format.CHECKSUMS, format.MANIFEST, format.GENERATIONS}
    except (ObjectNotFoundError, StoreError):
        copied = set()
    names = objects.list()
    old = [name for name in names if name.startswith(f"{PUSHES}/") and not name.startswith(f"{pointer.directory}/")]
    metas = [name for name in names if copied and name.rpartition("/")[2] == _TENSORDICT_META and PUSHES not in name]
    objects.delete([*old, *metas, *(name for name in names if name in copied)])


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
            f"cache() that began it, or remove it: rm -r {shlex.quote(str(root))}"
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
