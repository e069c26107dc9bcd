"""Graphs of PyTorch Geometric: `Data` and `HeteroData` in samples, `Batch` in batches.

The library is imported for such samples only.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memfeed.errors import SchemaError

_SEPARATOR = "__"  # joins the names of an edge type, as in HeteroData's own constructor


def is_graph(value: Any) -> bool:
    """Return True for a Data or HeteroData of PyTorch Geometric, and for a Batch of them."""
    return isinstance(value, _graph_classes())


def is_graph_batch(value: Any) -> bool:
    """Return True for a Batch of graphs of PyTorch Geometric."""
    loaded = sys.modules.get("torch_geometric.data")
    return loaded is not None and isinstance(value, loaded.Batch)


def is_graph_class(cls: type) -> bool:
    """Return True for Data and HeteroData of PyTorch Geometric and the classes derived from them."""
    return issubclass(cls, _graph_classes())


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
    """Return the Batch that PyTorch Geometric makes of some graphs."""
    return _library().Batch.from_data_list(list(graphs))


def graph_collater(follow_batch: Sequence[str] | None, exclude_keys: Sequence[str] | None) -> Callable[[Any], Any]:
    """Return the function by which PyTorch Geometric's DataLoader makes a batch of a list of samples."""
    _library()
    loaders = importlib.import_module("torch_geometric.loader.dataloader")
    collater: Callable[[Any], Any] = loaders.Collater(None, follow_batch, exclude_keys)
    return collater


def graph_class(name: str, cls: type | None) -> type:
    """Return the class of stored graphs: ``cls``, if the caller gave one of that name, else Data or HeteroData.

    Raises SchemaError for a class derived from these that was not given: it decides how graphs are collated.
    """
    if cls is not None:
        return cls
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
