"""Find out if samples share memory: a dataset that fills one buffer for each of them has only the last."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from memfeed.errors import SchemaError
from memfeed.schema.tree import open_container

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, np.generic)


def share_memory(samples: Iterable[Any]) -> bool:
    """Return True if two of some samples are in the same memory, or have the same list, dict or other object."""
    seen: set[int] = set()
    for sample in samples:
        places: set[int] = set()
        _collect(sample, places)
        if places & seen:
            return True
        seen |= places
    return False


def _collect(value: Any, places: set[int]) -> None:
    """Add the addresses of what can be written to in a sample: tensors, arrays, and objects that can change."""
    if isinstance(value, _IMMUTABLE):
        return
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_nested and value.numel():
            places.add(value.data_ptr())
        return
    if isinstance(value, np.ndarray):
        if value.size:
            places.add(value.__array_interface__["data"][0])
        return
    if not isinstance(value, tuple):
        if id(value) in places:  # it occurs twice, or contains itself
            return
        places.add(id(value))
    try:
        opened = open_container(value)
    except SchemaError:  # the conversion refuses this sample, with its index
        return
    for part in opened[1] if opened is not None else ():
        _collect(part, places)
