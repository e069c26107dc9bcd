"""Tensors of other libraries that a store keeps with what they hold beside their numbers.

EdgeIndex and Index of PyTorch Geometric have settings, such as a size and an order; what they compute from their
numbers, and hold to be fast, they compute again. A MetaTensor of MONAI has what is known of its image. A library is
imported only to make one of its tensors again, and only classes whose names stand here.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from enum import Enum
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from memfeed.errors import SchemaError, brief

PARTS = ("numbers", "state")
"""The parts of such a tensor: a plain one, and the rest as JSON."""

_MODULES = {
    "EdgeIndex": "torch_geometric.edge_index",
    "Index": "torch_geometric.index",
    "MetaTensor": "monai.data.meta_tensor",
}
_SETTINGS = {"EdgeIndex": ("sparse_size", "sort_order", "is_undirected"), "Index": ("dim_size", "is_sorted")}
_META = frozenset({"_meta", "_applied_operations", "_pending_operations", "_is_batch", "_spatial_ndim"})


def is_kept(value: Any) -> bool:
    """Return True for a tensor of a class that is kept; not for one of a class derived from it."""
    return is_kept_class(type(value))


def is_kept_class(cls: type) -> bool:
    """Return True for a class of tensors that is kept."""
    return _MODULES.get(cls.__name__, "") == cls.__module__


def open_kept(value: Any) -> tuple[torch.Tensor, str]:
    """Return the parts of a tensor that is kept. Raise SchemaError if it holds something that JSON cannot say."""
    name = type(value).__name__
    if name in _SETTINGS:
        found = {setting: getattr(value, setting) for setting in _SETTINGS[name]}
        # a size is a method; an order is an Enum
        state = {setting: one() if callable(one) else getattr(one, "value", one) for setting, one in found.items()}
    else:
        state = dict(vars(value))
        if not state.keys() <= _META:
            raise SchemaError(
                f"found a {name} with {', '.join(sorted(state.keys() - _META))}, which a store does not know; expected "
                "those of MONAI itself: return x.as_tensor() in the dataset"
            )
    try:
        text = json.dumps(_encoded(state))
    except (TypeError, ValueError, RuntimeError) as error:
        raise SchemaError(
            f"found a {name} that holds {error}; expected tensors, arrays, numbers, text, and lists and dicts of them: "
            "return x.as_tensor() in the dataset, and what you need of the rest as fields of their own"
        ) from None
    return value.as_subclass(torch.Tensor) if name == "MetaTensor" else value.as_tensor(), text


def _encoded(value: Any) -> Any:
    """Return a value as JSON: what JSON does not have is a list that begins with its name. Raise TypeError for others.

    A str or number of an Enum is written as that: it is equal to it.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum) and isinstance(value, str | int):
        return _encoded(value.value)
    if type(value) in (list, tuple):
        return [type(value).__name__, *map(_encoded, value)]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {str(key.value if isinstance(key, Enum) else key): _encoded(one) for key, one in value.items()}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        return ["numpy", value.dtype.str, isinstance(value, np.generic), list(value.shape), value.ravel().tolist()]
    if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_complex():
        numbers = value.detach().cpu()
        kept = numbers.double() if numbers.dtype is torch.bfloat16 else numbers
        return ["torch", str(value.dtype).removeprefix("torch."), list(value.shape), kept.ravel().tolist()]
    raise TypeError(f"a {type(value).__name__}")


def _decoded(value: Any) -> Any:
    """Return the value that `_encoded` has written. Raise ValueError or TypeError for anything else."""
    if isinstance(value, dict):
        return {key: _decoded(one) for key, one in value.items()}
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind in ("list", "tuple"):
        return [list, tuple][kind == "tuple"](map(_decoded, rest))
    if kind == "numpy":
        dtype, is_scalar, shape, numbers = rest
        array = np.array(numbers, np.dtype(dtype)).reshape(shape)
        return array[()] if is_scalar else array
    if kind == "torch":
        name, shape, numbers = rest
        return torch.tensor(numbers, dtype=getattr(torch, name), device="cpu").reshape(shape)
    raise ValueError(f"a list of the kind {kind!r}")


def make_kept(name: str, parts: Sequence[Any]) -> Any:
    """Return a tensor of its parts. Raise SchemaError for parts that its class refuses, and without its library."""
    cls = _class(name)
    try:
        numbers, state = parts
        found = _decoded(json.loads(state))
        if name in _SETTINGS:
            return cls(numbers.contiguous(), **found)
        if not found.keys() <= _META:
            raise ValueError("unknown attributes")
        made = numbers.as_subclass(cls)
        made.__dict__ = found
        return made
    except (ValueError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
        raise SchemaError(
            f"found {brief(parts, 200)} as the parts of a {name}, which refuses them ({error}); expected its numbers "
            "and its state, as memfeed.cache writes them"
        ) from None


def copy_kept(value: Any) -> Any:
    """Return a tensor that shares no memory with ``value``; the tensor itself if a store would refuse it."""
    try:
        numbers, state = open_kept(value)
    except SchemaError:
        return value
    return make_kept(type(value).__name__, [numbers.clone(), state])


def collate_kept(tensors: Sequence[Any]) -> Any:
    """Return the batch that DataLoader makes of them: their class decides what that is."""
    return default_collate(list(tensors))


@cache
def _class(name: str) -> Any:
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except (KeyError, ImportError, AttributeError) as error:
        library = _MODULES.get(name, "").partition(".")[0]
        hint = f"pip install {library}" if library else "a version of memfeed that knows it"
        raise SchemaError(f"found a tensor of the class {name} ({error}); expected its library: {hint}") from None
