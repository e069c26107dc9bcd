"""`memfeed.recode`: write a store in other forms, without its dataset."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from memfeed.building.copy_rows import copy_rows, require_nothing_at
from memfeed.convert.forms import Forms, Shape, codecs_of, coded_schema, losses_of, observed_shapes
from memfeed.errors import CorruptStoreError, StoreError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Schema
from memfeed.store import format
from memfeed.store.columns import Column
from memfeed.store.dataset_attributes import Attributes, Kept, Loss
from memfeed.store.manifest import Manifest
from memfeed.store.opened import open_store
from memfeed.store.store import Store
from memfeed.system.progress import Progress, is_shown

LOOKED_AT = 16  # rows, whose shapes say where the channels of images are


def recode(
    store: Store | str | os.PathLike[str],
    path: str | os.PathLike[str],
    forms: Any,
    *,
    progress: bool | None = None,
) -> Store:
    """Write all rows of a store into a new store whose fields are compressed in other ways, and open it.

    Everything else stays: the order of the rows, classes, targets, metadata, the rest of a cut pipeline, and what
    `memfeed.cache` compares with the dataset. After an interruption the same call goes on.

    Args:
        store: a whole store, or its directory.
        path: the directory of the new store.
        forms: as for `memfeed.cache`, but only codecs and "raw": ``"zstd"``, or ``{"image": "jpeg:95"}``. Fields that
            are not named, or that a codec for all does not suit, stay as they are; "raw" decodes all.
        progress: as for `memfeed.cache`.

    Returns:
        The new store, open.

    Raises:
        ValueError: forms that need the dataset: dtypes, sizes of images. FieldError: no such field. SchemaError: a
        field that its codec cannot hold. StoreError: a view, or a path that is taken. CorruptStoreError: the store is
        damaged. SpaceError: the disk is full.
    """
    is_shown(progress)  # raises for what has no meaning
    given = codecs_of(forms)
    old = store if isinstance(store, Store) else open_store(store)
    manifest = old._view.manifest
    if manifest is None:
        raise StoreError(
            f"{old.path}: found no store of memfeed's own; expected one: make it with memfeed.cache(data, path, "
            "allow='copy')"
        )
    if not old._view.has_all_rows or old.schema != old._backing.schema:
        raise StoreError(f"{old.path}: found a view of a store; expected a whole store: memfeed.recode(path, ...)")
    old._view.require_filled("recode")
    target = format.resolve(path, to_write=True)
    require_nothing_at(target)
    schema = recoded_schema(old, given)
    old.verify(progress=progress)  # the checksums of the new store would vouch for damaged rows
    losses = _losses(old, manifest, schema)
    attributes = msgspec.structs.replace(manifest.attributes or Attributes(), losses=losses)
    targets = None if attributes.targets is None else np.asarray(old._kept_targets, np.int64)
    with Progress(target.name, manifest.rows, unit=" rows", progress=progress) as bar:
        copy_rows(
            old._backing,
            target,
            schema,
            fingerprint=manifest.fingerprint,
            kept=Kept(manifest.metadata or {}, attributes, targets),
            skipped=manifest.skipped,
            on_rows=bar.advance,
        )
    return open_store(target, types=old._view.types)


def recoded_schema(store: Store, forms: Forms) -> Schema:
    """Return the schema of a store with the codecs that are asked for, and the old ones where none is."""
    assert store._view.manifest is not None
    stored = store._view.manifest.schema
    plain = stored.decoded
    asked = coded_schema(plain, forms, shapes_in(store))
    raw = {plain.field_index(name) for name, codec in forms.codecs.items() if codec is None}
    is_all_raw = not forms.has_codecs
    fields = [
        new if is_all_raw or index in raw or new.coding is not None else old
        for index, (new, old) in enumerate(zip(asked, stored, strict=True))
    ]
    return Schema(fields=tuple(fields), structure=asked.structure)


def shapes_in(store: Store) -> list[Shape]:
    """Return what `observed_shapes` does, of some rows of a store; of a damaged column as if it had no rows."""
    rows = _looked_at(store)
    return observed_shapes(store.schema, [_dims_of(column, rows) for column in store._view.columns])


def _dims_of(column: Column, rows: Int64Array) -> Int64Array | None:
    try:
        return column.locate(rows).dims if column.layout == "ragged" else None
    except CorruptStoreError:  # the caller may be about to repair it
        return None


def _looked_at(store: Store) -> Int64Array:
    return np.unique(np.linspace(0, max(len(store) - 1, 0), LOOKED_AT).astype(np.int64))[: len(store)]


def _some_rows(store: Store, field_index: int) -> list[npt.NDArray[Any]]:
    column = store._view.columns[field_index]
    return [np.asarray(value) for row in _looked_at(store).tolist() if (value := column.read_row(row)) is not None]


def _losses(store: Store, manifest: Manifest, schema: Schema) -> tuple[Loss, ...]:
    """Return what lossy codecs changed: now, and before in fields whose bytes are copied or stored without loss."""
    losses = {loss.field: loss for loss in losses_of(schema, lambda index: _some_rows(store, index))}
    for loss in manifest.attributes.losses if manifest.attributes else ():
        if loss.field not in losses or schema.fields[loss.field].coding == manifest.schema.fields[loss.field].coding:
            losses[loss.field] = loss
    return tuple(losses[field] for field in sorted(losses))
