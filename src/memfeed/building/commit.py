"""The last steps of a build: from complete files to a finished store that readers can trust."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash
from tensordict import TensorDict

from memfeed.building.claim import claim, clear
from memfeed.building.rows import element_bytes, heap_path
from memfeed.errors import BuildError, MemfeedError
from memfeed.schema.fields import Field, Schema
from memfeed.store import format
from memfeed.store.format import CHUNK_BYTES, WORK, Fingerprint, Manifest
from memfeed.system import files

_SYNC_THREADS = 4
CLOSING = "closing"


def _row_files(field: Field) -> dict[str, int]:
    """The files of a column that hold one record per row, with the bytes of a record."""
    return {name: size for name, size in format.column_files(field, 1).items() if size}


def close_holes(root: Path, schema: Schema, keep: npt.NDArray[np.bool_]) -> None:
    """Takes skipped rows out of every file that has a record per row, keeping the order.

    One file at a time through a copy and a rename, so a crash leaves each either old or new; which it is shows in its
    size, so that doing it again is safe. From the first of them on rows cannot be written any more, which a file in the
    work directory says.
    """
    files.write_atomically(root / WORK / CLOSING, b"")
    edges = np.flatnonzero(np.diff(np.concatenate([[False], keep, [False]]).astype(np.int8))).reshape(-1, 2)
    for field in schema:
        for name, record in _row_files(field).items():
            path = root / name
            if path.stat().st_size == int(keep.sum()) * record:
                continue
            copy = path.with_suffix(".copy")
            target, done = files.open_write(copy, os.O_CREAT | os.O_TRUNC), 0
            try:
                with open(path, "rb") as source:
                    for first, last in (edges * record).tolist():
                        source.seek(first)
                        while first < last:
                            block = source.read(min(files.COPY_BYTES, last - first))
                            done += files.write_at(target, block, done)
                            first += len(block)
                files.sync(target)
            finally:
                os.close(target)
            files.rename(copy, path)


def finish_files(
    root: Path,
    schema: Schema,
    rows: int,
    fingerprint: Fingerprint | None,
    skipped: Sequence[int],
    hashes: Mapping[str, Sequence[int]],
    has_metadata: bool,
) -> Manifest:
    """Cuts heaps to what is used, syncs and hashes every column, lets tensordict write its metadata.

    ``hashes`` are those of files that were hashed as they were written.
    """
    sizes: dict[str, int] = {}
    for field in schema:
        for name, size in format.column_files(field, rows).items():
            path = root / name
            size = _heap_end(root, field, rows) if size is None else size
            if path.stat().st_size != size:
                files.truncate(path, size)
            sizes[name] = size
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:  # the disk is busy with the columns while they are hashed
        synced = pool.map(lambda name: files.sync_data(root / name), sizes)
        metadata = None if has_metadata else pool.submit(write_metadata, root, schema, rows)
        sums = checksums(root, sizes, hashes)
        schema = _share_lengths(root, schema, rows)
        if metadata is not None:
            metadata.result()
        deque(synced, maxlen=0)  # raises what a sync raised
    files.write_file(root / format.CHECKSUMS, sums)
    manifest = format.manifest_of(
        rows=rows,
        schema=schema,
        files=sizes,
        checksums=format.digest(sums),
        fingerprint=fingerprint,
        skipped=tuple(skipped),
    )
    return format.decode(format.encode(manifest), root)  # never publish what open() would refuse


def _heap_end(root: Path, field: Field, rows: int) -> int:
    if rows == 0 or heap_path(root, field).stat().st_size == 0:
        return 0
    width = max(field.rank, 1)
    starts = np.memmap(root / field.stem / "start.memmap", np.int64, "r", shape=(rows,))
    dims = np.memmap(root / field.stem / "dims.memmap", np.int64, "r", shape=(rows, width))
    end = 0
    for first in range(0, rows, 1 << 20):
        part = dims[first : first + (1 << 20)]
        ends = starts[first : first + (1 << 20)] + np.where(part[:, 0] < 0, 0, part.prod(axis=1))
        end = max(end, int(ends.max()))
    return end * element_bytes(field)


def _share_lengths(root: Path, schema: Schema, rows: int) -> Schema:
    """Notes which jagged fields have equal lengths in every row: their batches share one offsets tensor."""
    leaders: dict[str, int] = {}
    fields = []
    for number, field in enumerate(schema.fields):
        if field.kind == "jagged":
            dims = np.memmap(root / field.stem / "dims.memmap", np.int64, "r", shape=(rows, field.rank))
            hashed = xxhash.xxh3_128()
            for first in range(0, rows, 1 << 20):
                hashed.update(dims[first : first + (1 << 20), 0].tobytes())
            field = msgspec.structs.replace(field, lengths_of=leaders.setdefault(hashed.hexdigest(), number))
        fields.append(field)
    return Schema(fields=tuple(fields), structure=schema.structure)


def write_metadata(root: Path, schema: Schema, rows: int) -> None:
    """Every meta.json, made by tensordict itself so that every version of it reads them.

    tensordict writes them beside columns of its own making: sparse files in a directory that is removed again.
    """
    tree: dict[str, object] = {}
    for field in schema:
        *above, last = field.stem.split("/")
        at = tree
        for part in above:
            at = at.setdefault(part, {})  # type: ignore[assignment]
        if field.kind == "fixed":
            # tensordict cannot load float8: the bytes are kept, the manifest knows the dtype
            dtype = torch.uint8 if field.dtype.startswith("float8") else field.torch_dtype
            at[last] = torch.empty((), dtype=dtype).expand(rows, *field.row_shape)
        else:
            cell = torch.empty((), dtype=torch.int64)
            at[last] = {"start": cell.expand(rows), "dims": cell.expand(rows, max(field.rank, 1))}
    scratch = root / WORK / "meta"
    files.remove_tree(scratch)
    try:
        _as_tensordict(tree, rows).memmap_like(str(scratch))
    except (OSError, RuntimeError) as error:  # torch tells of a full disk in words
        full = errno.ENOSPC if os.strerror(errno.ENOSPC) in str(error) else errno.EIO
        told = error if isinstance(error, OSError) and error.errno else OSError(full, str(error))
        raise files.refused(told, scratch, "writing tensordict's metadata", 4096 * len(schema)) from error
    for path in scratch.rglob("meta.json"):
        target = root / path.relative_to(scratch)
        files.write_file(target, path.read_bytes())
    files.remove_tree(scratch)


def _as_tensordict(tree: dict[str, object], rows: int) -> TensorDict:
    source = {key: _as_tensordict(value, rows) if isinstance(value, dict) else value for key, value in tree.items()}
    return TensorDict(source, batch_size=[rows])


def checksums(root: Path, sizes: Mapping[str, int], known: Mapping[str, Sequence[int]]) -> bytes:
    """The content of checksums.bin: xxh3-64 of every chunk of every file, little endian, in the files' order."""
    chunks = [
        (root / name, first, min(CHUNK_BYTES, size - first))
        for name, size in sizes.items()
        if name not in known
        for first in range(0, size, CHUNK_BYTES)
    ]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        read = pool.map(lambda chunk: format.chunk_hash(*chunk), chunks)
        hashes = [
            known[name] if name in known else list(islice(read, -(-size // CHUNK_BYTES)))
            for name, size in sizes.items()
        ]
    return np.array([one for of_file in hashes for one in of_file], "<u8").tobytes()


def seal(root: Path, manifest: Manifest) -> None:
    """All else on the disk, then the manifest: a directory with a valid manifest is complete."""
    small = [format.CHECKSUMS, *(str(path.relative_to(root)) for path in root.rglob("meta.json"))]
    names = [*manifest.files, *small]
    for name in small:
        files.sync_data(root / name)
    for name in names:
        files.chmod(root / name, 0o444)  # tensordict maps files shared and writable where it can
    for directory in {(root / name).parent for name in names}:
        files.sync_directory(directory)
    files.write_atomically(root / format.MANIFEST, format.encode(manifest))
    files.chmod(root / format.MANIFEST, 0o444)


def publish(root: Path, path: Path, *, overwrite: bool) -> None:
    """Renames a complete build to its store's name; with ``overwrite`` it takes the place of what is there.

    While the directory ``.build`` is inside, the build is the newer of the two: it goes last when a store is replaced,
    so that whoever finds the leftovers of a crash knows which is which.
    """
    old = _old_path(path)
    if overwrite and path.exists():
        files.remove_tree(path / WORK)  # of an earlier replacement, cut short: it would look like the newer one
        files.remove_tree(old)
        files.sync_directory(path)
        if files.exchange(root, path):
            files.rename(root, old)  # removing it can take long: who waits for the build must not find it in its place
        else:
            files.rename(path, old)
            files.sync_directory(path.parent)
            files.rename(root, path)
        files.sync_directory(path.parent)  # a power loss must not bring the old store back once it is being removed
        files.remove_tree(path / WORK)
        files.remove_tree(old)
    else:
        files.remove_tree(root / WORK)
        try:
            files.rename(root, path)
        except BuildError as error:
            taken = isinstance(error.__cause__, FileNotFoundError)  # it took long, and who waited has done it
            if not taken or not (path / format.MANIFEST).exists():
                raise
    files.sync_directory(path.parent)


def _old_path(path: Path) -> Path:
    """Where a store that is replaced waits to be removed: a name that nobody keeps anything of his own under."""
    return path.with_name(path.name + ".build.old")


def finish_interrupted(path: Path) -> None:
    """Finishes a commit that was cut short after its manifest was written, or after the exchange.

    Only for whoever has claimed the build, as ``claim``'s ``first``: the lock may go with what is moved.
    """
    root, old = format.build_path(path), _old_path(path)
    if not path.exists() and old.exists() and (root / format.MANIFEST).exists():
        files.rename(root, path)
        files.sync_directory(path.parent)
    elif (root / format.MANIFEST).exists():
        if not path.exists():
            publish(root, path, overwrite=False)
        elif (root / WORK / "settings.json").exists():
            publish(root, path, overwrite=True)
        else:
            files.remove_tree(old)
            files.rename(root, old)
            files.sync_directory(path.parent)
    elif not (root / WORK / "settings.json").exists():  # of a store that was being removed
        clear(root)
    if (path / format.MANIFEST).exists():
        files.remove_tree(path / WORK)
        files.remove_tree(old)


def sweep(path: Path) -> None:
    """Removes what a replacement that was cut short has left beside the store, unless another process is at work."""
    root = format.build_path(path)
    if (path / WORK).exists() or _old_path(path).exists() or (root / format.MANIFEST).exists():
        with contextlib.suppress(MemfeedError), claim(path, first=finish_interrupted, wait=False):
            pass  # a store on a disk that only reads is as good
