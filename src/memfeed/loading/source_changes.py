"""Data that a loader reads in place, compared with the state when it was made: indices, and tensors by memory.

Values in this memory are not compared: they may change, and are read as they are then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from memfeed.errors import StaleStoreError, listed
from memfeed.schema.names import Path, display
from memfeed.schema.tensordicts import is_a, is_tensorclass
from memfeed.store.backing import Backing
from memfeed.store.store import Store, with_parts


def watched(store: Store, source: Any) -> Store:
    """Return ``store``, which is made of ``source``, such that its ``check_dataset`` compares the source too."""
    change, before = _watch(source), store._backing.check_dataset

    def check_dataset(backing: Backing) -> None:
        before(backing)
        if found := change():
            raise StaleStoreError(
                f"{store.path}: found that the {type(source).__name__} has changed since its loader was made: {found}; "
                "expected no change, because the loader reads what was there then: make a new Loader of it"
            )

    return with_parts(store, check_dataset=check_dataset)


def _watch(source: Any) -> Callable[[], str]:
    """Return a function that says what has changed in ``source`` since; "" for nothing."""
    return _watch_indices(source) if isinstance(source, Subset) else _watch_columns(source)


def _watch_indices(subset: Subset[Any]) -> Callable[[], str]:
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
    held = dict(_parts(source))  # alive, so that nothing else gets their memory
    before = {path: _memory(part) for path, part in held.items()}

    def change() -> str:
        now = {path: _memory(part) for path, part in _parts(source)}
        if now == before:
            return ""
        changes = [f"{display(path)} is new" for path in now if path not in before]
        changes += [f"{display(path)} was removed" for path in held if path not in now]
        changes += [f"{display(path)} was replaced" for path in held if path in now and now[path] != before[path]]
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


def _memory(part: Any) -> Any:
    """Return a key that is equal for the same memory with the same dtype, shape and strides."""
    if isinstance(part, torch.Tensor) and part.layout == torch.strided and not part.is_nested:
        return part.data_ptr(), part.shape, part.stride(), part.dtype
    if isinstance(part, np.ndarray):
        return part.__array_interface__["data"], part.shape, part.strides, part.dtype
    if is_a(part, "tensordict", "LazyStackedTensorDict"):
        return [id(piece) for piece in part.tensordicts]
    value = part.data if is_a(part, "tensordict", "NonTensorData") else part
    return value if isinstance(value, str | bytes | int | float | None) else id(value)
