"""One value of a store in a few characters, for people."""

from __future__ import annotations

from typing import Any

import torch

from memfeed.schema import values
from memfeed.system.units import format_bytes, printable

CELL_WIDTH = 60


def summary(value: Any) -> str:
    """Return a value in at most 60 characters: up to six numbers as they are, more by shape, range and mean."""
    tensor = values.as_tensor(value)
    if isinstance(value, bytes):
        return f"{_cut(repr(value[:40]))} ({format_bytes(len(value))})"
    if tensor is None:
        try:
            return _cut(printable(repr(value)))
        except RecursionError:
            return f"a deeply nested {type(value).__name__}"
    shape = shape_text(tensor)
    if tensor.numel() == 0 and tensor.ndim > 1:  # its list of lists could be long
        return f"{shape} empty"
    if tensor.numel() <= 6:
        return _cut(repr(tensor.tolist()))
    if tensor.is_complex() or tensor.dtype is torch.bool:
        return shape if tensor.is_complex() else f"{shape} {int(tensor.sum()):,} true"
    wide = tensor.double()
    return f"{shape} {wide.min().item():.4g} to {wide.max().item():.4g}, mean {wide.mean().item():.4g}"


def shape_text(tensor: torch.Tensor) -> str:
    """Return the shape of a tensor as text: ``[3, 224, 224]``."""
    return f"[{', '.join(map(str, tensor.shape))}]"


def _cut(text: str) -> str:
    return text if len(text) <= CELL_WIDTH else text[: CELL_WIDTH - 3] + "..."
