"""The source of a loader as one store: a store, a view of one, columns in memory, or several stores of one schema."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from memfeed.errors import LoaderError
from memfeed.loading.settings import present_ranks
from memfeed.schema.codec import Int64Array
from memfeed.schema.tensordicts import is_tensordict
from memfeed.store.backing import Backing
from memfeed.store.columns import (
    Column,
    ComputedColumn,
    ConcatFixedColumn,
    ConcatRaggedColumn,
    JsonColumn,
    RaggedColumn,
)
from memfeed.store.columns import FixedColumn as Fixed
from memfeed.store.format import resolve
from memfeed.store.separate_rows import SeparateRowsColumn
from memfeed.store.store import Store
from memfeed.store.windows import join_windows, offsets_of
from memfeed.system.messages import say_once

if TYPE_CHECKING:
    from memfeed.transforms import Transform

CACHING = ("num_workers", "worker_init_fn", "persistent_workers", "prefetch_factor", "multiprocessing_context")
"""DataLoader's arguments that mean something, or nothing worth a line, where a loader fills a store."""


def is_dataset(source: Any) -> bool:
    """Return True for a map-style dataset that is no store, and no columns that a loader reads in place."""
    if isinstance(source, Store | IterableDataset | dict | str | bytes | os.PathLike):
        return False
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        return False
    parts = source.datasets if isinstance(source, ConcatDataset) else source if type(source) in (list, tuple) else ()
    if isinstance(source, Subset) and not is_dataset(source.dataset):
        return False
    if parts and all(isinstance(one, Store | Subset) and not is_dataset(one) for one in parts):
        return False
    if is_tensordict(source):
        return False
    from memfeed.store import in_memory  # it imports all that tables need

    return in_memory.as_columns(source) is None


def filled_store(
    dataset: Any,
    path: str | os.PathLike[str] | None,
    worker_count: int,
    worker_init_fn: Callable[[int], None] | None,
    multiprocessing_context: Any = None,
) -> Store:
    """Return a store of a dataset that is filled while it is read; see `memfeed.cache`.

    Its processes start as all of `torch.multiprocessing` do. Another ``multiprocessing_context`` gets a message.
    """
    from memfeed.convert.cache import cache  # loaders of stores need no conversion

    if path is None and present_ranks()[1] > 1:
        say_once(
            "memfeed: each rank fills a temporary store of its own with all rows; with Loader(..., cache='PATH') the "
            "ranks of a machine fill one together"
        )
    store = cache(dataset, path, split="auto", lazily=True, workers=worker_count, worker_init_fn=worker_init_fn)
    if multiprocessing_context is not None and worker_count and store.supply is not None:
        method = getattr(multiprocessing_context, "get_start_method", lambda: multiprocessing_context)()
        used = torch.multiprocessing.get_start_method()
        if method != used:
            say_once(
                f"memfeed: multiprocessing_context={method!r} has no effect: the processes that fill the store start "
                f"with {used!r}; to change that, call torch.multiprocessing.set_start_method({method!r}) first"
            )
    return store


def check_cache(source: Any, path: str | os.PathLike[str]) -> None:
    """Raise LoaderError for ``cache=`` beside what needs no store, unless it is the path of the store itself."""
    if not isinstance(source, Store) or source.path != resolve(path):  # a trainer makes a loader of another one's parts
        as_stores(source)  # raises for what no loader reads, an iterable for example
        raise LoaderError(
            f"found cache={str(path)!r} and {type(source).__name__}, which is read as it is; expected a map-style "
            "dataset beside it: leave cache= out"
        )


def as_stores(source: Any) -> list[Store]:
    """Return the stores that make up a loader's source. Raises LoaderError for anything else."""
    if isinstance(source, JoinedStore):
        return source.parts
    if isinstance(source, ConcatDataset):
        source = source.datasets
    if isinstance(source, list | tuple) and source and all(isinstance(one, Store | Subset) for one in source):
        return [store for one in source for store in as_stores(one)]
    return [_as_store(source)]


class JoinedStore(Store):
    """Several stores as one, their rows in turn. It pickles as its parts."""

    parts: list[Store]

    @property
    def transform(self) -> Transform | None:
        """That of the stores. LoaderError if they have different ones."""
        found = [part.transform for part in self.parts]
        if any(repr(one) != repr(found[0]) for one in found):
            raise LoaderError(
                "found stores with different transforms of their own (cache(split=True)); expected one for a loader: "
                "pass transform=, for example transform=stores[0].transform, or {} for none"
            )
        return found[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return join, (self.parts,)


def _as_store(source: Any) -> Store:
    if isinstance(source, Store):
        return source
    if isinstance(source, Subset):
        return _as_store(source.dataset).subset(list(source.indices))
    if is_tensordict(source) and source.batch_dims:
        from memfeed.store import tensordict_memory  # it imports tensordict

        contents, types = tensordict_memory.read(source)
        backing = Backing(None, contents.schema, contents.row_count, "", contents.columns.__getitem__)
        return Store(backing, types=types)
    from memfeed.store import in_memory  # it imports all that tables need

    columns = in_memory.as_columns(source)
    if columns is None:
        raise LoaderError(
            f"found {type(source).__name__}; expected a Store, a Subset of one, a list of stores, or columns in memory "
            "(a tensor, a tuple or dict of tensors, TensorDataset, TensorDict): make a store with "
            "memfeed.cache(dataset, path) first"
        )
    schema, held = columns.in_memory()
    return Store(Backing(None, schema, len(columns), "", held.__getitem__), types=columns.types)


def join(stores: Sequence[Store]) -> Store:
    """Return one store of the rows of all stores, those of ``stores[0]`` first, for a loader to read. Copies nothing.

    Raises LoaderError for stores whose schemas differ, and says in which field.
    """
    if len(stores) == 1:
        return stores[0]
    first = stores[0]
    for store in stores[1:]:
        _check_same(first, store)
    begins = [0, *accumulate(store.base_length for store in stores)]
    # views of whole stores need no list of rows
    rows: Int64Array | None = None
    if not all(store.has_all_rows for store in stores):
        rows = np.concatenate(
            [begin + store.base_rows(np.arange(len(store))) for begin, store in zip(begins, stores, strict=False)]
        )
    parts = list(zip(*(store.columns for store in stores), strict=True))
    digest = "+".join(store.digest for store in stores)
    backing = Backing(None, first.schema, begins[-1], digest, _maker(parts), owner=list(stores))
    joined = JoinedStore(backing, types=first.types, rows=rows)
    joined.parts = list(stores)
    return joined


def _maker(parts: Sequence[tuple[Column, ...]]) -> Callable[[int], Column]:
    def make(field_index: int) -> Column:
        columns = parts[field_index]
        field = columns[0].field
        made = join_windows(columns)
        if made is not None:
            return made
        fixed = [column for column in columns if isinstance(column, Fixed | ComputedColumn)]
        values = [column for column in columns if isinstance(column, JsonColumn)]
        ragged = [column for column in columns if isinstance(column, RaggedColumn | SeparateRowsColumn)]
        if len(fixed) == len(columns):
            return ConcatFixedColumn(field, fixed)
        if len(values) == len(columns):
            return JsonColumn(field, [value for column in values for value in column.values])
        if len(ragged) < len(columns):
            raise LoaderError(
                f"found field {field.name} kept in different ways ({', '.join(type(c).__name__ for c in columns)}); "
                "expected stores saved in one way: memfeed.cache(..., copy_existing=True) makes one of each"
            )
        return ConcatRaggedColumn(field, ragged)

    return make


def _check_same(one: Store, other: Store) -> None:
    def parts(store: Store) -> dict[str, Any]:
        kept = (msgspec.structs.replace(field, stem="", lengths_of=None) for field in store.schema)
        return {field.name: field for field in kept}

    mine, theirs = parts(one), parts(other)
    for name in [*mine, *theirs]:
        if mine.get(name) != theirs.get(name):
            found = theirs[name].describe() if name in theirs else "missing"
            expected = mine[name].describe() if name in mine else "no such field"
            raise LoaderError(
                f"found field {name} {found} in {other.path} where {one.path} has {expected}; expected stores of one "
                "schema: select() the fields they share"
            )
    if one.schema.structure != other.schema.structure:
        raise LoaderError(
            f"found samples of {other.path} nested in another way than those of {one.path}; expected one schema"
        )
    for mine_at, theirs_at in zip(one.columns, other.columns, strict=True):
        if offsets_of(mine_at) != offsets_of(theirs_at):
            raise LoaderError(
                f"found windows of {mine_at.field.name} at other offsets in {other.path} than in {one.path}; expected "
                "the same: call windows(...) of each store with the same offsets"
            )
