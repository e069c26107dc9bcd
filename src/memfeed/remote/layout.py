"""The objects of a store at an address, and the push of it that readers see. docs/format.md specifies them.

Its chunks are read with their checksums, several at a time.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from memfeed.errors import CorruptStoreError, ObjectNotFoundError, StoreError, StoreNotFoundError
from memfeed.remote.connections import Address, Retry
from memfeed.remote.objects import ObjectInfo, Objects
from memfeed.remote.ranges import ChunkTable, aligned_steps
from memfeed.store import format
from memfeed.store.checksums import Chunk, OnProgress, chunk_hash, chunks_of, describe_chunk, hash_pool
from memfeed.store.manifest import Manifest

POINTER = "manifest.json"
RANGES = "ranges.bin"
_DIGEST_BYTES = 16  # of ranges.bin, before the checksums
PUSHES = "pushes"
VERSION = 1
_MOST_POINTER_BYTES = 1 << 20
_REQUESTS_AT_ONCE = 16


class Pointer(msgspec.Struct, frozen=True, kw_only=True):
    """The content of manifest.json: which push of a store the readers of an address see.

    ``digest`` is the xxh3-128 of the store's memfeed.json, and the name of the push.
    """

    format: str = "memfeed-address"
    version: int = VERSION
    digest: str = ""

    @property
    def directory(self) -> str:
        """The directory of the push, below the address."""
        return f"{PUSHES}/{self.digest}"


@dataclass(frozen=True)
class RemoteStore:
    """A store at an address, as it was when it was looked at.

    ``digest`` is the xxh3-128 of its memfeed.json. ``files`` has each file of the manifest, checksums.bin, and
    ranges.bin if it is there, by its name in the store; the name of its object has ``directory`` before it, which is
    "" or ends in "/". If an object of it is replaced later, reading with its etag raises ObjectReplacedError.
    """

    objects: Objects
    manifest: Manifest
    manifest_bytes: bytes
    digest: str
    directory: str
    files: dict[str, ObjectInfo]

    @property
    def address(self) -> Address:
        """The place of the store."""
        return self.objects.address

    def read_checksum_file(self) -> bytes:
        """Return the bytes of checksums.bin, as the manifest says they are."""
        size = self.files[format.CHECKSUMS].size
        expected = self.manifest.checksums
        return bytes(self.read(format.CHECKSUMS, 0, size, lambda data: format.digest(bytes(data)) == expected))

    def read_range_file(self) -> bytes:
        """Return the bytes of ranges.bin, as they were pushed; none if it is not there, as of a copy of files."""
        found = self.files.get(RANGES)
        return b"" if found is None else bytes(self.read(RANGES, 0, found.size, is_range_file))

    def read_generations(self) -> tuple[str, ...]:
        """Return the digests of the stores that this one was before rows were appended, the oldest first."""
        try:
            data, _ = self.objects.read_whole(self.directory + format.GENERATIONS, most_bytes=format.LARGEST_JSON)
        except ObjectNotFoundError:
            return ()
        return tuple(data.decode("ascii", "replace").split())

    def read(self, name: str, first: int, size: int, accept: Callable[[memoryview], bool] | None = None) -> memoryview:
        """Return ``size`` bytes of a file of the store from byte ``first``. See `Objects.read` for ``accept``."""
        place = self.directory + name
        try:
            return self.objects.read(place, first, size, etag=self.files[name].etag, accept=accept)
        except ObjectNotFoundError as error:
            if "no such bucket" in str(error):
                raise
            raise ObjectNotFoundError(
                f"{self.address}/{place}: found that this object was removed after the store was opened; expected "
                "it to stay: a push with remove_old=True (--remove-old) replaced the store, or it was deleted. Open "
                "the address again, with another cache_dir=, or push the store again"
            ) from None


def range_file(table: ChunkTable, path: Path) -> bytes:
    """Return ranges.bin of the store at ``path``: the xxh3-64 of every chunk of whole rows, after a digest of them."""
    places = [table.at(chunk) for chunk in range(table.count)]
    with hash_pool() as pool:
        hashes = pool.map(lambda place: chunk_hash(path / place.name, place.start, place.stop - place.start), places)
        content = np.fromiter(hashes, "<u8", table.count).tobytes()
    return xxhash.xxh3_128_digest(content) + content


def range_bytes(table: ChunkTable) -> int:
    """Return the size of ranges.bin."""
    return _DIGEST_BYTES + 8 * table.count


def range_hashes(content: bytes) -> npt.NDArray[np.uint64]:
    """Return the checksums that the bytes of ranges.bin have, uint64 [chunks]."""
    return np.frombuffer(content, "<u8", offset=_DIGEST_BYTES)


def is_range_file(data: memoryview | bytes) -> bool:
    """Return True if these are the bytes of ranges.bin that were written."""
    return xxhash.xxh3_128_digest(data[_DIGEST_BYTES:]) == bytes(data[:_DIGEST_BYTES])


def read_manifest(
    address: str | os.PathLike[str] | Address, retry: Retry | None = None, digest: str | None = None
) -> RemoteStore:
    """Return what the store at an address is, from three requests, two of them at once; no column is read.

    With the ``digest`` of an older push whose objects are still there it is that one, which its readers keep.

    Raises StoreNotFoundError if there is no store (yet), StoreError if it is none that this version reads,
    CorruptStoreError if an object is missing or has another size than the manifest says, RemoteError if the address
    cannot be reached.
    """
    objects = Objects(address, retry)
    while True:
        pointer = read_pointer(objects)
        if digest is not None and pointer is not None and pointer[0].digest != digest:
            with contextlib.suppress(StoreNotFoundError, ObjectNotFoundError, CorruptStoreError):
                return _read_store(objects, Pointer(digest=digest))
        try:
            return _read_store(objects, None if pointer is None else pointer[0])
        except (ObjectNotFoundError, CorruptStoreError):
            if pointer is None or read_pointer(objects) == pointer:
                raise  # else the store was replaced, and the old push removed: look at the new one


def read_pointer(objects: Objects) -> tuple[Pointer, ObjectInfo] | None:
    """Return manifest.json of an address and its size and etag; None if there is none (a copy of files, or nothing)."""
    try:
        data, info = objects.read_whole(POINTER, most_bytes=_MOST_POINTER_BYTES)
    except ObjectNotFoundError:
        return None
    where = f"{objects.address}/{POINTER}"
    try:
        pointer = msgspec.json.decode(data, type=Pointer)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where}: found a manifest that cannot be read ({error}); push the store again") from None
    if pointer.format != "memfeed-address":
        raise StoreError(f"{where}: found format {pointer.format!r:.60}; expected 'memfeed-address': this is no store")
    if pointer.version != VERSION:
        raise StoreError(
            f"{where}: found version {pointer.version}; this memfeed reads version {VERSION}: upgrade memfeed "
            "(pip install -U memfeed)"
        )
    if len(pointer.digest) != 32 or set(pointer.digest) - set("0123456789abcdef"):
        raise StoreError(f"{where}: found the digest {pointer.digest!r:.60}; expected 32 hex digits: push it again")
    return pointer, info


def _read_store(objects: Objects, pointer: Pointer | None) -> RemoteStore:
    directory = "" if pointer is None else f"{pointer.directory}/"
    where = f"{objects.address}/{directory}{format.MANIFEST}"
    with ThreadPoolExecutor(1) as pool:  # the list is asked for at the same time; web servers have none
        listed = None if objects.address.kind == "http" else pool.submit(objects.list, directory)
        try:
            data, _ = objects.read_whole(directory + format.MANIFEST, most_bytes=format.LARGEST_JSON)
        except ObjectNotFoundError as error:
            raise _not_found(objects, pointer, error) from None
    manifest, digest = format.decode(data, where), format.digest(data)
    if pointer is not None and digest != pointer.digest:
        raise CorruptStoreError(f"{where}: found other bytes than were pushed; expected those of {POINTER}: push again")
    sizes = {**manifest.files, format.CHECKSUMS: format.checksum_bytes(manifest)}
    if listed is None:
        found = _ask_for(objects, directory, [*sizes, RANGES])
    else:
        found = {name[len(directory) :]: info for name, info in listed.result().items()}
    for name, size in sizes.items():
        if name not in found or found[name].size != size:
            what = "no such object" if name not in found else f"{found[name].size:,} bytes"
            raise CorruptStoreError(
                f"{objects.address}/{directory}{name}: found {what}; expected {size:,} bytes, as the manifest says: "
                "a copy that is not complete, or was changed; push the store again"
            )
    stored = {name: found[name] for name in sizes}
    if RANGES in found and found[RANGES].size == range_bytes(ChunkTable(manifest.files, aligned_steps(manifest))):
        stored[RANGES] = found[RANGES]
    return RemoteStore(objects, manifest, data, digest, directory, stored)


def _ask_for(objects: Objects, directory: str, names: list[str]) -> dict[str, ObjectInfo]:
    """Return the objects of a store that exist, by their names in it, from a request for each."""

    def ask(name: str) -> ObjectInfo | None:
        try:
            return objects.head(directory + name)
        except ObjectNotFoundError:
            return None

    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        return {name: info for name, info in zip(names, pool.map(ask, names), strict=True) if info is not None}


def _not_found(objects: Objects, pointer: Pointer | None, error: ObjectNotFoundError) -> Exception:
    """Return the error that says what is at an address in place of a store."""
    if "no such bucket" in str(error):
        return error
    if pointer is not None:
        return CorruptStoreError(
            f"{objects.address}: found a manifest whose push {pointer.digest} is not there; expected its objects: "
            "push the store again"
        )
    names = [] if objects.address.kind == "http" else list(objects.list())
    if any(name.startswith(f"{PUSHES}/") for name in names):
        return StoreNotFoundError(
            f"{objects.address}: found a push that is not complete; expected a store: finish it, "
            f"memfeed push STORE {shlex.quote(str(objects.address))}"
        )
    others = f"{len(names):,} other objects" if names else "nothing"
    return StoreNotFoundError(
        f"{objects.address}: found {others}; expected a store: correct the address, or push one, "
        f"memfeed push STORE {shlex.quote(str(objects.address))}"
    )


CHUNKS_AT_ONCE = 16
_T = TypeVar("_T")


def read_chunk(store: RemoteStore, chunk: Chunk, expected: int) -> memoryview:
    """Return the bytes of a chunk, whose xxh3-64 is ``expected``; other bytes are asked for again.

    Raises CorruptStoreError, which names field and rows, if they stay wrong.
    """
    try:
        return store.read(chunk.name, chunk.first, chunk.size, lambda data: xxhash.xxh3_64_intdigest(data) == expected)
    except CorruptStoreError:
        raise other_bytes(f"{store.address}/{store.directory}{chunk.name}", store.manifest, chunk) from None


def other_bytes(address: str, manifest: Manifest, chunk: Chunk) -> CorruptStoreError:
    """Return the error for bytes at an address that have another checksum."""
    return CorruptStoreError(
        f"{address}: found other bytes than were pushed, in {describe_chunk(manifest, chunk)}; push the store again to "
        "another address, and remove this one"
    )


def expected_chunks(store: RemoteStore) -> list[tuple[Chunk, int]]:
    """Return every chunk of a store with its checksum."""
    hashes = np.frombuffer(store.read_checksum_file(), "<u8").tolist()
    return list(zip(chunks_of(store.manifest.files), hashes, strict=True))


def in_threads(function: Callable[[_T], None], items: Sequence[_T], threads: int) -> None:
    """Call ``function`` with each item. After the first error no other is begun, and the error is raised."""
    with ThreadPoolExecutor(threads) as pool:
        try:
            futures = [pool.submit(function, item) for item in items]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def verify(address: str, report: OnProgress | None = None) -> RemoteStore:
    """Read every byte of the store at ``address`` and compare it with the checksums; return what was verified.

    ``report`` is called with (bytes done, bytes in total), from one thread at a time.
    Raises CorruptStoreError, which names field, rows and object, for the first bytes that have changed.
    """
    store = read_manifest(address)
    chunks = expected_chunks(store)
    total, done = sum(chunk.size for chunk, _ in chunks), 0

    def check(item: tuple[Chunk, int]) -> None:
        nonlocal done
        read_chunk(store, *item)
        done += item[0].size

    for first in range(0, len(chunks), 4 * CHUNKS_AT_ONCE):  # parts: to report in the caller's thread
        in_threads(check, chunks[first : first + 4 * CHUNKS_AT_ONCE], CHUNKS_AT_ONCE)
        if report:
            report(done, total)
    return store
