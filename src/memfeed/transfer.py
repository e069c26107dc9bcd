"""Moving a batch, or any nesting of tensors, to a device."""

from __future__ import annotations

import dataclasses
from typing import Any

import optree
import torch
from tensordict import TensorDictBase, is_tensorclass
from torch.utils.data import get_worker_info

from memfeed.errors import LoaderError


def _is_leaf(value: Any) -> bool:
    """What is moved in one piece, or by its own fields."""
    cls = type(value)
    return (
        isinstance(value, TensorDictBase) or is_tensorclass(cls) or (dataclasses.is_dataclass(cls) and value is not cls)
    )


def check_device(device: torch.device | str | None) -> torch.device | None:
    """The device meant; raises LoaderError if it is not there, or cannot be used in a DataLoader worker."""
    if device is None:
        return None
    found = torch.device(device)
    if found.type == "cuda":
        if get_worker_info() is not None:
            raise LoaderError(
                "found a CUDA device inside a DataLoader worker; CUDA cannot be used after a fork: collate on the CPU "
                "and move each batch in the training loop with memfeed.to_device(batch, device)"
            )
        count = torch.cuda.device_count()
        if (found.index or 0) >= count:
            raise LoaderError(
                f"found device {found}; this machine has {count} CUDA devices: use cpu, or one that is there"
            )
    return found


def to_device(tree: Any, device: torch.device | str, *, non_blocking: bool = True, strict: bool = False) -> Any:
    """Every tensor in a nesting of tuples, lists, dicts, namedtuples, dataclasses, TensorDicts and tensorclasses.

    Comes back in the same structure; tensors that are there already are not copied, and other values pass through.
    With ``strict`` a value that is no tensor raises TypeError. ``non_blocking`` copies from page-locked memory without
    waiting: synchronise before you write to it again.

    Example::

        batch = memfeed.to_device({"x": torch.ones(2), "meta": ["a", "b"]}, "cpu")
    """
    target = torch.device(device)

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor | TensorDictBase) or is_tensorclass(type(value)):
            return value.to(target, non_blocking=non_blocking)
        if _is_leaf(value):
            moved = object.__new__(type(value))
            for field in dataclasses.fields(value):
                object.__setattr__(moved, field.name, walk(getattr(value, field.name)))
            return moved
        if strict:
            raise TypeError(f"found {type(value).__name__}, which is no tensor; expected only tensors with strict=True")
        return value

    def walk(value: Any) -> Any:
        return optree.tree_map(move, value, is_leaf=_is_leaf)

    return walk(tree)
