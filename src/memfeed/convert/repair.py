"""Mends a store whose files rotted: rows whose bytes are not what was written are computed again from the dataset."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from memfeed.building import commit
from memfeed.building.claim import clear
from memfeed.convert import staleness
from memfeed.errors import CorruptStoreError, MemfeedError, SchemaError
from memfeed.schema import codec
from memfeed.schema.codec import Packed
from memfeed.schema.fields import Field
from memfeed.store import format, ragged
from memfeed.store.checksums import Chunk, compute_checksums, read_checksums
from memfeed.store.manifest import Manifest
from memfeed.store.verify import OnProgress, bad_chunks, verify
from memfeed.system import files

Int64Array = npt.NDArray[np.int64]
Leaves = Callable[[int], list[Any]]
"""The leaves of the dataset's sample with this index."""


def find_rot(path: Path, manifest: Manifest, progress: OnProgress | None = None) -> list[Chunk]:
    """The chunks that are not what was written. Raises CorruptStoreError where even the checksums are damaged."""
    try:
        read_checksums(path, manifest)
    except CorruptStoreError as error:
        raise CorruptStoreError(f"{error}; repair=True needs them: make the store anew with overwrite=True") from None
    return list(bad_chunks(path, manifest, progress))


class _Column:
    """One column of the rotten store: which rows of it are to be computed, and which of them have no place any more."""

    def __init__(self, path: Path, field: Field, manifest: Manifest, chunks: list[Chunk]) -> None:
        self.path, self.field, self.rows = path, field, manifest.rows
        records = ragged.record_sizes(field)
        bad, lost = np.zeros(manifest.rows, bool), np.zeros(manifest.rows, bool)
        for chunk in chunks:
            record = records[chunk.name]
            if record:
                where = slice(chunk.first // record, (chunk.first + chunk.size - 1) // record + 1)
                bad[where] = True
                lost[where] |= field.kind != "fixed"
        if field.kind != "fixed":
            self.unit = field.itemsize
            self.start, self.dims = ragged.open_rows(path, field, manifest.rows)
            sizes = ragged.element_counts(self.dims) * self.unit
            for chunk in chunks:
                if records[chunk.name] is None:
                    first = self.start * self.unit
                    bad |= ~lost & (sizes > 0) & (first < chunk.first + chunk.size) & (first + sizes > chunk.first)
        self.bad, self.lost = bad, lost

    def stored(self, row: int) -> tuple[bytes, list[int] | None]:
        """The bytes and the dims of a row that has its place."""
        if self.field.kind == "fixed":
            size = self.field.row_bytes
            return _bytes(ragged.fixed_file(self.path, self.field), row * size, size), None
        dims = self.dims[row].tolist()
        size = 0 if dims[0] < 0 else int(np.prod(dims)) * self.unit
        heap = ragged.ragged_files(self.path, self.field).heap
        return _bytes(heap, int(self.start[row]) * self.unit, size), dims

    def write(self, root: Path, row: int, packed: Packed) -> None:
        """Puts a row into the copy of the column at ``root``: at its place, or behind all others."""
        if self.field.kind == "fixed":
            _put(ragged.fixed_file(root, self.field), packed.buffers, row * self.field.row_bytes)
            return
        assert packed.dims is not None
        start_file, dims_file, heap = ragged.ragged_files(root, self.field)
        start = int(self.start[row])
        if self.lost[row]:
            start = -(-heap.stat().st_size // self.unit) if packed.buffers else 0
            _put(start_file, [np.array([start], np.int64).tobytes()], row * 8)
            _put(dims_file, [packed.dims.tobytes()], row * packed.dims.nbytes)
        _put(heap, packed.buffers, start * self.unit)


def _bytes(path: Path, first: int, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(first)
        return file.read(size)


def _put(path: Path, buffers: Any, offset: int) -> None:
    with files.opened(path) as fd:
        files.write_all_at(fd, buffers, offset)


def repair(path: Path, manifest: Manifest, rot: list[Chunk], leaves: Leaves, casts: frozenset[int]) -> int:
    """Makes the store at ``path`` anew beside itself, with the rows that ``rot`` touches computed, and exchanges them.

    Only for whoever has claimed the build. What is computed is compared with what is healthy of the same row. Returns
    how many rows were computed. Raises StaleStoreError, and leaves the store as it is, where they differ.
    """
    root = format.build_path(path)
    columns = []
    for field in manifest.schema:
        names = ragged.column_files(field, 0)
        columns.append(_Column(path, field, manifest, [chunk for chunk in rot if chunk.name in names]))
    changed = {chunk.name for chunk in rot}
    for column in columns:
        changed |= set(ragged.column_files(column.field, 0)) if column.lost.any() else set()
    rows = np.flatnonzero(np.any([column.bad for column in columns], axis=0))
    indices = _indices(manifest)
    clear(root)
    try:
        for name in manifest.files:
            _copy(path / name, root / name, link=name not in changed)
        for row in rows.tolist():
            _mend(path, root, columns, row, int(indices[row]), leaves, casts)
    except BaseException:
        with contextlib.suppress(MemfeedError):  # the first error is the one to be told
            clear(root)
        raise
    for name in changed:
        files.sync_data(root / name)
    commit.write_metadata(root, manifest.schema, manifest.rows)
    sizes = {name: (root / name).stat().st_size for name in manifest.files}
    sums = read_checksums(path, manifest)
    known = {name: hashes for name, hashes in sums.items() if name not in changed}
    content = compute_checksums(root, sizes, known)
    files.write_file(root / format.CHECKSUMS, content)
    mended = msgspec.structs.replace(manifest, files=sizes, checksums=format.digest(content))
    commit.seal(root, format.decode(format.encode(mended), root))
    verify(root, mended)
    commit.publish(root, path, overwrite=True)
    return len(rows)


def _copy(path: Path, to: Path, *, link: bool) -> None:
    """A copy to write to; of a file that stays as it is another name does, where the file system has such."""
    files.make_directory(to.parent)
    if link and files.link(path, to):
        return
    files.copy(path, to)
    if link:
        files.sync_data(to)


def _indices(manifest: Manifest) -> Int64Array:
    """The index in the dataset of every row."""
    whole = np.arange(manifest.rows + len(manifest.skipped), dtype=np.int64)
    return np.delete(whole, np.array(manifest.skipped, np.int64))


def _mend(
    path: Path, root: Path, columns: list[_Column], row: int, index: int, leaves: Leaves, casts: frozenset[int]
) -> None:
    for number, (column, leaf) in enumerate(zip(columns, leaves(index), strict=True)):
        field = column.field
        where = f"field {field.name}, sample {index}"
        try:
            packed = codec.pack(field, [leaf], cast=number in casts)
        except SchemaError as error:
            raise staleness.refuse(path, f"{where}: {error}") from None
        if not column.lost[row]:
            data, dims = column.stored(row)
            if packed.dims is not None and packed.dims[0].tolist() != dims:
                raise staleness.refuse(path, f"{where}: found dims {packed.dims[0].tolist()}, expected {dims}")
            if not column.bad[row] and b"".join(bytes(buffer) for buffer in packed.buffers) != data:
                raise staleness.refuse(path, f"{where}: found another value than was stored")
        if column.bad[row]:
            column.write(root, row, packed)
