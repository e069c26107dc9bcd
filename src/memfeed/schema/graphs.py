"""Graphs of PyTorch Geometric: `Data` and `HeteroData` in samples, `Batch` in batches; `EdgeIndex` and `Index`.

The library is imported for such samples only. The last two are tensors with settings, such as a size and an order. A
store keeps both. What they compute from their numbers, and hold to be fast, they compute again.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from memfeed.errors import SchemaError, brief

INDEX_PARTS = ("numbers", "settings")
"""The parts of an EdgeIndex or Index: a tensor, and the settings as JSON."""

_INDEX_SETTINGS = {"EdgeIndex": ("sparse_size", "sort_order", "is_undirected"), "Index": ("dim_size", "is_sorted")}
_INDEX_MODULES = {"EdgeIndex": "torch_geometric.edge_index", "Index": "torch_geometric.index"}
_SEPARATOR = "__"  # joins the names of an edge type, as in HeteroData's own constructor


def is_graph(value: Any) -> bool:
    """Return True for a Data or HeteroData of PyTorch Geometric, and for a Batch of them."""
    return isinstance(value, _graph_classes())


def is_index(value: Any) -> bool:
    """Return True for an EdgeIndex or an Index of PyTorch Geometric, tensors with settings."""
    return _is_index_class(type(value))


def _is_index_class(cls: type) -> bool:
    return _INDEX_MODULES.get(cls.__name__, "") == cls.__module__


def open_index(value: Any) -> tuple[torch.Tensor, str]:
    """Return the parts of an EdgeIndex or Index."""
    found = {name: getattr(value, name) for name in _INDEX_SETTINGS[type(value).__name__]}
    # sparse_size is a method; an order is a str of a class of its own
    settings = {name: one() if callable(one) else getattr(one, "value", one) for name, one in found.items()}
    return value.as_tensor(), json.dumps(settings)


def _make_index(cls: Any, parts: Sequence[Any]) -> Any:
    """Return an EdgeIndex or Index of its parts. Raise SchemaError for parts that it does not take."""
    try:
        numbers, settings = parts
        given = {key: tuple(one) if isinstance(one, list) else one for key, one in json.loads(settings).items()}
        return cls(numbers.contiguous(), **given)
    except (ValueError, TypeError, AttributeError, AssertionError) as error:
        raise SchemaError(
            f"found {brief(parts, 200)} as the parts of an {cls.__name__}, which refuses them ({error}); expected its "
            "numbers and its settings, as memfeed.cache writes them"
        ) from None


def is_graph_batch(value: Any) -> bool:
    """Return True for a Batch of graphs of PyTorch Geometric."""
    loaded = sys.modules.get("torch_geometric.data")
    return loaded is not None and isinstance(value, loaded.Batch)


def is_graph_class(cls: type) -> bool:
    """Return True for Data and HeteroData of PyTorch Geometric and classes derived from them, EdgeIndex and Index."""
    return issubclass(cls, _graph_classes()) or _is_index_class(cls)


def graph_parts(graph: Any) -> dict[str, Any]:
    """Return the attributes of a graph or a Batch by name, in its order.

    Those of a HeteroData come with a dict for each type of nodes and edges. Its key is the name of the type, as the
    constructor of HeteroData takes it: "user", "user__rates__film".
    """
    if not hasattr(graph, "edge_types"):
        given = set(graph.keys())  # a set has another order in every process
        return {key: graph[key] for key in graph.to_dict() if key in given}
    parts: dict[str, Any] = dict(graph._global_store.items())
    for kind, store in (*graph.node_items(), *graph.edge_items()):
        parts[_joined(kind)] = dict(store.items())
    return parts


def open_graph(graph: Any) -> tuple[tuple[str, ...], list[Any]]:
    """Return the names of the parts of a graph, and their values. Raise SchemaError for a Batch.

    Also raises it for a HeteroData of which the parts would not say where they were.
    """
    if is_graph_batch(graph):
        raise SchemaError("found a Batch of graphs; expected one Data per sample: dataset = batch.to_data_list()")
    parts = graph_parts(graph)
    if hasattr(graph, "edge_types"):
        for name, value in graph._global_store.items():
            if isinstance(value, Mapping):
                raise SchemaError(
                    f"found a {type(value).__name__} as the attribute {name!r} of a HeteroData; expected dicts "
                    f"only for types of nodes and edges: data.{name} = json.dumps(data.{name})"
                )
    return tuple(parts), list(parts.values())


def make_graph(cls: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
    """Return a graph, or an EdgeIndex or Index, of this class with these parts."""
    if _is_index_class(cls):
        return _make_index(cls, values)
    return with_parts(cls(), dict(zip(keys, values, strict=True)))  # as PyTorch Geometric makes those of its data sets


def with_parts(graph: Any, parts: Mapping[str, Any]) -> Any:
    """Put ``parts`` into a graph and return it."""
    is_hetero = hasattr(graph, "edge_types")
    for key, value in parts.items():
        if is_hetero and isinstance(value, Mapping):
            names = tuple(key.split(_SEPARATOR))
            graph[names if len(names) == 3 else key].update(value)
        else:
            graph[key] = value
    return graph


def _graph_classes() -> tuple[type, ...]:
    loaded = sys.modules.get("torch_geometric.data")
    if loaded is None or not hasattr(loaded, "HeteroData"):  # not imported, or another thread is importing it
        return ()
    return loaded.Data, loaded.HeteroData


def _joined(kind: str | tuple[str, str, str]) -> str:
    """Return the key of a type of nodes or edges. Raise SchemaError for a name that could not be split again."""
    names = (kind,) if isinstance(kind, str) else kind
    if any(_SEPARATOR in name or name.startswith("_") or name.endswith("_") for name in names):
        raise SchemaError(
            f"found {kind!r} as a type of nodes or edges of a HeteroData; expected names without {_SEPARATOR!r}, and "
            "without an underscore at either end, because '__' joins the names of an edge type: rename it"
        )
    return _SEPARATOR.join(names)


def collate_graphs(graphs: Sequence[Any]) -> Any:
    """Return the Batch that PyTorch Geometric makes of some graphs; what default_collate makes of other values."""
    if is_index(graphs[0]):
        return default_collate(list(graphs))
    return _library().Batch.from_data_list(list(graphs))


def graph_collater(follow_batch: Sequence[str] | None, exclude_keys: Sequence[str] | None) -> Callable[[Any], Any]:
    """Return the function by which PyTorch Geometric's DataLoader makes a batch of a list of samples."""
    _library()
    loaders = importlib.import_module("torch_geometric.loader.dataloader")
    collater: Callable[[Any], Any] = loaders.Collater(None, follow_batch, exclude_keys)
    return collater


def graph_class(name: str, cls: type | None) -> type:
    """Return the class of stored graphs: ``cls``, if the caller gave one of that name, else that of the library.

    Raises SchemaError for a class derived from these that was not given: it decides how graphs are collated.
    """
    if cls is not None:
        return cls
    if name in _INDEX_MODULES:
        _library()
        return getattr(importlib.import_module(_INDEX_MODULES[name]), name)  # type: ignore[no-any-return]
    if name not in ("Data", "HeteroData"):
        raise SchemaError(
            f"found graphs of the class {name}, which is derived from Data or HeteroData; expected that class, which "
            f"knows how to collate them: memfeed.open(path, types=[{name}])"
        )
    found: type = getattr(_library(), name)
    return found


def _library() -> Any:
    try:
        return importlib.import_module("torch_geometric.data")
    except ImportError:
        raise SchemaError(
            "found graphs to collate, and no PyTorch Geometric; expected it installed: pip install torch_geometric"
        ) from None
