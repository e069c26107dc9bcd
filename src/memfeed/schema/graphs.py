"""Graphs of PyTorch Geometric: `Data` in samples, `Batch` in batches. The library is imported for such samples only."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from memfeed.errors import SchemaError


def is_graph(value: Any) -> bool:
    """Return True for a Data of PyTorch Geometric, and for its Batch. Raise SchemaError for a HeteroData."""
    loaded = sys.modules.get("torch_geometric.data")
    if loaded is None or not hasattr(loaded, "HeteroData"):  # not imported, or another thread is importing it
        return False
    if isinstance(value, loaded.HeteroData):
        raise SchemaError("found a HeteroData; expected Data: data = data.to_homogeneous()")
    return isinstance(value, loaded.Data)


def is_graph_batch(value: Any) -> bool:
    """Return True for a Batch of graphs of PyTorch Geometric."""
    loaded = sys.modules.get("torch_geometric.data")
    return loaded is not None and isinstance(value, loaded.Batch)


def is_graph_class(cls: type) -> bool:
    """Return True for Data of PyTorch Geometric and the classes derived from it."""
    loaded = sys.modules.get("torch_geometric.data")
    return loaded is not None and issubclass(cls, loaded.Data)


def open_graph(graph: Any) -> tuple[tuple[str, ...], list[Any]]:
    """Return the names of the attributes of a Data, in its order, and their values. Raise SchemaError for a Batch."""
    if is_graph_batch(graph):
        raise SchemaError("found a Batch of graphs; expected one Data per sample: dataset = batch.to_data_list()")
    given = set(graph.keys())  # a set has another order in every process
    keys = tuple(key for key in graph.to_dict() if key in given)
    return keys, [graph[key] for key in keys]


def make_graph(cls: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
    """Return a graph of this class with these attributes."""
    graph = cls()  # as PyTorch Geometric makes the graphs of its own data sets
    for key, value in zip(keys, values, strict=True):
        graph[key] = value
    return graph


def collate_graphs(graphs: Sequence[Any]) -> Any:
    """Return the Batch that PyTorch Geometric makes of some graphs."""
    return _library().Batch.from_data_list(list(graphs))


def graph_class(name: str, cls: type | None) -> type:
    """Return the class of stored graphs: ``cls``, if the caller gave one of that name, else Data itself.

    Raises SchemaError for a class derived from Data that was not given: it decides how graphs are collated.
    """
    if cls is not None:
        return cls
    if name != "Data":
        raise SchemaError(
            f"found graphs of the class {name}, which is derived from Data; expected that class, which knows how to "
            f"collate them: memfeed.open(path, types=[{name}])"
        )
    found: type = _library().Data
    return found


def _library() -> Any:
    try:
        return importlib.import_module("torch_geometric.data")
    except ImportError:
        raise SchemaError(
            "found a store of graphs, and no PyTorch Geometric; expected it installed: pip install torch_geometric"
        ) from None
