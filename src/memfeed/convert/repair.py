"""Repair a store whose files are damaged: recompute from the dataset the rows whose bytes changed on the disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from memfeed.building import commit
from memfeed.building.build import Build
from memfeed.building.claim import clear
from memfeed.building.commit import claim_recovered
from memfeed.convert.fingerprint import targets_of
from memfeed.convert.forms import lossy_before
from memfeed.convert.inputs import Input, read_sample
from memfeed.convert.options import ConvertOptions
from memfeed.convert.staleness import compare_store, stale
from memfeed.convert.watchdog import Watchdog
from memfeed.errors import BuildError, CorruptStoreError, MemfeedError, SchemaError, StoreError
from memfeed.schema import codec
from memfeed.schema.codec import Int64Array, Packed
from memfeed.schema.compare import rows_equal
from memfeed.schema.fields import Field
from memfeed.schema.tree import Flattener
from memfeed.store import format, ragged
from memfeed.store.checksums import Chunk, OnProgress, bad_chunks, compute_checksums, read_checksums, verify
from memfeed.store.dataset_attributes import TARGETS_FILE
from memfeed.store.manifest import Manifest
from memfeed.store.opened import open_store
from memfeed.store.store import Store
from memfeed.system import file_copies, files
from memfeed.system.progress import Progress
from memfeed.system.signals import sigterm_unwinds

Leaves = Callable[[int], list[Any]]
"""(sample index) -> the leaves of that sample of the dataset."""


def repair_store(target: Path, given: Input, options: ConvertOptions) -> Store | None:
    """Recompute the damaged rows of the store at `target` and return it, or None if no row is damaged."""
    with sigterm_unwinds(), claim_recovered(target) as root:
        store, manifest = _open_repairable(target, given)
        if Build.is_begun(root):
            raise BuildError(
                f"{root}: found an unfinished build; expected none: finish it (memfeed.cache) or remove it to repair"
            )
        with Progress(target.name, store.nbytes, unit="B", progress=options.progress) as bar:
            damaged = find_damage(target, manifest, bar.advance_to)
            if not damaged:
                bar.say(f"memfeed: {target}: no row is damaged")
                return None
            format.require_nothing_else(target)
            result = compare_store(store, given, options, is_damaged=True)
            known = dict(zip(result.probed.indices, result.probed.samples, strict=True))
            flattener, watchdog = Flattener(result.inferred.structure), Watchdog(0)

            def leaves(index: int) -> list[Any]:
                return flattener(known[index] if index in known else read_sample(given.dataset, index, watchdog))

            with watchdog.watch():
                targets = targets_of(given.dataset, given.length or 0)
                count = replace_rows(target, manifest, damaged, leaves, result.inferred.casts, targets)
            bar.say(f"memfeed: {target}: {count:,} of {len(store):,} rows repaired (bad chunks: {len(damaged)})")
    return open_store(target, types=result.types)


def require_repairable(dataset: Any, path: Any) -> None:
    """Raise TypeError if there is no path, or if the damaged store itself is given as the dataset."""
    if path is None:
        raise TypeError("found None; expected the path of the store to repair: memfeed.repair(dataset, path)")
    if isinstance(dataset, Store) and str(dataset.path) in (str(path), str(files.local_path(path).resolve())):
        raise TypeError(
            f"found the store {dataset.path} itself as the dataset; expected the dataset that it was made of, which "
            f"gives the damaged rows again: memfeed.repair(dataset, {str(path)!r:.150})"
        )


def _open_repairable(target: Path, given: Input) -> tuple[Store, Manifest]:
    """Return the store at `target` and its manifest. Raise StoreError if its rows cannot be recomputed one by one."""
    if not target.exists():
        raise StoreError(
            f"{target}: found nothing to repair; expected a store: make one with memfeed.cache(dataset, path)"
        )
    try:
        store = open_store(target)
    except StoreError as error:  # no manifest, or files that are missing or of another size
        hint = "memfeed.repair recomputes only rows: write all of it with memfeed.cache(..., overwrite=True)"
        raise CorruptStoreError(f"{error}; {hint}") from None
    manifest = store._view.manifest
    if given.kind == "iterable":
        raise StoreError(
            f"{target}: found {type(given.dataset).__name__}, an iterable, whose samples have no numbers; expected the "
            "map-style dataset (len and []), or the columns, that the store was made of: "
            "memfeed.repair(dataset, path)"
        )
    if manifest is None or not getattr(manifest.fingerprint, "probes", ()):
        raise StoreError(
            f"{target}: found a store whose rows cannot be recomputed one by one; memfeed.repair expects one that "
            "cache made of a map-style dataset or of columns, without allow='random': write it again with "
            "memfeed.cache(..., overwrite=True)"
        )
    return store, manifest


def find_damage(path: Path, manifest: Manifest, report: OnProgress | None = None) -> list[Chunk]:
    """Return the chunks that differ from what was written. Raise CorruptStoreError if the checksums are damaged."""
    try:
        read_checksums(path, manifest)
    except CorruptStoreError as error:
        raise CorruptStoreError(
            f"{error}; memfeed.repair needs them: write the store again, memfeed.cache(..., overwrite=True)"
        ) from None
    return list(bad_chunks(path, manifest, report))


class _Column:
    """One column of the damaged store, with two masks over its rows.

    ``damaged`` rows are recomputed. Of those, ``displaced`` ones have lost their place in the heap, because their start
    or dims are damaged.
    """

    def __init__(self, path: Path, field: Field, manifest: Manifest, chunks: list[Chunk]) -> None:
        self.field = field
        records = ragged.record_sizes(field)
        damaged, displaced = np.zeros(manifest.rows, bool), np.zeros(manifest.rows, bool)
        for chunk in chunks:
            record = records[chunk.name]
            if record:
                rows = slice(chunk.first // record, (chunk.first + chunk.size - 1) // record + 1)
                damaged[rows] = True
                displaced[rows] |= field.kind != "fixed"
        if field.kind != "fixed":
            self.unit = field.itemsize
            self.start, self.dims = ragged.open_rows(path, field, manifest.rows)
            sizes = ragged.element_counts(self.dims) * self.unit
            for chunk in chunks:
                if records[chunk.name] is None:
                    first = self.start * self.unit
                    overlaps = (first < chunk.first + chunk.size) & (first + sizes > chunk.first)
                    damaged |= ~displaced & (sizes > 0) & overlaps
        self.damaged, self.displaced, self.is_lossy = damaged, displaced, False

    def write(self, root: Path, row: int, packed: Packed) -> None:
        """Write a row into the copy of the column at `root`: at its place, or at the end of the heap if displaced."""
        if self.field.kind == "fixed":
            _write(ragged.fixed_file(root, self.field), packed.buffers, row * self.field.row_bytes)
            return
        assert packed.dims is not None
        start_file, dims_file, heap = ragged.ragged_files(root, self.field)
        start = int(self.start[row])
        if self.displaced[row]:
            start = -(-heap.stat().st_size // self.unit) if packed.buffers else 0
            _write(start_file, [np.array([start], np.int64).tobytes()], row * 8)
            _write(dims_file, [packed.dims.tobytes()], row * packed.dims.nbytes)
        _write(heap, packed.buffers, start * self.unit)


def _write(path: Path, buffers: Any, offset: int) -> None:
    with files.opened(path) as fd:
        files.write_all_at(fd, buffers, offset)


def replace_rows(
    path: Path,
    manifest: Manifest,
    chunks: list[Chunk],
    leaves: Leaves,
    casts: frozenset[int],
    targets: tuple[Int64Array, object] | None = None,
) -> int:
    """Write a copy of the store at `path` in which the rows that `chunks` touch are recomputed, and exchange the two.

    ``targets`` are those of the dataset, of which targets.bin is written again. Claim the store before. Returns the
    number of rows that were recomputed. Raises StaleStoreError, and leaves the store as it is, if the undamaged part of
    such a row differs from what was recomputed.
    """
    root = format.build_path(path)
    columns = []
    lossy = lossy_before(manifest)
    for field in manifest.schema:
        names = ragged.column_files(field, 0)
        columns.append(_Column(path, field, manifest, [chunk for chunk in chunks if chunk.name in names]))
        columns[-1].is_lossy = len(columns) - 1 in lossy
        if columns[-1].is_lossy and columns[-1].damaged.any():
            raise StoreError(
                f"{path}: found damage in field {field.name}, which memfeed.recode stored as {field.form_text} after "
                "JPEG had changed its pixels: the dataset does not have them; expected damage in other fields: "
                "recode the store again from the one that it was made of, or write it "
                "again, memfeed.cache(..., overwrite=True)"
            )
    changed = {chunk.name for chunk in chunks}
    for column in columns:
        changed |= set(ragged.column_files(column.field, 0)) if column.displaced.any() else set()
    rows = np.flatnonzero(np.any([column.damaged for column in columns], axis=0))
    sample_indices = np.delete(np.arange(manifest.rows + len(manifest.skipped)), np.array(manifest.skipped, np.int64))
    clear(root)
    try:
        for name in manifest.files:
            _copy(path / name, root / name, manifest.files[name], link=name not in changed)
        for row in rows.tolist():
            _replace_row(path, root, columns, row, int(sample_indices[row]), leaves, casts)
        if TARGETS_FILE in changed:
            _replace_targets(path, root, manifest, None if targets is None else targets[0][sample_indices])
    except BaseException:
        with contextlib.suppress(MemfeedError):  # the first error is the one to raise
            clear(root)
        raise
    _publish(root, path, manifest, changed)
    return len(rows)


def _replace_targets(path: Path, root: Path, manifest: Manifest, targets: Int64Array | None) -> None:
    """Write targets.bin again. Raise StaleStoreError if the dataset's targets are not those that were kept."""
    if targets is not None:
        files.write_file(root / TARGETS_FILE, targets.astype("<i8").tobytes())
        sizes = {TARGETS_FILE: 8 * manifest.rows}
        known = read_checksums(path, manifest)[TARGETS_FILE]
        if targets.shape == (manifest.rows,) and compute_checksums(root, sizes, {}) == np.array(known, "<u8").tobytes():
            return
    raise stale(path, "found other targets of the dataset than were kept")


def _publish(root: Path, path: Path, manifest: Manifest, changed: set[str]) -> None:
    """Sync and hash the files that changed, verify the copy at `root`, and put it in the place of the store."""
    for name in changed:
        files.sync_data(root / name)
    commit.write_metadata(root, manifest.schema, manifest.rows)
    sizes = {name: (root / name).stat().st_size for name in manifest.files}
    sums = read_checksums(path, manifest)
    known = {name: hashes for name, hashes in sums.items() if name not in changed}
    content = compute_checksums(root, sizes, known)
    files.write_file(root / format.CHECKSUMS, content)
    repaired = msgspec.structs.replace(manifest, files=sizes, checksums=format.digest(content))
    commit.seal(root, format.decode(format.encode(repaired), root))
    verify(root, repaired)
    commit.publish(root, path, overwrite=True)


def _copy(path: Path, to: Path, size: int, *, link: bool) -> None:
    """Copy the first ``size`` bytes of a file; with `link`, make it a second name of the same file if possible."""
    files.make_directory(to.parent)
    is_longer = path.stat().st_size > size  # another generation of the store has more rows
    if link and not is_longer and file_copies.link(path, to):
        return
    file_copies.copy(path, to)
    if is_longer:
        files.truncate(to, size)
    if link:
        files.sync_data(to)


def _replace_row(
    path: Path, root: Path, columns: list[_Column], row: int, index: int, leaves: Leaves, casts: frozenset[int]
) -> None:
    try:
        found = codec.pack_sample((column.field for column in columns), leaves(index), casts, index)
    except SchemaError as error:
        raise stale(path, str(error)) from None
    for column, packed in zip(columns, found, strict=True):
        if column.is_lossy:  # such a row is not the sample
            continue
        field, where = column.field, f"field {column.field.name}, sample {index}"
        if not column.displaced[row]:
            kept = ragged.read_row(path, field, row)
            if packed.dims is not None and kept.dims is not None and (packed.dims != kept.dims).any():
                raise stale(path, f"{where}: found dims {packed.dims[0].tolist()}, expected {kept.dims[0].tolist()}")
            if not column.damaged[row] and not rows_equal(field, packed, kept):
                raise stale(path, f"{where}: found another value than was stored")
        if column.damaged[row]:
            column.write(root, row, packed)
