"""Tensors that a store keeps with what they hold beside their numbers: sparse ones, and some of other libraries.

A sparse tensor has indices and a size beside its values; the matrices of graphs are such (``adj_t``).
EdgeIndex and Index of PyTorch Geometric have settings, such as a size and an order; what they compute from their
numbers, and hold to be fast, they compute again. A MetaTensor of MONAI has what is known of its image. A library is
imported only to make one of its tensors again, and only classes whose names stand here.

torchvision's tv_tensors are kept in the same way.
"""

from __future__ import annotations

import inspect
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch

from memfeed.errors import SchemaError, brief, listed

_INDICES: dict[str, tuple[str, ...]] = {
    "sparse_coo": ("indices",),
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}
"""The layouts of sparse tensors, each with the names of its indices, which are those of torch's methods."""

_MODULES = {
    "EdgeIndex": "torch_geometric.edge_index",
    "Index": "torch_geometric.index",
    "MetaTensor": "monai.data.meta_tensor",
}
_SETTINGS = {"EdgeIndex": ("sparse_size", "sort_order", "is_undirected"), "Index": ("dim_size", "is_sorted")}
_META = frozenset({"_meta", "_applied_operations", "_pending_operations", "_is_batch", "_spatial_ndim"})


def kept_name(value: Any) -> str:
    """Return the layout of a sparse tensor, or the class of another one that is kept; an empty string for others.

    A class that is derived from such a class is not kept.
    """
    cls = type(value)
    if cls is torch.Tensor:
        layout = "" if value.layout is torch.strided else str(value.layout).removeprefix("torch.")
        return layout if layout in _INDICES and not value.is_quantized and not value.is_meta else ""
    name: str = cls.__name__
    return name if _MODULES.get(name) == cls.__module__ else ""


def part_names(name: str) -> tuple[str, ...]:
    """Return the names of the parts of a tensor with this `kept_name`. The last one is ``state``, which is JSON."""
    return (*_INDICES[name], "values", "state") if name in _INDICES else ("numbers", "state")


def open_kept(value: Any) -> tuple[Any, ...]:
    """Return the parts of a tensor that is kept: plain tensors that share its memory, and its state.

    Raise SchemaError if it holds something that JSON cannot say.
    """
    name = kept_name(value)
    if name in _INDICES:
        return _open_sparse(name, value.detach())
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
        encoded = _encoded(state)
        known = {key: _without_addresses(one) if "operations" in key else one for key, one in encoded.items()}
        text = json.dumps(known)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SchemaError(
            f"found a {name} that holds {error}; expected tensors, arrays, numbers, text, and lists and dicts of them: "
            "return x.as_tensor() in the dataset, and what you need of the rest as fields of their own"
        ) from None
    return value.as_subclass(torch.Tensor) if name == "MetaTensor" else value.as_tensor(), text


def _open_sparse(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
    state: dict[str, Any] = {"size": list(tensor.shape)}
    if name == "sparse_coo":  # its methods without an underscore are only for indices that were sorted and summed
        state["is_coalesced"] = tensor.is_coalesced()
        return tensor._indices(), tensor._values(), json.dumps(state)
    return (*(getattr(tensor, part)() for part in _INDICES[name]), tensor.values(), json.dumps(state))


def _make_sparse(name: str, parts: Sequence[Any]) -> torch.Tensor:
    """Return a sparse tensor of its parts, which torch checks: indices of a file may lie."""
    *indices, values, text = parts
    state = json.loads(text)
    size = [operator.index(length) for length in state["size"]]
    if name == "sparse_coo":
        coalesced = bool(state["is_coalesced"])
        return torch.sparse_coo_tensor(indices[0], values, size, check_invariants=True, is_coalesced=coalesced)
    layout: torch.layout = getattr(torch, name)
    first, second = indices
    return torch.sparse_compressed_tensor(first, second, values, size, layout=layout, check_invariants=True)


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


def _without_addresses(value: Any) -> Any:
    """Return the operations of a MetaTensor, as JSON, without the ``id`` of their transforms.

    It is an address, which each process has anew. MONAI compares no ``id`` that is "none".
    """
    if isinstance(value, list):
        return [_without_addresses(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _without_addresses(one) for key, one in value.items()}
    return {**kept, "id": "none"} if "class" in kept and type(kept.get("id")) is int else kept


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
    cls = None if name in _INDICES else _class(name)
    try:
        if cls is None:
            return _make_sparse(name, parts)
        numbers, state = parts
        found = _decoded(json.loads(state))
        if name in _SETTINGS:
            return cls(numbers.contiguous(), **found)
        if not found.keys() <= _META:
            raise ValueError("unknown attributes")
        made = numbers.as_subclass(cls)
        made.__dict__ = found
        return made
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError, RuntimeError) as error:
        raise SchemaError(
            f"found {brief(parts, 200)} as the parts of a {name}, which refuses them ({error}); expected its "
            f"{listed(part_names(name))}, as memfeed.cache writes them"
        ) from None


def copy_kept(value: Any) -> Any:
    """Return a tensor that shares no memory with ``value``; the tensor itself if a store would refuse it."""
    try:
        *numbers, state = open_kept(value)
    except SchemaError:
        return value
    return make_kept(kept_name(value), [*(one.clone() for one in numbers), state])


@cache
def _class(name: str) -> Any:
    try:
        return getattr(import_module(_MODULES[name]), name)
    except (KeyError, ImportError, AttributeError) as error:
        library = _MODULES.get(name, "").partition(".")[0]
        hint = f"pip install {library}" if library else "a version of memfeed that knows it"
        raise SchemaError(f"found a tensor of the class {name} ({error}); expected its library: {hint}") from None


NAMED = frozenset({"Image", "Mask", "Video"})
"""Classes that hold nothing beside their numbers: the leaf of the structure has their name."""

SIZED = frozenset({"BoundingBoxes", "KeyPoints"})
"""Classes with the size of the image that they belong to, which is kept for each row."""

SIZED_KEYS = ("values", "canvas_size")
_OPTIONS = ("format", "clamping_mode")


def class_name(value: Any) -> str:
    """Return the name of the class of a tv_tensor, or an empty string for any other value."""
    cls = type(value)
    if cls.__module__.startswith("torchvision.tv_tensors") and cls.__name__ in NAMED | SIZED:
        return cls.__name__
    return ""


def options_of(value: Any) -> dict[str, str | None]:
    """Return the format and other options of boxes or key points, as JSON values."""
    options = {name: getattr(value, name) for name in _OPTIONS if hasattr(value, name)}
    return {name: getattr(option, "name", option) for name, option in options.items()}


def parts_of(value: Any) -> tuple[torch.Tensor, list[int]]:
    """Return the numbers of boxes or key points, and the height and width of their image."""
    return value.as_subclass(torch.Tensor), [int(size) for size in value.canvas_size]


def name_wrapper(name: str) -> Callable[[Any], Any] | None:
    """Return a function that makes a tensor an Image, a Mask or a Video; None without torchvision."""
    cls = _torchvision_class(name) if name in NAMED else None
    return None if cls is None else lambda value: _made(cls, value, {})


def sized_wrapper(name: str, options: Mapping[str, str | None]) -> Callable[[Sequence[Any]], Any]:
    """Return a function that makes boxes or key points of their parts; without torchvision it returns the numbers."""
    cls = _torchvision_class(name) if name in SIZED else None
    if cls is None:
        return operator.itemgetter(0)
    known = inspect.signature(cls.__new__).parameters
    kept = {key: option for key, option in options.items() if key in known}
    return lambda parts: _made(cls, parts[0], {"canvas_size": tuple(parts[1]), **kept})


def _made(cls: Any, value: Any, options: Mapping[str, Any]) -> Any:
    """Return a tv_tensor that shares the memory of a tensor; the value itself where it cannot be one.

    The manifest may be of a stranger, or name a format that the installed torchvision does not have.
    """
    if not isinstance(value, torch.Tensor):
        return value
    try:
        return cls(value, **options)
    except (TypeError, ValueError, KeyError, RuntimeError):
        return value


@cache
def _torchvision_class(name: str) -> Any:
    try:
        return getattr(import_module("torchvision.tv_tensors"), name, None)
    except ImportError:
        return None
