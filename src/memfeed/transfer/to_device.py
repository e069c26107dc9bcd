"""Moving a batch, or any nesting of tensors, to a device."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensorclass

from memfeed.transfer.containers import has_to, paths, take_apart
from memfeed.transfer.packing import Allocate, can_share, copy_together, page_locked

# A copy to the CPU that nobody waits for shows memory that the device has not written yet; on MPS, torch has had such
# copies from the CPU read memory that was free already.
_WAITED_FOR = frozenset({"cpu", "mps"})


def to_device(tree: Any, device: torch.device | str, *, non_blocking: bool = True, strict: bool = False) -> Any:
    """The same tree with every tensor on ``device``; tensors that are there already are returned as they are.

    A tree is any nesting of tuples, lists, dicts, deques, namedtuples and dataclasses, of subclasses of these, and of
    classes registered with optree (globally) or ``torch.utils._pytree``. It comes back with the same types and the
    same order of keys; a tensor that stands in it twice is copied once. A TensorDict, a tensorclass, a tensor of a
    class of its own and any object with a method ``to(device)`` is moved by that method, some of which (as PyTorch
    Geometric's) change the object and return it. A PackedSequence keeps its batch_sizes on the CPU. Other values pass
    through; with ``strict`` they raise TypeError, which names their place in the tree.

    On CUDA two or more small tensors (plain and contiguous, without a gradient, 256 KiB at most) travel in one copy.
    They share its memory on the device: who keeps one of them, or gives it to torch.save, keeps all; a clone does not.
    Their sources may be written again at once.

    ``non_blocking`` does not wait for the copies; work queued on the device's current stream does. Synchronise before
    you write to a page-locked source. Copies to the CPU are always waited for.

    Example::

        batch = memfeed.to_device({"x": torch.ones(2), "meta": ["a", "b"]}, "cpu")
    """
    target = torch.empty(0, device=device).device  # as tensors name it: cuda is the current one, cpu has no number
    return move(
        tree,
        target,
        non_blocking=non_blocking and target.type not in _WAITED_FOR,
        strict=strict,
        allocate=page_locked if target.type == "cuda" else None,
    )


def move(tree: Any, device: torch.device, *, non_blocking: bool, strict: bool, allocate: Allocate | None) -> Any:
    """``to_device`` for a device as tensors name it; small tensors travel in a buffer of ``allocate``, if given."""
    leaves, put_together = take_apart(tree)
    # by identity: what stands in a tree twice is moved once
    away = {
        id(leaf): leaf
        for leaf in leaves
        if (leaf.device != device if isinstance(leaf, torch.Tensor) else strict or has_to(leaf))
    }
    if not away:
        return put_together(leaves)
    if strict and not all(isinstance(leaf, torch.Tensor) or has_to(leaf) for leaf in away.values()):
        _refuse_others(tree)
    moved: dict[int, Any] = {}
    if allocate is not None:
        small = [leaf for leaf in away.values() if type(leaf) is torch.Tensor and can_share(leaf)]
        if len(small) > 1:
            arrived = copy_together(small, device, non_blocking=non_blocking, allocate=allocate)
            moved.update(zip(map(id, small), arrived, strict=True))
    for key, leaf in away.items():
        if key not in moved:
            moved[key] = _by_its_own(leaf, device, non_blocking)
    return put_together([moved.get(id(leaf), leaf) for leaf in leaves])


def _refuse_others(tree: Any) -> None:
    for where, value in paths(tree):
        if not isinstance(value, torch.Tensor) and not has_to(value):
            raise TypeError(
                f"found {type(value).__name__}{where and f' at {where}'}, which is no tensor; expected only "
                "tensors with strict=True: take it out, make a tensor of it, or pass strict=False to let it through"
            )


def _by_its_own(value: Any, device: torch.device, non_blocking: bool) -> Any:
    """``value.to(device)``; not every class that has the method has ``non_blocking``, and some return nothing."""
    whole: bool = isinstance(value, torch.Tensor | TensorDictBase) or is_tensorclass(type(value))
    if whole:
        return value.to(device, non_blocking=non_blocking)
    how = {"non_blocking": True} if non_blocking and _takes_non_blocking(value.to) else {}
    found = value.to(device, **how)
    return value if found is None else found


def _takes_non_blocking(method: Any) -> bool:
    try:
        return "non_blocking" in inspect.signature(method).parameters
    except (TypeError, ValueError):  # written in C, and without a signature
        return False
