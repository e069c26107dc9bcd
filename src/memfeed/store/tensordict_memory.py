"""Open a TensorDict or tensorclass in memory as the fields and columns of a store; its memory is shared, not copied.

The batches are those of the directory that its `memmap()` would write.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    PersistentTensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
)

from memfeed.errors import StoreError
from memfeed.schema import values
from memfeed.schema.fields import Path as FieldPath
from memfeed.schema.fields import display, dtype_name
from memfeed.schema.tree import add_type, is_unbatched, typed_name
from memfeed.store.tensordict_entries import (
    Contents,
    Entry,
    Group,
    Nested,
    PerRow,
    Shared,
    Tensor,
    Unbatched,
    contents_of,
    merge,
)


def read(data: Any) -> tuple[Contents, tuple[type, ...]]:
    """Return the contents of a TensorDict or tensorclass that has a batch_size, and its record classes.

    Raises StoreError for a lazy stack along another dim than the first, for pieces of a stack that differ, and for a
    TensorDict whose tensors are in an h5 or zarr file.
    """
    types: dict[str, type] = {}
    top = _entry(data, (), types)
    assert isinstance(top, Group)
    return contents_of(top), tuple(types.values())


def _entry(value: Any, path: FieldPath, types: dict[str, type]) -> Entry:
    if is_unbatched(value):
        return Unbatched(value)
    if isinstance(value, NonTensorStack):
        return PerRow(value.tolist())
    if is_non_tensor(value):  # MetaData too
        return Shared(value.data)
    if isinstance(value, LazyStackedTensorDict):
        return _stack(value, path, types)
    if is_tensorclass(value):
        return _tensorclass(value, path, types)
    if isinstance(value, TensorDictBase):
        return _tensordict(value, path, types)
    if isinstance(value, torch.Tensor):
        values.check_class(value, f"field {display(path)}: ")
        if value.is_nested:
            return _nested(value.detach())
        tensor = values.as_tensor(value)
        assert tensor is not None
        return Tensor(tensor, dtype_name(tensor.dtype), tuple(tensor.shape))
    return Shared(value)


def _tensordict(value: TensorDictBase, path: FieldPath, types: dict[str, type]) -> Group:
    if isinstance(value, PersistentTensorDict):
        raise StoreError(
            f"found a TensorDict whose tensors are in an h5 or zarr file, at {display(path)}; expected memory: "
            "write a store with memfeed.cache(td, path), or read all with td.to_tensordict()"
        )
    name = typed_name(type(value))
    if name:
        add_type(types, type(value))
    children = {key: _entry(value.get(key), (*path, key), types) for key in value.keys()}  # noqa: SIM118
    return Group("tensordict", name, tuple(value.batch_size), children, tuple(value.names))


def _tensorclass(value: Any, path: FieldPath, types: dict[str, type]) -> Group:
    cls = type(value)
    add_type(types, cls)
    # the attributes of a tensorclass unwrap values, so that a value of all rows and one per row look alike
    inner = _entry(value._tensordict, path, types)
    assert isinstance(inner, Group)
    others: dict[str, Entry] = {key: Shared(other) for key, other in value._non_tensordict.items() if other is not None}
    return inner._replace(kind="tensorclass", name=cls.__name__, children=inner.children | others)


def _stack(value: LazyStackedTensorDict, path: FieldPath, types: dict[str, type]) -> Entry:
    if value.stack_dim != 0:
        raise StoreError(
            f"found a lazy stack along dim {value.stack_dim}, at {display(path)}; expected dim 0, one piece per row: "
            "call .contiguous() (or .densify() where shapes differ) on it"
        )
    merged = merge([_entry(piece, path, types) for piece in value.tensordicts], display(path))
    return merged._replace(dim_names=tuple(value.names)) if isinstance(merged, Group) else merged


def _nested(value: torch.Tensor) -> Nested:
    """Return a nested tensor as flat values, which share its memory where its rows lie one after another."""
    rows = value.unbind(0)
    rank = value.dim() - 1
    dims = np.array([tuple(row.shape) for row in rows], np.int64).reshape(len(rows), rank)
    flat = torch.empty(0, dtype=value.dtype, device="cpu")
    if value.is_contiguous():
        flat = value.values().detach().cpu().reshape(-1)
    if flat.numel() != int(dims.prod(axis=1).sum()):  # a view of some of the rows
        flat = torch.cat([row.reshape(-1) for row in rows]).cpu() if rows else flat
    return Nested(flat, dtype_name(value.dtype), dims)
