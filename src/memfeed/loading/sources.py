"""The sources that a loader reads as one store: stores, views, columns in memory, and several stores of one schema.

Of several stores the rows come in turn, or mixed by weight. Indices, and tensors by memory, are compared with their
state when the loader was made. Values in this memory are not compared: they may change, and are read as they are then.
Of the memory of another device a copy is read, so a change there is an error.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from memfeed.errors import NO_LENGTH, LoaderError, SchemaError, StaleStoreError, listed
from memfeed.order.choice import check_weights
from memfeed.schema.codec import Int64Array
from memfeed.schema.compare import common_schema
from memfeed.schema.containers import device_of, reads_as
from memfeed.schema.fields import Schema
from memfeed.schema.names import Path, display
from memfeed.schema.tensordicts import is_a, is_tensorclass, is_tensordict
from memfeed.store.backing import Backing, PartTransforms
from memfeed.store.columns import Column
from memfeed.store.store import Store, with_parts
from memfeed.store.view import View
from memfeed.system.messages import say_once
from memfeed.system.torch_loader import DataLoader


def is_dataset(source: Any) -> bool:
    """Return True for a map-style dataset that is no store, and no columns that a loader reads in place."""
    if isinstance(source, Store | IterableDataset | dict | str | bytes | os.PathLike | type):
        return False
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        return False
    if isinstance(source, Subset | ConcatDataset) and not (reads_as(source, Subset) or reads_as(source, ConcatDataset)):
        return True
    parts = source.datasets if isinstance(source, ConcatDataset) else source if type(source) in (list, tuple) else ()
    if isinstance(source, Subset) and not is_dataset(source.dataset):
        return False
    if parts and all(_is_store(one) or _is_weighted(one) for one in parts):
        return False
    if is_tensordict(source):
        return False
    from memfeed.store import in_memory  # it imports all that tables need

    return in_memory.as_columns(source) is None


def _is_store(source: Any) -> bool:
    return isinstance(source, Store | Subset | ConcatDataset) and not is_dataset(source)


def _is_weighted(source: Any) -> bool:
    """Return True for a pair (store, weight)."""
    is_pair = type(source) is tuple and len(source) == 2
    return is_pair and isinstance(source[1], int | float) and _is_store(source[0])


def joined(source: Any) -> Store:
    """Return a loader's source as one store; of a list of pairs it has the weights. LoaderError for anything else."""
    if type(source) is list and source and all(map(_is_weighted, source)):
        return join([_as_store(one) for one, _ in source], [float(weight) for _, weight in source])
    return source if isinstance(source, JoinedStore) else join(as_stores(source))


def as_stores(source: Any) -> list[Store]:
    """Return the stores that make up a loader's source. Raises LoaderError for anything else."""
    if isinstance(source, JoinedStore):
        return source.parts
    if isinstance(source, ConcatDataset):
        source = source.datasets
    if isinstance(source, list | tuple) and source:
        if all(isinstance(one, Store | Subset | ConcatDataset) for one in source):
            return [store for one in source for store in as_stores(one)]
        if any(map(_is_weighted, source)):
            raise LoaderError(
                "found a store with a weight beside one without; expected pairs for all: "
                "[(store, 0.7), (other_store, 0.3)]"
            )
    return [_as_store(source)]


def _as_store(source: Any) -> Store:
    if isinstance(source, Store):
        return source
    if isinstance(source, ConcatDataset) and not is_dataset(source):
        return joined(source)
    if isinstance(source, Subset):
        return watched(_as_store(source.dataset).subset(list(source.indices)), source)
    if is_tensordict(source) and source.batch_dims:
        from memfeed.store import tensordict_memory  # it imports tensordict

        contents, types = tensordict_memory.read(source)
        backing = Backing(None, contents.schema, contents.row_count, "", contents.columns.__getitem__)
        return watched(Store(View(backing, types)), source)
    from memfeed.store import in_memory  # it imports all that tables need

    columns = in_memory.as_columns(source)
    if isinstance(source, IterableDataset):
        raise LoaderError(
            f"found {type(source).__name__}, an IterableDataset, without cache=; expected Loader(dataset, ..., "
            "cache='PATH'): its samples are written to a store there first; if they are random, it is read as it is "
            "and decoded files are kept there. Without cache= a DataLoader reads it, which has no shuffle=True, no "
            "weights and no require="
        )
    if columns is None and (line := _line_instead(source)):
        raise LoaderError(line)
    if columns is None and hasattr(source, "__getitem__") and not hasattr(source, "__len__"):
        raise LoaderError(f"found {type(source).__name__}, which has [] and {NO_LENGTH}")
    if columns is None:
        raise LoaderError(
            f"found {type(source).__name__}; expected a dataset with len and [], a Store, a Subset of one, a list of "
            "stores, or columns in memory (a tensor, a tuple or dict of tensors, TensorDataset, TensorDict)"
        )
    schema, held = columns.in_memory()
    return watched(Store(View(Backing(None, schema, len(columns), "", held.__getitem__), columns.types)), source)


def _line_instead(source: Any) -> str | None:
    """Return what to write in place of a source that is none, where that is clear."""
    if isinstance(source, type):
        return f"found the class {source.__name__} itself; expected an object of it: Loader({source.__name__}(...))"
    if isinstance(source, str | os.PathLike):
        return f"found {str(source)!r:.150}, a path; expected a store: Loader(memfeed.open({str(source)!r:.150}))"
    if isinstance(source, DataLoader):
        return f"found a {type(source).__name__}; expected its dataset: Loader(loader.dataset, loader.batch_size)"
    if isinstance(source, Iterable) and not hasattr(source, "__getitem__"):  # a generator, a map, a set
        lacks = "no []" if hasattr(source, "__len__") else "no len and no []"
        return (
            f"found {type(source).__name__}, which has {lacks}; expected a dataset with both: Loader(list(...)), or a "
            "class with __len__ and __getitem__"
        )
    return None


class JoinedStore(Store):
    """Several stores as one, their rows in turn. It pickles as its parts.

    Attributes:
        parts: the stores.
        weights: the share of the rows of an epoch that comes from each; None for each row once.
    """

    parts: list[Store]
    weights: list[float] | None

    def __reduce__(self) -> tuple[Any, ...]:
        return join, (self.parts, self.weights)


def has_own_transform(store: Store) -> bool:
    """Return True if `Store.transform` is one, or an error that says where to get it."""
    return store._backing.transform is not None or bool(store._view.recipe)


def join(stores: Sequence[Store], weights: list[float] | None = None) -> Store:
    """Return one store of the rows of all stores, those of ``stores[0]`` first, for a loader to read. Copies nothing.

    Raises LoaderError for stores whose schemas differ, and says in which field; and for weights that do not sum to 1.
    """
    if weights is not None:
        check_weights(weights)
    if len(stores) == 1:
        return stores[0]
    first = stores[0]
    try:
        schema = common_schema([(store.path, store.schema) for store in stores])
    except SchemaError as error:
        raise LoaderError(f"{error}. A loader reads stores of one schema: select() the fields they share") from None
    for store in stores[1:]:
        _require_equal_windows(first, store)
        mine, theirs = (getattr(one, "classes", None) for one in (first, store))
        if None not in (mine, theirs) and mine != theirs:
            say_once(
                f"memfeed: {store.path} has other classes, or in another order, than {first.path}: one label may "
                "mean two of them; make all stores with the same list of classes"
            )
    views = [store._view for store in stores]
    backing = _joined_backing(schema, views)
    if any(map(has_own_transform, stores)):
        backing.transform = PartTransforms(stores)
    # views of whole stores need no list of rows
    rows: Int64Array | None = None
    if not all(view.has_all_rows for view in views):
        begins = np.cumsum([0, *(view.base_length for view in views)])
        rows = np.concatenate([begin + view.all_rows() for begin, view in zip(begins, views, strict=False)])
    whole = JoinedStore(View(backing, views[0].types, rows=rows))
    whole.parts, whole.weights = list(stores), weights
    return whole


def _joined_backing(schema: Schema, views: Sequence[View]) -> Backing:
    def check_dataset(_: Backing) -> None:
        for view in views:
            view.check_dataset()

    parts: list[tuple[Column, ...]] = list(zip(*(view.columns for view in views), strict=True))

    def make(field_index: int) -> Column:
        field, columns = schema.fields[field_index], parts[field_index]
        if len({column.layout for column in columns}) > 1:
            raise LoaderError(
                f"found field {field.name} kept in different ways ({', '.join(type(c).__name__ for c in columns)}); "
                "expected stores saved in one way: memfeed.cache(..., allow='copy') makes one of each"
            )
        return columns[0].joined(field, columns)

    digest = hashlib.blake2b("+".join(view.source_digest() for view in views).encode(), digest_size=8).hexdigest()
    return Backing(
        None, schema, sum(view.base_length for view in views), digest, make, owner=list(views),
        remake=(_joined_backing, (schema, views)), check_dataset=check_dataset,
    )  # fmt: skip


def _require_equal_windows(one: Store, other: Store) -> None:
    for mine, theirs in zip(one._view.columns, other._view.columns, strict=True):
        found = [None if column.offsets is None else column.offsets.tolist() for column in (mine, theirs)]
        if found[0] != found[1]:
            raise LoaderError(
                f"found windows of {mine.field.name} at other offsets in {other.path} than in {one.path}; expected "
                "the same: call windows(...) of each store with the same offsets"
            )


def watched(store: Store, source: Any) -> Store:
    """Return ``store``, which is made of ``source``, such that its ``check_dataset`` compares the source too."""
    change = _watch_indices(source) if isinstance(source, Subset) else _watch_columns(source)
    before = store._backing.check_dataset

    def check_dataset(backing: Backing) -> None:
        before(backing)
        if found := change():
            raise StaleStoreError(
                f"{store.path}: found that the {type(source).__name__} has changed since its loader was made: {found}; "
                "expected no change, because the loader reads what was there then: make a new Loader of it"
            )

    return with_parts(store, check_dataset=check_dataset)


def _watch_indices(subset: Subset[Any]) -> Callable[[], str]:
    """Return a function that says what has changed in ``subset`` since; "" for nothing."""
    dataset, indices = subset.dataset, subset.indices
    kept = _copied(indices)

    def change() -> str:
        now = subset.indices
        if subset.dataset is not dataset:
            return "its dataset was replaced"
        if now is indices and isinstance(now, range | tuple):  # these never change
            return ""
        if len(now) != len(kept):
            return f"it has {len(now):,} indices, and had {len(kept):,}"
        return "" if _equal(now, kept) else "its indices have other values"

    return change


def _copied(indices: Any) -> Any:
    # a list is compared faster than an array of it is made: most of its entries are the same objects
    return _array(indices).copy() if isinstance(indices, np.ndarray | torch.Tensor) else list(indices)


def _equal(indices: Any, kept: Any) -> bool:
    if isinstance(kept, np.ndarray) or isinstance(indices, np.ndarray | torch.Tensor):
        return np.array_equal(_array(indices), kept)
    return bool((indices if isinstance(indices, list) else list(indices)) == kept)


def _array(indices: Any) -> Any:
    return indices.cpu().numpy() if isinstance(indices, torch.Tensor) else np.asarray(indices)


def _watch_columns(source: Any) -> Callable[[], str]:
    """Return a function that says which columns have changed since; "" for none."""
    held = dict(_parts(source))  # alive, so that nothing else gets their memory
    before = {path: _memory(part) for path, part in held.items()}

    def change() -> str:
        now = {path: _memory(part) for path, part in _parts(source)}
        if now == before:
            return ""
        changes = [f"{display(path)} is new" for path in now if path not in before]
        changes += [f"{display(path)} was removed" for path in held if path not in now]
        changes += [
            f"{display(path)} was replaced or changed" for path in held if path in now and now[path] != before[path]
        ]
        return listed(changes)

    return change


def _parts(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the tensors, arrays and other values in nested columns, with their paths."""
    if isinstance(value, TensorDataset):
        value = value.tensors
    if is_tensorclass(type(value)) and not is_a(value, "tensordict", "NonTensorData"):
        yield from _parts(value._non_tensordict, path)
        value = value._tensordict
    if isinstance(value, tuple):
        items: Iterable[tuple[Any, Any]] = enumerate(value)
    elif is_a(value, "tensordict", "TensorDict", "TensorDictParams"):
        items = ((key, value.get(key)) for key in value.keys())  # noqa: SIM118
    elif isinstance(value, Mapping) and not is_a(value, "tensordict", "TensorDictBase"):
        items = value.items()
    else:
        yield path, value
        return
    for key, part in items:
        yield from _parts(part, (*path, key))


def device_of_columns(source: Any) -> torch.device | None:
    """Return the device of the tensors of columns that are read in place; None for the CPU, and for stores.

    Raises SchemaError for several devices.
    """
    if is_tensordict(source):
        return source.device  # type: ignore[no-any-return]
    return device_of([part for _, part in _parts(source) if isinstance(part, torch.Tensor)])


def _memory(part: Any) -> Any:
    """Return a key that is equal for the same memory with the same dtype, shape and strides.

    A loader reads a copy of a tensor on another device, so the key has its version too, which changes with its values.
    """
    if isinstance(part, torch.Tensor) and part.layout == torch.strided and not part.is_nested:
        version = None if part.device.type == "cpu" or part.is_inference() else part._version
        return part.data_ptr(), part.shape, part.stride(), part.dtype, version
    if isinstance(part, np.ndarray):
        return part.__array_interface__["data"], part.shape, part.strides, part.dtype
    if is_a(part, "tensordict", "LazyStackedTensorDict"):
        return [id(piece) for piece in part.tensordicts]
    value = part.data if is_a(part, "tensordict", "NonTensorData") else part
    return value if isinstance(value, str | bytes | int | float | None) else id(value)
