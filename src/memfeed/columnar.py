"""Data that lies in columns already: a tensor or array, a tuple or dict of them, a TensorDataset, a TensorDict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensorclass
from torch.utils.data import TensorDataset

from memfeed import codec
from memfeed.columns import InMemory
from memfeed.errors import SchemaError
from memfeed.infer import infer
from memfeed.schema import Node, Schema, display
from memfeed.tree import Flattener, open_container, types_of


class Columns:
    """Columns in memory seen as a map-style dataset: ``len`` rows, each a sample of the columns' own structure.

    Shares the memory of ``source``; copies nothing.
    """

    def __init__(self, source: Any, n: int) -> None:
        self.source, self._n = source, n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, row: int) -> Any:
        return _row(self.source, row)

    @property
    def types(self) -> tuple[type, ...]:
        """The record classes among the columns' containers."""
        return types_of([self.source])

    def tensors(self, structure: Node) -> list[torch.Tensor]:
        """The columns [n, ...] in the order of the leaves of ``structure``."""
        found = Flattener(structure, self.source)(self.source)
        return [tensor for leaf in found if (tensor := codec.as_tensor(leaf)) is not None]

    def in_memory(self) -> tuple[Schema, list[InMemory]]:
        """A schema and columns for these data, without a copy: what a loader reads."""
        found = infer([self[0]])
        tensors = self.tensors(found.structure)
        columns = [InMemory(field, tensor) for field, tensor in zip(found.schema.fields, tensors, strict=True)]
        return found.schema, columns


def _row(value: Any, row: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_row(part, row) for part in value)
    if isinstance(value, Mapping) and not isinstance(value, TensorDictBase):
        return {key: _row(part, row) for key, part in value.items()}
    return value[row]


def as_columns(data: Any) -> Columns | None:
    """``data`` as columns, or None where it is a dataset of samples. Raises SchemaError for unequal lengths."""
    if isinstance(data, TensorDataset):
        data = tuple(data.tensors)
    lengths: dict[str, int] = {}
    if not _collect(data, (), lengths):
        return None
    if not lengths:
        raise SchemaError("found columns without any tensor in them; expected at least one")
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name}: {n}" for name, n in lengths.items())
        raise SchemaError(f"found columns of different lengths ({found}); expected one length: one row per sample")
    return Columns(data, next(iter(lengths.values())))


def _collect(value: Any, path: tuple[str | int, ...], lengths: dict[str, int]) -> bool:
    """Notes the length of each column below ``value``; False where something is no column."""
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.ndim == 0 or (isinstance(value, torch.Tensor) and (value.is_nested or value.layout != torch.strided)):
            return False
        lengths[display(path)] = len(value)
        return True
    collection = isinstance(value, TensorDictBase) or is_tensorclass(value)
    if collection:
        if isinstance(value, LazyStackedTensorDict) or value.batch_dims == 0:
            return False
    elif not isinstance(value, Mapping) and type(value) is not tuple:
        return False  # a list is a dataset of samples
    opened = open_container(value)
    assert opened is not None
    keys = opened[0].keys or range(len(opened[1]))
    return all(_collect(held, (*path, key), lengths) for key, held in zip(keys, opened[1], strict=True))


def existing_path(data: Any) -> str | None:
    """Where data that is memory-mapped on disk already lies; None for anything else."""
    if not isinstance(data, TensorDictBase) and not is_tensorclass(data):
        return None
    prefix = getattr(data, "saved_path", None) if data.is_memmap() else None
    if prefix is not None:
        return str(prefix)
    for leaf in data.values(include_nested=True, leaves_only=True):
        if getattr(leaf, "filename", None):
            return str(leaf.filename)
    return None
