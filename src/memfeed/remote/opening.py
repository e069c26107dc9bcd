"""`memfeed.open("s3://bucket/name", cache_dir=...)`: a store whose rows come from an address as they are read."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from memfeed.errors import ObjectReplacedError, RemoteError, StoreError
from memfeed.remote.caches import Remote, cached_remote, open_directory
from memfeed.remote.connections import Retry, is_address, parse_address
from memfeed.remote.directory import CacheDirectory
from memfeed.remote.layout import RemoteStore, read_manifest, read_pointer
from memfeed.remote.objects import Objects
from memfeed.remote.ranges import aligned_steps
from memfeed.remote.remote_supply import RemoteSupply
from memfeed.schema.tree import as_types
from memfeed.store import format
from memfeed.store.backing import Backing, open_backing, source_digest
from memfeed.store.coded_columns import decoded_column
from memfeed.store.manifest import Manifest
from memfeed.store.opened import open as open_local
from memfeed.store.store import Store
from memfeed.store.view import View
from memfeed.system.files import local_path
from memfeed.system.messages import parse_bytes
from memfeed.system.progress import write_line

ANSWER_SECONDS = 5.0  # that an address has to say whether a complete cache is that of its newest store

_opened: weakref.WeakValueDictionary[Path, RemoteSupply] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class LazyRemote:
    """The store at an address, which is looked up when the first bytes of it are needed: not for what the cache has."""

    def __init__(self, address: str, digest: str, found: RemoteStore | None) -> None:
        self._address, self._digest, self._found = address, digest, found
        self._lock = threading.Lock()

    def read(self, name: str, first: int, size: int, accept: Any = None) -> memoryview:
        """Return bytes of a file of the store. Raises StoreError if another store is at the address by now."""
        try:
            return self._store().read(name, first, size, accept)
        except ObjectReplacedError as error:
            raise _replaced(self._address, error) from None

    def _store(self) -> RemoteStore:
        with self._lock:
            if self._found is None:
                found = read_manifest(self._address, digest=self._digest)
                if found.digest != self._digest:
                    raise _replaced(self._address, f"manifest {found.digest[:8]}, expected {self._digest[:8]}")
                self._found = found
            return self._found


def _replaced(address: str, what: object) -> StoreError:
    return StoreError(
        f"{address}: found that the store was replaced ({what!s:.150}); expected the one that its cache has: "
        "remove the cache directory, or pass another cache_dir=, and open it again"
    )


def open_remote(
    path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None,
    size: int | str | None,
    types: type | Iterable[type] = (),
) -> Store:
    """Return the store at an address, see ``memfeed.open``; the one of a path that only looks like an address."""
    most = parse_bytes("size", size)
    if not is_address(path) and cache_dir is None and size is None:
        return open_local(path, types=types)
    if not is_address(path) and cache_dir is None:
        raise StoreError(f"found size={size!r} for {str(path)!r:.150}, a path; expected an address, and cache_dir=")
    address = parse_address(path)  # raises for a path
    if cache_dir is None:
        raise StoreError(
            f"found {address} without cache_dir=; expected a directory of this machine for its rows: "
            f"memfeed.open({str(address)!r:.150}, cache_dir='/nvme/{address.name[:40]}')"
        )
    backing = remote_backing(os.fspath(path), str(local_path(cache_dir).absolute()), most)
    return Store(View(backing, as_types(types)))


def remote_backing(path: str, cache: str, size: int | None, expected: str | None = None) -> Backing:
    """Return the columns of the store at an address, over the files of its cache.

    With the digest of an ``expected`` manifest, an older push of the store is opened if it is still there; else raises
    StoreError.
    """
    address, root = parse_address(path), Path(cache)
    kept = cached_remote(root, str(address))
    is_complete = kept is not None and (root / format.MANIFEST).exists()
    if kept is not None and is_complete and (expected is not None or _is_newest(path, kept)):
        backing = open_backing(root)
        backing.chunk_rows = chunk_rows(backing.manifest)
        _require_digest(address, backing.digest, expected)
        return backing
    remote, found = _look_up(path, kept, expected)
    _require_digest(address, format.digest(remote.manifest), expected)
    with _lock:
        supply = _opened.get(root)
        shared = None if supply is None or not supply.serves(remote, size) else supply.another_backing()
        if shared is not None:
            return shared
        directory = open_directory(root, str(address), size, remote)
        _opened[root] = supply = RemoteSupply(directory, LazyRemote(path, directory.settings.digest, found))
        return _backing(supply, path, size)


def _is_newest(path: str, kept: Remote) -> bool:
    """Return True if the store at an address is the one that a complete cache has, or if it cannot be reached now."""
    try:
        pointer = read_pointer(Objects(path, Retry(attempts=1, stall_seconds=ANSWER_SECONDS)))
    except (RemoteError, ModuleNotFoundError):  # without obstore nothing can be asked
        return True
    return pointer is None or pointer[0].digest == format.digest(kept.manifest)


def _look_up(path: str, kept: Remote | None, expected: str | None) -> tuple[Remote, RemoteStore | None]:
    """Return the manifest and checksums at an address; those of the cache if the address cannot be reached."""
    try:
        found = read_manifest(path, digest=expected)
    except RemoteError as error:
        if kept is None:
            raise
        write_line(f"memfeed: {str(error)[:300]}; what the cache has can be read all the same")
        return kept, None
    if kept is not None and format.digest(kept.manifest) == found.digest:
        return kept, found
    older = () if kept is None else found.read_generations()
    with ThreadPoolExecutor(1) as pool:
        ranges = pool.submit(found.read_range_file)
        return Remote(found.manifest_bytes, found.read_checksum_file(), ranges.result(), older), found


def _require_digest(address: object, digest: str, expected: str | None) -> None:
    if expected is not None and digest != expected:
        raise StoreError(
            f"{address}: found another store than the one that was sent here (manifest {digest[:8]}, expected "
            f"{expected[:8]}): it was replaced meanwhile; open it again"
        )


def _backing(supply: RemoteSupply, path: str, size: int | None) -> Backing:
    directory: CacheDirectory = supply.directory
    manifest, settings = directory.manifest, directory.settings
    backing = Backing(
        directory.root,
        manifest.schema.decoded,
        manifest.rows,
        settings.digest,
        lambda field_index: decoded_column(supply.column(field_index)),
        manifest,
        remake=(remote_backing, (path, str(directory.root), size, settings.digest)),
        supply=supply,
        chunk_rows=chunk_rows(manifest),
        source=source_digest(manifest),
    )
    supply.begin(backing)
    return backing


def chunk_rows(manifest: Manifest | None) -> int:
    """Return how many rows of the largest file lie in one chunk, on average; at least 1."""
    if manifest is None or not manifest.rows:
        return 1
    largest = max(manifest.files, key=lambda name: manifest.files[name])
    step = aligned_steps(manifest)[largest]
    return max(1, min(manifest.rows, step * manifest.rows // max(manifest.files[largest], 1)))
