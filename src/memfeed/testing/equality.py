"""Compare two samples or batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensorclass

from memfeed.schema.compare import differing
from memfeed.schema.graphs import graph_parts, is_graph


def equal(a: Any, b: Any) -> bool:
    """Return True if structure, types, dtypes and values are equal.

    NaN equals NaN. An array equals the tensor that a store returns for it. Tensors may be on different devices.
    """
    if isinstance(a, np.ndarray | np.generic):
        a = torch.from_numpy(np.array(a))
    if isinstance(b, np.ndarray | np.generic):
        b = torch.from_numpy(np.array(b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and _equal_tensors(a, b)
    if is_tensorclass(type(a)) or isinstance(a, TensorDictBase):
        if type(a).__name__ != type(b).__name__ or a.batch_size != b.batch_size:
            return False
        keys = set(a.keys())
        return keys == set(b.keys()) and all(equal(a.get(k), b.get(k)) for k in keys)
    if type(a) is not type(b) and not (hasattr(a, "_fields") and type(a).__name__ == type(b).__name__):
        return False
    if is_graph(a) and is_graph(b):
        return type(a).__name__ == type(b).__name__ and equal(_by_name(a), _by_name(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if dataclasses.is_dataclass(a):
        return all(equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return bool(a == b) or (a != a and b != b)


def _by_name(graph: Any) -> dict[str, Any]:
    return dict(sorted(graph_parts(graph).items()))


def _equal_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.is_nested != b.is_nested:
        return False
    if a.device != b.device:
        a, b = a.cpu(), b.cpu()
    if a.is_nested:
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a.unbind(), b.unbind(), strict=True))
    return a.shape == b.shape and not bool(differing(a, b).any())
