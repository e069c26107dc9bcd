"""The chunks of a store at an address: read with their checksums, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

import xxhash

from memfeed.errors import CorruptStoreError
from memfeed.remote.layout import RemoteStore, read_manifest
from memfeed.store.checksums import Chunk, OnProgress, chunks_of, describe_chunk
from memfeed.store.manifest import Manifest

CHUNKS_AT_ONCE = 16
_T = TypeVar("_T")


def read_chunk(store: RemoteStore, chunk: Chunk, expected: int) -> memoryview:
    """Return the bytes of a chunk, whose xxh3-64 is ``expected``; other bytes are asked for again.

    Raises CorruptStoreError, which names field and rows, if they stay wrong.
    """
    try:
        return store.read(chunk.name, chunk.first, chunk.size, lambda data: xxhash.xxh3_64_intdigest(data) == expected)
    except CorruptStoreError:
        raise other_bytes(f"{store.address}/{store.files[chunk.name].name}", store.manifest, chunk) from None


def other_bytes(address: str, manifest: Manifest, chunk: Chunk) -> CorruptStoreError:
    """Return the error for bytes at an address that have another checksum."""
    return CorruptStoreError(
        f"{address}: found other bytes than were pushed, in {describe_chunk(manifest, chunk)}; push the store again to "
        "another address, and remove this one"
    )


def expected_chunks(store: RemoteStore) -> list[tuple[Chunk, int]]:
    """Return every chunk of a store with its checksum."""
    hashes = [one for of_file in store.read_checksums().values() for one in of_file]
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
