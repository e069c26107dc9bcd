"""The checksums of a store: the xxh3-64 of every chunk of every file, in checksums.bin. Compute and verify them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from memfeed.errors import CorruptStoreError
from memfeed.store import format
from memfeed.store.manifest import CHUNK_BYTES, Manifest
from memfeed.store.ragged import record_sizes

_PIECE_BYTES = 256 << 10  # read and hashed while it is in the core's own cache
_HASH_THREADS = 4
_local = threading.local()


class ChunkHasher:
    """Hashes a file's chunks from its bytes as they are written, in order.

    ``done`` are the hashes of the chunks before the first byte.
    """

    def __init__(self, done: Iterable[int] = ()) -> None:
        self._hash, self._filled, self._done = xxhash.xxh3_64(), 0, list(done)

    def update(self, data: Any) -> None:
        """Add the next bytes (a C-contiguous buffer)."""
        view = memoryview(data).cast("B")
        while len(view):
            part = view[: CHUNK_BYTES - self._filled]
            self._hash.update(part)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == CHUNK_BYTES:
                self._done.append(self._hash.intdigest())
                self._hash, self._filled = xxhash.xxh3_64(), 0

    def hashes(self) -> list[int]:
        """Return one hash for each chunk of the bytes so far; the last chunk may be shorter."""
        return [*self._done, self._hash.intdigest()] if self._filled else list(self._done)


def chunk_hash(path: Path, first: int, size: int) -> int:
    """Return the xxh3-64 of the ``size`` bytes of a file from byte ``first``. Raises OSError if it ends earlier."""
    if not hasattr(_local, "buffer"):  # new memory for each piece costs more than to hash it
        _local.buffer = memoryview(bytearray(_PIECE_BYTES))
    hashed, buffer, done = xxhash.xxh3_64(), _local.buffer, 0
    with open(path, "rb", buffering=0) as file:
        file.seek(first)
        while done < size:
            read = file.readinto(buffer[: size - done])
            if not read:
                raise OSError(f"{path}: ended at byte {first + done}")
            hashed.update(buffer[:read])
            done += read
    return hashed.intdigest()


def hash_pool() -> ThreadPoolExecutor:
    """Return the threads that hash chunks."""
    return ThreadPoolExecutor(min(_HASH_THREADS, os.cpu_count() or 1))


class Chunk(msgspec.Struct, frozen=True):
    """Some bytes of a column file that have a checksum of their own."""

    name: str
    first: int
    size: int


def chunks_of(sizes: Mapping[str, int]) -> list[Chunk]:
    """Return the chunks of files of these sizes, in order."""
    return [
        Chunk(name, first, min(CHUNK_BYTES, size - first))
        for name, size in sizes.items()
        for first in range(0, size, CHUNK_BYTES)
    ]


def chunk_count(size: int) -> int:
    """Return how many chunks a file of ``size`` bytes has."""
    return -(-size // CHUNK_BYTES)


def compute_checksums(root: Path, sizes: Mapping[str, int], known: Mapping[str, Sequence[int]]) -> bytes:
    """Return the content of checksums.bin: 8 bytes per chunk, little endian, in the order of ``sizes``.

    ``known`` has the hashes of files that need not be read.
    """
    chunks = chunks_of({name: size for name, size in sizes.items() if name not in known})
    with hash_pool() as pool:
        read = pool.map(lambda chunk: chunk_hash(root / chunk.name, chunk.first, chunk.size), chunks)
        hashes = [
            known[name] if name in known else list(islice(read, chunk_count(size))) for name, size in sizes.items()
        ]
    return np.array([one for of_file in hashes for one in of_file], "<u8").tobytes()


def read_checksums(path: Path, manifest: Manifest) -> dict[str, list[int]]:
    """Read the checksums of every chunk of every file. Raises CorruptStoreError if they are damaged themselves."""
    format.check_file(path, format.CHECKSUMS, format.checksum_bytes(manifest))
    return split_checksums((path / format.CHECKSUMS).read_bytes(), manifest, path / format.CHECKSUMS)


def split_checksums(content: bytes, manifest: Manifest, where: object) -> dict[str, list[int]]:
    """Return the checksums of every chunk of every file from the bytes of checksums.bin; ``where`` they are is shown.

    Raises CorruptStoreError if they are damaged themselves.
    """
    if format.digest(content) != manifest.checksums:
        raise CorruptStoreError(
            f"{where}: found other bytes than were written; expected the checksums that the manifest "
            "names: restore the file from a copy, or make the store again with overwrite=True"
        )
    hashes = iter(np.frombuffer(content, "<u8").tolist())
    return {name: list(islice(hashes, chunk_count(size))) for name, size in manifest.files.items()}


OnProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""


def bad_chunks(path: Path, manifest: Manifest, report: OnProgress | None = None) -> Generator[Chunk, None, None]:
    """Yield the chunks whose bytes have changed, as they are found. Raises CorruptStoreError for bad checksums."""
    format.check_columns(path, manifest)  # again: they may have changed since the store was opened
    expected = [one for of_file in read_checksums(path, manifest).values() for one in of_file]
    chunks = chunks_of(manifest.files)
    done, total = 0, sum(manifest.files.values())
    with hash_pool() as pool:
        hashes = pool.map(lambda chunk: _hash(path / chunk.name, chunk), chunks)
        for chunk, want, have in zip(chunks, expected, hashes, strict=True):
            if have != want:
                yield chunk
            done += chunk.size
            if report:
                report(done, total)


def _hash(path: Path, chunk: Chunk) -> int:
    try:
        return chunk_hash(path, chunk.first, chunk.size)
    except OSError as error:
        raise CorruptStoreError(
            f"{path}: found bytes that cannot be read ({error}); restore the file from a copy, or make the store again "
            "with overwrite=True"
        ) from None


def verify(path: Path, manifest: Manifest, report: OnProgress | None = None) -> None:
    """Raise CorruptStoreError naming field, rows and file of the first chunk whose bytes have changed."""
    with closing(bad_chunks(path, manifest, report)) as bad:
        for chunk in bad:
            raise CorruptStoreError(
                f"{path / chunk.name}: found other bytes than were written, in {describe_chunk(manifest, chunk)}; "
                "restore the file from a copy, or compute these rows again: memfeed.repair(dataset, path)"
            )


def describe_chunk(manifest: Manifest, chunk: Chunk) -> str:
    """Return the place of a chunk in words: its bytes, its field and the rows in it."""
    field = next((field for field in manifest.schema if chunk.name in record_sizes(field)), None)
    record = record_sizes(field)[chunk.name] if field is not None else 8
    last = chunk.first + chunk.size - 1
    rows = f"rows {chunk.first // record} to {last // record}" if record else "some of its rows"
    what = f"field {field.name}" if field is not None else "the targets of the dataset"
    return f"{chunk.size:,} bytes from {chunk.first:,} ({what}, {rows})"
