"""Compare every byte of a store with its checksums."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path

from memfeed.errors import CorruptStoreError
from memfeed.store import format
from memfeed.store.checksums import Chunk, chunk_hash, chunks_of, hash_pool, read_checksums
from memfeed.store.manifest import Manifest
from memfeed.store.ragged import record_sizes

OnProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""


def bad_chunks(path: Path, manifest: Manifest, progress: OnProgress | None = None) -> Generator[Chunk, None, None]:
    """Yield the chunks whose bytes have changed, as they are found. Raises CorruptStoreError for bad checksums."""
    for name, size in manifest.files.items():  # again: they may have changed since the store was opened
        format.check_file(path, name, size)
    expected = [one for of_file in read_checksums(path, manifest).values() for one in of_file]
    chunks = chunks_of(manifest.files)
    done, total = 0, sum(manifest.files.values())
    with hash_pool() as pool:
        hashes = pool.map(lambda chunk: _hash(path / chunk.name, chunk), chunks)
        for chunk, want, have in zip(chunks, expected, hashes, strict=True):
            if have != want:
                yield chunk
            done += chunk.size
            if progress:
                progress(done, total)


def _hash(path: Path, chunk: Chunk) -> int:
    try:
        return chunk_hash(path, chunk.first, chunk.size)
    except OSError as error:
        raise CorruptStoreError(
            f"{path}: found bytes that cannot be read ({error}); restore the file from a copy, or make the store anew "
            "with overwrite=True"
        ) from None


def verify(path: Path, manifest: Manifest, progress: OnProgress | None = None) -> None:
    """Raise CorruptStoreError naming field, rows and file of the first chunk whose bytes have changed."""
    with closing(bad_chunks(path, manifest, progress)) as bad:
        for chunk in bad:
            raise CorruptStoreError(_damage(path, manifest, chunk))


def _damage(path: Path, manifest: Manifest, chunk: Chunk) -> str:
    field = next(field for field in manifest.schema if chunk.name in record_sizes(field))
    record = record_sizes(field)[chunk.name]
    last = chunk.first + chunk.size - 1
    rows = f"rows {chunk.first // record} to {last // record}" if record else "some of its rows"
    return (
        f"{path / chunk.name}: found other bytes than were written, in {chunk.size:,} bytes from {chunk.first:,} "
        f"(field {field.name}, {rows}); restore the file from a copy, or let cache compute these rows again from the "
        "dataset: repair=True"
    )
