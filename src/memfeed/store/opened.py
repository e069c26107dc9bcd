"""Open the store, or the directory of tensordict, at a path."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np

from memfeed.schema.names import Names
from memfeed.schema.tree import as_types
from memfeed.store.backing import open_backing
from memfeed.store.store import Store
from memfeed.store.view import View
from memfeed.system.files import local_path
from memfeed.system.messages import warn


def open_store(path: str | os.PathLike[str], *, types: type | Iterable[type] = (), owner: object = None) -> Store:
    """Open a store, see ``memfeed.open``. ``owner`` lives as long as the store and all its views."""
    path = local_path(path)
    backing = open_backing(path, owner)
    if backing.left_out:
        warn(
            f"{path}: left out what is not read ({'; '.join(backing.left_out)[:200]}): a pickle can run code when it "
            "is read; save such values as JSON"
        )
    store = Store(View(backing, as_types(types)))
    if backing.manifest is not None or backing.verify is not None:
        return store
    from memfeed.store.tensordict_dir import filled_rows  # a store of memfeed needs none of this

    if backing.row_count is None:
        return store
    filled = filled_rows(path, [backing.row_count, *_batch_of_a_row(store)])
    if filled is None or filled >= backing.row_count:
        return store
    return store.subset(np.arange(filled))  # a replay buffer that is not full yet


def _batch_of_a_row(store: Store) -> list[int]:
    """Return the batch_size of one row of a TensorDict; [] if no tensor shows it."""
    dims = max(store.schema.structure.batch_dims, 0)
    shown = next((field.shape[:dims] for field in store.schema if field.kind == "fixed"), ())
    return [dim for dim in shown if dim is not None]


def open(path: str | os.PathLike[str], *, select: Names | None = None, types: type | Iterable[type] = ()) -> Store:
    """Open a memfeed store, or any directory written by `TensorDict.memmap()`, in milliseconds for any size.

    The manifest and the size of every file are checked first; nothing is mapped and no class is imported by name.
    ``types`` are the namedtuple, dataclass and tensorclass classes of the samples, one or several, found by their
    names: without them a namedtuple is returned as an equal generated one, a dataclass as a dict, a tensorclass as a
    TensorDict. ``select`` opens only some fields, named as for `Store.select`.

    Raises StoreError if ``path`` is not a store (or one of a newer format), CorruptStoreError if it is damaged,
    FieldError for a field that it does not have.
    """
    store = open_store(path, types=types)
    return store if select is None else store.select(select)
