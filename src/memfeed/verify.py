"""Every byte of a store against its checksums."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from memfeed import format
from memfeed.errors import CorruptStoreError
from memfeed.format import Manifest

OnProgress = Callable[[int, int], None]


def verify(path: Path, manifest: Manifest, progress: OnProgress | None = None) -> None:
    """Raises CorruptStoreError naming field, rows and file of the first chunk that is not what was written."""
    for name, size in manifest.files.items():  # once more: they may have changed since the store was opened
        format.check_file(path, name, size)
    format.check_file(path, format.CHECKSUMS, format.checksum_bytes(manifest))
    sums = (path / format.CHECKSUMS).read_bytes()
    if format.digest(sums) != manifest.checksums:
        raise CorruptStoreError(f"{path / format.CHECKSUMS}: found other bytes than the manifest says; damaged")
    expected = iter(np.frombuffer(sums, "<u8").tolist())
    chunks = [
        (name, first, min(manifest.chunk_bytes, size - first), next(expected))
        for name, size in manifest.files.items()
        for first in range(0, size, manifest.chunk_bytes)
    ]
    done, total = 0, sum(manifest.files.values())
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        hashes = pool.map(lambda chunk: _hash(path / chunk[0], chunk[1], chunk[2]), chunks)
        for (name, first, size, want), have in zip(chunks, hashes, strict=True):
            if have != want:
                raise CorruptStoreError(_damage(path, manifest, name, first, size))
            done += size
            if progress:
                progress(done, total)


def _hash(path: Path, first: int, size: int) -> int:
    try:
        return format.chunk_hash(path, first, size)
    except OSError as error:
        raise CorruptStoreError(
            f"{path}: found bytes that cannot be read ({error}); restore the file from a copy"
        ) from None


def _damage(path: Path, manifest: Manifest, name: str, first: int, size: int) -> str:
    field = next(f for f in manifest.schema if name in format.column_files(f, 0))
    record = format.column_files(field, 1)[name]
    where = f"rows {first // record} to {(first + size - 1) // record}" if record else "some of its rows"
    return (
        f"{path / name}: found other bytes than were written, in {size:,} bytes from {first:,} "
        f"(field {field.name}, {where}); restore the file from a copy, or make the store anew"
    )
