"""Every byte of a store against its checksums."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from memfeed.errors import CorruptStoreError
from memfeed.store import format
from memfeed.store.format import Manifest

OnProgress = Callable[[int, int], None]


class Chunk(msgspec.Struct, frozen=True):
    """Some bytes of a column file that have a checksum of their own."""

    name: str
    first: int
    size: int


def read_checksums(path: Path, manifest: Manifest) -> dict[str, list[int]]:
    """The checksums of every chunk of every file. Raises CorruptStoreError if they are damaged themselves."""
    format.check_file(path, format.CHECKSUMS, format.checksum_bytes(manifest))
    sums = (path / format.CHECKSUMS).read_bytes()
    if format.digest(sums) != manifest.checksums:
        raise CorruptStoreError(f"{path / format.CHECKSUMS}: found other bytes than the manifest says; damaged")
    expected = iter(np.frombuffer(sums, "<u8").tolist())
    return {name: list(islice(expected, -(-size // manifest.chunk_bytes))) for name, size in manifest.files.items()}


def bad_chunks(path: Path, manifest: Manifest, progress: OnProgress | None = None) -> Generator[Chunk, None, None]:
    """The chunks that are not what was written, as they are found. Raises CorruptStoreError for bad checksums."""
    for name, size in manifest.files.items():  # once more: they may have changed since the store was opened
        format.check_file(path, name, size)
    sums = read_checksums(path, manifest)
    chunks = [
        Chunk(name, first, min(manifest.chunk_bytes, size - first))
        for name, size in manifest.files.items()
        for first in range(0, size, manifest.chunk_bytes)
    ]
    expected = [one for of_file in sums.values() for one in of_file]
    done, total = 0, sum(manifest.files.values())
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        hashes = pool.map(lambda chunk: _hash(path / chunk.name, chunk.first, chunk.size), chunks)
        for chunk, want, have in zip(chunks, expected, hashes, strict=True):
            if have != want:
                yield chunk
            done += chunk.size
            if progress:
                progress(done, total)


def _hash(path: Path, first: int, size: int) -> int:
    try:
        return format.chunk_hash(path, first, size)
    except OSError as error:
        raise CorruptStoreError(
            f"{path}: found bytes that cannot be read ({error}); restore the file from a copy, or make the store anew "
            "with overwrite=True"
        ) from None


def verify(path: Path, manifest: Manifest, progress: OnProgress | None = None) -> None:
    """Raises CorruptStoreError naming field, rows and file of the first chunk that is not what was written."""
    with closing(bad_chunks(path, manifest, progress)) as bad:
        for chunk in bad:
            raise CorruptStoreError(_damage(path, manifest, chunk.name, chunk.first, chunk.size))


def _damage(path: Path, manifest: Manifest, name: str, first: int, size: int) -> str:
    field = next(f for f in manifest.schema if name in format.column_files(f, 0))
    record = format.column_files(field, 1)[name]
    where = f"rows {first // record} to {(first + size - 1) // record}" if record else "some of its rows"
    return (
        f"{path / name}: found other bytes than were written, in {size:,} bytes from {first:,} "
        f"(field {field.name}, {where}); restore the file from a copy, or have cache compute these rows again from the "
        "dataset: repair=True"
    )
