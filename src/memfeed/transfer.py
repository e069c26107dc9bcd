"""Moving a batch, or any nesting of tensors, to a device."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, is_tensorclass
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import get_worker_info

from memfeed.errors import LoaderError
from memfeed.tree import map_leaves


def check_device(device: torch.device | str | None) -> torch.device | None:
    """The device meant; raises LoaderError if it is not there, or cannot be used in a DataLoader worker."""
    if device is None:
        return None
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise LoaderError(
            f"found device {device!r}; expected one that torch knows, as cpu or cuda:0 ({error})"
        ) from None
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
        if isinstance(value, torch.Tensor | TensorDictBase | PackedSequence) or is_tensorclass(type(value)):
            return value.to(target, non_blocking=non_blocking)
        if strict:
            raise TypeError(f"found {type(value).__name__}, which is no tensor; expected only tensors with strict=True")
        return value

    return map_leaves(move, tree)
