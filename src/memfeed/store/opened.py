"""Open the store, or the directory of tensordict, at a path."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from memfeed.errors import CorruptStoreError, StoreError
from memfeed.schema.names import Names
from memfeed.schema.tree import as_types
from memfeed.store.backing import open_backing
from memfeed.store.store import Store
from memfeed.store.view import View
from memfeed.system.files import local_path
from memfeed.system.messages import warn

STORAGE_METADATA = "storage_metadata.json"  # of TorchRL
WRITER_METADATA = "writer/metadata.json"  # of TorchRL, beside the directory of the storage


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
    if backing.manifest is not None or backing.verify is not None or backing.row_count is None:
        return store
    # the batch_size of one row of a TensorDict, if a tensor shows it
    dims = max(store.schema.structure.batch_dims, 0)
    shown = next((field.shape[:dims] for field in store.schema if field.kind == "fixed"), ())
    filled = _filled_rows(path, [backing.row_count, *(dim for dim in shown if dim is not None)])
    if filled is None or filled >= backing.row_count:
        return store
    return store.subset(np.arange(filled))  # a replay buffer that is not full yet


def _filled_rows(root: Path, batch: Sequence[int]) -> int | None:
    """Return how many rows of a replay buffer that TorchRL dumped are filled; None if TorchRL did not write it.

    ``batch`` is the batch_size of the storage. Raises CorruptStoreError for metadata that cannot be read, StoreError if
    it can mean several numbers of rows.
    """
    path = root / STORAGE_METADATA
    if not os.path.lexists(path):
        return None
    found = _json_ints(path, "len")
    if isinstance(found, str) or (found and found[0] < 0):
        raise CorruptStoreError(
            f"{path}: found {str(found)[:200]}; expected how many rows of the storage are filled: dump the replay "
            "buffer again"
        )
    if not found or len(batch) == 1:
        return found[0] if found else None
    steps = found[0]  # of all dims that the buffer's ndim counts, which TorchRL does not write
    sizes = [math.prod(batch[1:ndim]) for ndim in range(1, len(batch) + 1)]
    choices = {steps // size for size in sizes if size and steps % size == 0 and steps // size <= batch[0]}
    if len(choices) == 1:
        return choices.pop()
    writer = root.parent / WRITER_METADATA
    written = _json_ints(writer, "write_count", "cursor") if os.path.lexists(writer) else []
    if len(written) == 2 and not isinstance(written, str):
        rows = min(written[0], batch[0])
        if rows in choices and (rows == batch[0] or rows == written[1]):
            return rows
    raise StoreError(
        f"{path}: found len {steps} for a storage of {list(batch)}, which can mean "
        f"{' or '.join(map(str, sorted(choices))) or 'no number of'} filled rows; expected the buffer's writer in "
        f"{writer} too: open the storage where rb.dumps(path) wrote it, or write the filled rows with "
        "memfeed.cache(rb.storage[:], path)"
    )


def _json_ints(path: Path, *keys: str) -> list[int] | str:
    """Return the values of those keys that a JSON file has; what was found instead, as text, if they are no ints."""
    from memfeed.store.tensordict_dir import DirectoryReader  # a store of memfeed needs none of this

    try:
        found = json.loads(DirectoryReader(path.parent).read(path))
        values = [found.get(key) for key in keys if found.get(key) is not None]
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        return str(error)
    return values if all(type(value) is int for value in values) else str(values)


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
