"""Write the rows of a store, or of memoized results, into a new store, perhaps in other forms."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memfeed.building.build import Build
from memfeed.building.claim import claim
from memfeed.building.partial import runs
from memfeed.errors import BuildError, StoreError
from memfeed.schema import codec
from memfeed.schema.codec import Int64Array, Packed
from memfeed.schema.fields import Field, Schema
from memfeed.schema.values import bytes_of
from memfeed.store.backing import Backing
from memfeed.store.columns import Column
from memfeed.store.dataset_attributes import Kept
from memfeed.store.format import MANIFEST, WORK_DIRECTORY
from memfeed.store.manifest import Fingerprint
from memfeed.system import files

_AT_ONCE = 8 << 20  # bytes of the rows that a thread holds
_SOURCE = f"{WORK_DIRECTORY}/source"  # the digest of the store that is copied


def copy_rows(
    backing: Backing,
    path: Path,
    schema: Schema | None = None,
    *,
    fingerprint: Fingerprint | None = None,
    kept: Kept | None = None,
    skipped: Sequence[int] = (),
    on_rows: Callable[[int, int], object] = lambda rows, byte_count: None,
) -> None:
    """Write all rows of ``backing`` into a new store at ``path``. A copy that was interrupted goes on.

    Args:
        backing: the rows.
        path: of the new store.
        schema: that of the new store, with the codecs of its fields; None for that of the rows as they are read.
        fingerprint: of the dataset that the rows were made from.
        kept: what the new store keeps beside its columns. Its ``targets`` are those of the rows.
        skipped: the samples of that dataset that have no row.
        on_rows: called with the rows and bytes that were written since the last call.

    Raises:
        BuildError: there is no row, or the unfinished build of another call. StoreError: something is at ``path``.
        SpaceError: the disk is full. SchemaError: a row that a codec cannot hold.
    """
    schema = backing.schema if schema is None else schema
    if not backing.row_count:
        raise BuildError(f"{path}: found no row to keep (the source has none); expected at least one")
    columns = [backing.column(index) for index in range(len(schema))]
    row_bytes = max(1, sum(column.mean_row_bytes for column in columns))
    with claim(path) as root:
        require_nothing_at(path)
        build = _resumed(root, backing, schema)
        if build is None:
            build = Build.begin(root, schema, backing.row_count, fingerprint)
            files.write_file(root / _SOURCE, backing.digest.encode())
        writer = build.writer()
        for rows, packed in _packed_in_order(schema, columns, build.absent(), max(1, _AT_ONCE // row_bytes)):
            byte_count = writer.write_runs(runs(rows), packed)
            on_rows(len(rows), byte_count)
            build.sync_if_due()
        writer.close()
        build.commit(path, kept=kept, skipped=skipped)


def require_nothing_at(path: Path) -> None:
    """Raise StoreError if something is at ``path``."""
    if path.exists():
        raise StoreError(
            f"{path}: found something there; expected a new path: choose another, or remove it (it may be the store of "
            "an earlier call that was killed at its end, or of another process: then open it)"
        )


def _resumed(root: Path, backing: Backing, schema: Schema) -> Build | None:
    """Return the build of a copy of the same rows in the same forms; None if there is none, or if it was sealed.

    Raises BuildError if a build has rows of another call.
    """
    source = root / _SOURCE
    if (root / MANIFEST).exists() or (source.exists() and source.read_text() != backing.digest):
        return None
    build = Build.resume(root)
    if build is not None and not source.exists() and len(build.absent()) < len(build.units.states):
        raise BuildError(
            f"{root}: found an unfinished build; expected none: finish it with the call that began it, choose another "
            "path, or remove that directory"
        )
    return build if build is not None and source.exists() and build.schema == schema else None


def _packed_in_order(
    schema: Schema, columns: Sequence[Column], absent: Int64Array, step: int
) -> Iterator[tuple[Int64Array, list[Packed]]]:
    """Yield rows and their values, packed; threads pack a few parts ahead, because codecs release Python's lock."""

    def pack(rows: Int64Array) -> tuple[Int64Array, list[Packed]]:
        return rows, [_packed(field, column, rows) for field, column in zip(schema, columns, strict=True)]

    count = min(os.cpu_count() or 1, 16)
    with ThreadPoolExecutor(count, thread_name_prefix="memfeed copy") as pool:
        ahead: deque[Future[Any]] = deque()
        for first in range(0, len(absent), step):
            ahead.append(pool.submit(pack, absent[first : first + step]))
            if len(ahead) > 2 * count:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _packed(field: Field, column: Column, rows: Int64Array) -> Packed:
    """Return rows of a column in the stored form of ``field``."""
    if field.coding is not None and column.stored.field.coding == field.coding:
        return _copied(column.stored, rows)
    if field.coding is None:
        return _copied(column, rows)
    return codec.pack(field, [column.read_row(row) for row in rows.tolist()])


def _copied(column: Column, rows: Int64Array) -> Packed:
    """Return the bytes of rows."""
    field = column.field
    if field.kind == "fixed":
        out = torch.empty(len(rows), *field.row_shape, dtype=field.torch_dtype, device="cpu")
        return Packed([bytes_of(column.gather_into(rows, out))], None)
    located = column.locate(rows)
    data = np.empty(located.nbytes, np.uint8)
    column.copy(located.starts, located.lengths.clip(0), data)  # type: ignore[attr-defined]  # every such column can
    return Packed([data], located.dims)
