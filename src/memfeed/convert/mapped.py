"""Find data that is memory-mapped from files already, in columns and in lists of samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from memfeed.schema.containers import flatten, tensors_in
from memfeed.store.in_memory import Columns
from memfeed.system.mapped_memory import file_lookup
from memfeed.tables.table_column import TableColumn


def mapped_file(data: Any) -> str | None:
    """Return the file that columns, or the first sample of a list, are mapped from; None for other data."""
    if isinstance(data, Columns):
        tree = data.parts
    elif isinstance(data, list | tuple) and data:
        tree = data[0]
    else:
        return None
    lookup = file_lookup()
    try:
        return next((file for part in _parts(tree) if (file := _named_file(part) or _found_file(part, lookup))), None)
    except RecursionError:  # a sample that contains itself: the probe says so
        return None


def _parts(tree: Any) -> Iterator[Any]:
    yield from (leaf for leaf in flatten(tree)[0] if isinstance(leaf, np.ndarray | TableColumn))
    yield from tensors_in(tree)


def _named_file(part: Any) -> str | None:
    """Return the file that the object itself names, on every system."""
    while isinstance(part, np.ndarray):
        if isinstance(part, np.memmap) and part.filename:
            return str(part.filename)
        part = part.base
    try:
        return str(part.filename) if getattr(part, "filename", None) else None
    except RuntimeError:  # tensordict: a map without a file
        return None


def _found_file(part: Any, lookup: Any) -> str | None:
    if isinstance(part, TableColumn):
        addresses = part.addresses()
    elif isinstance(part, np.ndarray):
        addresses = [part.__array_interface__["data"][0]] if part.size else []
    else:
        is_in_memory = isinstance(part, torch.Tensor) and part.device.type == "cpu" and part.layout == torch.strided
        addresses = [part.data_ptr()] if is_in_memory and not part.is_nested and part.numel() else []
    return next((file for address in addresses if (file := lookup(address)) is not None), None)
