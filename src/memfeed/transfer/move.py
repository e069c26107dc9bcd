"""Moving a batch, or any nesting of tensors, to a device."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, is_tensorclass
from torch.nn.utils.rnn import PackedSequence

from memfeed.tree import map_leaves


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
        if isinstance(value, torch.Tensor | TensorDictBase | PackedSequence) or is_tensorclass(type(value)):
            return value.to(target, non_blocking=non_blocking)
        if strict:
            raise TypeError(f"found {type(value).__name__}, which is no tensor; expected only tensors with strict=True")
        return value

    return map_leaves(move, tree)
