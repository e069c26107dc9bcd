"""The last steps of a build: turn complete files into a finished store, also after a crash.

A crash may interrupt a commit whose manifest is written, or the replacement of a store: both are finished later.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from memfeed.building.claim import claim, clear, is_claimed
from memfeed.building.space import trim_heap
from memfeed.errors import BuildError, MemfeedError
from memfeed.schema.fields import Field, Schema
from memfeed.schema.names import decode_key
from memfeed.store import format, ragged
from memfeed.store.checksums import compute_checksums
from memfeed.store.coded_columns import decoded_column
from memfeed.store.dataset_attributes import TARGETS_FILE, Attributes, Kept, equal_field
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.manifest import Fingerprint, Manifest
from memfeed.store.ragged_columns import RaggedColumn
from memfeed.system import files, trust

if TYPE_CHECKING:
    from tensordict import TensorDict


_SYNC_THREADS = 4
CLOSING = "closing"
_RENAMED_BY_ANOTHER = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)


def remove_skipped(root: Path, schema: Schema, keep: npt.NDArray[np.bool_]) -> None:
    """Remove skipped rows from every file that has one record per row, keeping the order.

    Each file is replaced by a copy, one after another. So after a crash each file is either old or new, which its size
    shows, and the same call can be repeated. From the first file on no row can be written any more, because rows have
    other positions: the file ``closing`` in the work directory says so.
    """
    files.write_atomically(root / WORK_DIRECTORY / CLOSING, b"")
    edges = np.flatnonzero(np.diff(np.concatenate([[False], keep, [False]]).astype(np.int8))).reshape(-1, 2)
    for name, record in ((name, size) for field in schema for name, size in ragged.record_sizes(field).items() if size):
        path = root / name
        if path.stat().st_size == int(keep.sum()) * record:
            continue
        copy, done = path.with_suffix(".copy"), 0
        with files.opened(copy, os.O_CREAT | os.O_TRUNC) as target, open(path, "rb") as source:
            for first, last in (edges * record).tolist():
                source.seek(first)
                while first < last:
                    block = source.read(min(files.COPY_BYTES, last - first))
                    done += files.write_at(target, block, done)
                    first += len(block)
            files.sync(target)
        files.rename(copy, path)


def finish_files(
    root: Path,
    schema: Schema,
    row_count: int,
    fingerprint: Fingerprint | None,
    skipped: Sequence[int],
    hashes: Mapping[str, Sequence[int]],
    kept: Kept,
    *,
    punch: bool,
) -> Manifest:
    """Bring the column files to their final size, sync and hash them, and let tensordict write its metadata.

    Heaps are cut to their used size, and with ``punch`` the gaps in them are given back to the disk.
    ``kept`` has what the store keeps beside the columns.
    ``hashes`` are those of files that were hashed as they were written.
    """
    sizes: dict[str, int] = {}
    for field in schema:
        for name, size in ragged.column_files(field, row_count).items():
            path = root / name
            if size is None:
                size = trim_heap(root, field, row_count, punch=punch)
            elif path.stat().st_size != size:
                files.truncate(path, size)
            sizes[name] = size
    attributes = _keep_attributes(root, schema, kept, skipped)
    if (root / TARGETS_FILE).exists():
        sizes[TARGETS_FILE] = 8 * row_count
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:  # the disk is busy with the columns while they are hashed
        # not while columns are written: its small steps in Python held up the threads that wrote them
        metadata = pool.submit(write_metadata, root, schema, row_count)
        synced = [pool.submit(files.sync_data, root / name) for name in sizes]
        try:
            sums = compute_checksums(root, sizes, hashes)
            schema = share_lengths(root, schema, row_count)
            metadata.result()
        finally:
            for sync in synced:  # also after another error: lost rows are forgotten only if the failed sync is raised
                sync.result()
    return describe(root, schema, row_count, sizes, sums, fingerprint, skipped, attributes, kept.metadata)


def describe(
    root: Path,
    schema: Schema,
    row_count: int,
    sizes: dict[str, int],
    sums: bytes,
    fingerprint: Fingerprint | None,
    skipped: Sequence[int],
    attributes: Attributes,
    metadata: Mapping[str, Any],
) -> Manifest:
    """Write the checksums ``sums`` of files of these sizes, and return the manifest, as a reader would decode it."""
    files.write_file(root / format.CHECKSUMS, sums)
    manifest = format.new_manifest(
        rows=row_count,
        schema=schema,
        files=sizes,
        checksums=format.digest(sums),
        fingerprint=fingerprint,
        skipped=tuple(skipped),
        attributes=msgspec.UNSET if attributes == Attributes() else attributes,
        metadata=dict(metadata) or msgspec.UNSET,
    )
    content = format.encode(manifest)
    format.require_bounded(root, len(content))
    return format.decode(content, root)  # never publish a store that open() would refuse


def _keep_attributes(root: Path, schema: Schema, kept: Kept, skipped: Sequence[int]) -> Attributes:
    """Return the attributes as a manifest has them. Write targets.bin if no column has the targets."""
    files.remove(root / TARGETS_FILE)  # of a commit that was interrupted
    targets = kept.attributes.targets
    if kept.targets is None or targets is None:
        return kept.attributes
    numbers = np.delete(kept.targets, np.asarray(skipped, np.int64))
    field = equal_field(root, schema.fields, numbers)
    if field is None:
        files.write_file(root / TARGETS_FILE, numbers.astype("<i8").tobytes())
    return msgspec.structs.replace(kept.attributes, targets=msgspec.structs.replace(targets, field=field))


def share_lengths(root: Path, schema: Schema, row_count: int) -> Schema:
    """Find jagged fields that have equal lengths in every row: their batches share one offsets tensor."""
    first_with: dict[str, int] = {}
    fields = []
    for index, field in enumerate(schema.fields):
        if field.decoded.kind == "jagged":
            dims_of, hashed = _dims_of(root, field, row_count), xxhash.xxh3_128()
            for first in range(0, row_count, ragged.ROWS_AT_ONCE):
                dims = dims_of(first, min(first + ragged.ROWS_AT_ONCE, row_count))
                hashed.update(dims[:, field.decoded.ragged_dim].tobytes())
            field = msgspec.structs.replace(field, lengths_of=first_with.setdefault(hashed.hexdigest(), index))
        fields.append(field)
    return Schema(fields=tuple(fields), structure=schema.structure)


def _dims_of(root: Path, field: Field, row_count: int) -> Callable[[int, int], npt.NDArray[np.int64]]:
    """Return a function that returns the dims of the rows from ``first`` to before ``last``, int64 [k, rank]."""
    if field.coding is None:
        _, dims = ragged.open_rows(root, field, row_count)
        return lambda first, last: dims[first:last]
    paths = ragged.ragged_files(root, field)
    stored = RaggedColumn(field, paths, row_count, paths.heap.stat().st_size)
    column = decoded_column(stored)
    return lambda first, last: column.locate(np.arange(first, last)).dims


def write_metadata(root: Path, schema: Schema, row_count: int) -> None:
    """Write every meta.json, by tensordict itself so that every version of it reads them.

    tensordict writes them beside columns of its own: sparse files in a directory that is removed afterwards.
    """
    from tensordict import TensorDict

    # older versions of tensordict name files as the keys: they get the encoded names as keys
    encodes = "robust_key" in inspect.signature(TensorDict.memmap_like).parameters
    tree = dict[str, object]()
    for field in schema:
        *above, last = (decode_key(part) if encodes else part for part in field.stem.split("/"))
        at = tree
        for part in above:
            at = at.setdefault(part, {})  # type: ignore[assignment]
        if field.kind == "fixed":
            # tensordict cannot load float8: it gets the bytes, and the manifest names the dtype
            dtype = torch.uint8 if field.dtype.startswith("float8") else field.torch_dtype
            at[last] = torch.empty((), dtype=dtype, device="cpu").expand(row_count, *field.row_shape)
        else:
            cell = torch.empty((), dtype=torch.int64, device="cpu")
            at[last] = {"start": cell.expand(row_count), "dims": cell.expand(row_count, ragged.dims_width(field))}
    scratch = root / WORK_DIRECTORY / "meta"
    files.remove_tree(scratch)
    try:
        _as_tensordict(tree, row_count).memmap_like(str(scratch), **({"robust_key": True} if encodes else {}))
    except (OSError, RuntimeError) as error:  # torch reports a full disk only in words
        full = errno.ENOSPC if os.strerror(errno.ENOSPC) in str(error) else errno.EIO
        cause = error if isinstance(error, OSError) and error.errno else OSError(full, str(error))
        raise files.refused(cause, scratch, "writing tensordict's metadata", 4096 * len(schema)) from error
    for path in scratch.rglob("meta.json"):
        target = root / path.relative_to(scratch)
        files.write_file(target, path.read_bytes())
    files.remove_tree(scratch)


def _as_tensordict(tree: dict[str, object], row_count: int) -> TensorDict:
    from tensordict import TensorDict

    return TensorDict(
        {key: _as_tensordict(value, row_count) if isinstance(value, dict) else value for key, value in tree.items()},
        batch_size=[row_count],
    )


def seal(root: Path, manifest: Manifest, content: bytes | None = None) -> None:
    """Sync everything else, then write the manifest: a directory with a valid manifest is complete.

    ``content`` are the bytes of the manifest where the store is a copy.
    """
    names = [*manifest.files, *sync_small(root)]
    for name in names:
        files.chmod(root / name, 0o444)  # tensordict maps files shared and writable where it can
    for directory in {(root / name).parent for name in names}:
        files.sync_directory(directory)
    files.write_atomically(root / format.MANIFEST, format.encode(manifest) if content is None else content)
    files.chmod(root / format.MANIFEST, 0o444)


def sync_small(root: Path) -> list[str]:
    """Sync the files of a store beside its columns, and return their names. Every try writes these files again."""
    beside = [name for name in (format.CHECKSUMS, format.GENERATIONS) if (root / name).exists()]
    names = [*beside, *(str(path.relative_to(root)) for path in root.rglob("meta.json"))]
    for name in names:
        files.sync_data(root / name)
    return names


def publish(root: Path, path: Path, *, overwrite: bool) -> None:
    """Rename a complete build to its store's name; with ``overwrite`` it replaces the store that has the name.

    When a store is replaced, the work directory is removed last. So after a crash the directory that has one is the
    newer of the two.
    """
    old = old_path(path)
    if overwrite and path.exists():
        trust.require_own_directory(path)
        format.require_nothing_else(path)
        files.remove_tree(path / WORK_DIRECTORY)  # of an interrupted replacement: it would look like the newer
        files.remove_tree(old)
        files.sync_directory(path)
        if files.exchange(root, path):
            files.rename(root, old)  # its removal can take long, and others wait for the build's path
        else:
            files.rename(path, old)
            files.sync_directory(path.parent)
            files.rename(root, path)
        remove_remains(path)
    else:
        files.remove_tree(root / WORK_DIRECTORY)
        try:
            files.rename(root, path)
        except BuildError as error:
            # without the work directory nothing is locked: a process that waited long for it may have renamed the build
            is_renamed = getattr(error.__cause__, "errno", None) in _RENAMED_BY_ANOTHER
            if not is_renamed or not (path / format.MANIFEST).exists():
                raise
    files.sync_directory(path.parent)


def old_path(path: Path) -> Path:
    """Return the path of a store that was replaced, until it is removed. Users keep nothing under such a name."""
    return path.with_name(f"{path.name}{format.BUILD_SUFFIX}.old")


def appended_path(path: Path) -> Path:
    """Return the path of the rows of an append that are in the store, until they are removed."""
    return path.with_name(path.name + format.APPENDED_SUFFIX)


def remove_remains(path: Path) -> None:
    """Remove what a replacement leaves: the work directory inside the new store, the old store, appended rows."""
    remains = list(filter(os.path.lexists, (path / WORK_DIRECTORY, old_path(path), appended_path(path))))
    if remains:
        files.sync_directory(path.parent)  # a power loss must not undo the exchange, now or in a try before
    for place in remains:
        files.remove_tree(place)


@contextlib.contextmanager
def claim_recovered(path: Path, *, wait: bool = True) -> Iterator[Path]:
    """Claim the store at ``path``, finish an interrupted commit or replacement of it, and yield the build's directory.

    To finish may move or remove the build's directory with the lock file in it. Then the lock keeps nobody out, so the
    store is claimed again. See ``claim`` for ``wait``.
    """
    while True:
        with claim(path, wait=wait) as root:
            finish_interrupted(path)
            if is_claimed(root):
                yield root
                return


def finish_interrupted(path: Path) -> None:
    """Finish a commit that was interrupted after its manifest was written, or after the exchange.

    Only for the process that has claimed the store. The lock file may be moved with the build.
    """
    root, old = format.build_path(path), old_path(path)
    is_begun = (root / WORK_DIRECTORY / "settings.json").exists()
    if (root / format.MANIFEST).exists():
        files.sync_directory(root)  # the sync of its name may be what failed
    if not path.exists() and old.exists() and (root / format.MANIFEST).exists():
        files.rename(root, path)
        files.sync_directory(path.parent)
    elif (root / format.MANIFEST).exists():
        if not path.exists():
            publish(root, path, overwrite=False)
        elif is_begun:
            publish(root, path, overwrite=True)
        else:
            files.remove_tree(old)
            files.rename(root, old)
            files.sync_directory(path.parent)
    elif not is_begun:  # the remains of a store that was being removed
        clear(root)
    if (path / format.MANIFEST).exists():
        remove_remains(path)


def claim_and_remove_remains(path: Path) -> None:
    """Remove what an interrupted replacement left beside the store, unless another process works on it."""
    root = format.build_path(path)
    remains = (path / WORK_DIRECTORY, old_path(path), appended_path(path), root / format.MANIFEST)
    if any(os.path.exists(place) for place in remains):  # Path.exists raises for a name that is too long
        with contextlib.suppress(MemfeedError), claim_recovered(path, wait=False):
            pass  # a store on a read-only disk can be opened all the same
