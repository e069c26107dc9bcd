"""Move a batch, or any nesting of tensors, to a device that is named as torch names them."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch.utils.data import get_worker_info

from memfeed.errors import LoaderError
from memfeed.schema.containers import flatten, leaves_with_paths
from memfeed.schema.tensordicts import is_tensor_collection
from memfeed.transfer.packing import Allocate, allocate_page_locked, can_pack, copy_packed

# A non-blocking copy to the CPU returns memory that the device has not written yet. On MPS, versions of torch read the
# source of a non-blocking copy after it was freed.
_BLOCKING_DEVICES = frozenset({"cpu", "mps"})


def to_device(tree: Any, device: torch.device | str, *, non_blocking: bool = True, strict: bool = False) -> Any:
    """Return ``tree`` with every tensor on ``device``; tensors that are there already are returned as they are.

    A tree is any nesting of tuples, lists, dicts, deques, namedtuples and dataclasses, of subclasses of these, and of
    classes registered with optree (globally) or ``torch.utils._pytree``. The result has the same types and the same
    order of keys. A tensor that occurs twice in the tree is copied once. A TensorDict, a tensorclass, a tensor of
    another class than Tensor, and any object with a method ``to(device)`` are moved by that method; some of these
    methods (as PyTorch Geometric's) change the object and return it. A PackedSequence keeps its batch_sizes on the CPU.

    On CUDA two or more small tensors (plain and contiguous, without a gradient, 256 KiB at most) are moved in one copy.
    They share one buffer on the device: while you keep one of them, or when you torch.save one, all of them are kept
    or saved. A clone has its own memory. You may write to the sources as soon as this function returns.

    Args:
        tree: tensors in any nesting.
        device: where to move them.
        non_blocking: return before the copies are done; work on the device's current stream waits for them. Synchronise
            before you write to a page-locked source. Copies to the CPU always block.
        strict: raise for values that are neither tensors nor have a method ``to``. Otherwise they are returned as they
            are.

    Raises:
        TypeError: a value that cannot be moved, with ``strict``. The message names its place in the tree.

    Example::

        batch = memfeed.to_device({"x": torch.ones(2), "meta": ["a", "b"]}, "cpu")
    """
    # the device as tensors name it: "cuda" becomes the current GPU, "cpu" has no index
    target = torch.empty(0, device=device).device
    return move(
        tree,
        target,
        non_blocking=non_blocking and target.type not in _BLOCKING_DEVICES,
        strict=strict,
        allocate=partial(allocate_page_locked, target) if target.type == "cuda" else None,
    )


def move(tree: Any, device: torch.device, *, non_blocking: bool, strict: bool, allocate: Allocate | None) -> Any:
    """Do the work of `to_device` for a device as tensors name it.

    Small tensors are moved in one buffer from ``allocate``, if it is given.
    """
    leaves, unflatten = flatten(tree, _has_method_to)
    # by identity: a tensor that occurs twice is moved once
    to_move = {
        id(leaf): leaf
        for leaf in leaves
        if (leaf.device != device if isinstance(leaf, torch.Tensor) else strict or _has_method_to(leaf))
    }
    if not to_move:
        return unflatten(leaves)
    if strict and not all(isinstance(leaf, torch.Tensor) or _has_method_to(leaf) for leaf in to_move.values()):
        _refuse_immovable(tree)
    moved: dict[int, Any] = {}
    if allocate is not None:
        small = [leaf for leaf in to_move.values() if type(leaf) is torch.Tensor and can_pack(leaf)]
        if len(small) > 1:
            copies = copy_packed(small, device, non_blocking=non_blocking, allocate=allocate)
            moved.update(zip(map(id, small), copies, strict=True))
    for key, leaf in to_move.items():
        if key not in moved:
            moved[key] = _call_to(leaf, device, non_blocking)
    return unflatten([moved.get(id(leaf), leaf) for leaf in leaves])


def _has_method_to(value: Any) -> bool:
    # asked of the class: an attribute of one instance may be a field that is named "to"
    return callable(getattr(type(value), "to", None))


def _refuse_immovable(tree: Any) -> None:
    for path, value in leaves_with_paths(tree, _has_method_to):
        if not isinstance(value, torch.Tensor) and not _has_method_to(value):
            shown = "".join(f".{key}" if isinstance(key, str) else f"[{key!r}]" for key in path).removeprefix(".")
            raise TypeError(
                f"found {type(value).__name__}{shown and f' at {shown}'}, which is no tensor; expected only tensors "
                "with strict=True: remove it, convert it to a tensor, or pass strict=False to keep it where it is"
            )


def _call_to(value: Any, device: torch.device, non_blocking: bool) -> Any:
    """Return ``value.to(device)``; not every such method has ``non_blocking``, and some return nothing."""
    if isinstance(value, torch.Tensor) or is_tensor_collection(value):
        return value.to(device, non_blocking=non_blocking)
    options = {"non_blocking": True} if non_blocking and _takes_non_blocking(value.to) else {}
    result = value.to(device, **options)
    return value if result is None else result


def _takes_non_blocking(method: Any) -> bool:
    try:
        return "non_blocking" in inspect.signature(method).parameters
    except (TypeError, ValueError):  # written in C, and without a signature
        return False


def check_device(device: torch.device | str | None) -> torch.device | None:
    """Return ``device`` as a torch.device; None stays None.

    Raises:
        LoaderError: torch does not know the device, this machine does not have it, or it is a CUDA device and this
            process is a DataLoader worker.
    """
    if device is None:
        return None
    try:
        checked = torch.device(device)
    except RuntimeError as error:
        raise LoaderError(
            f"found device {device!r}; expected one that torch knows, as cpu or cuda:0 ({error})"
        ) from None
    if checked.type == "cuda":
        if get_worker_info() is not None:
            raise LoaderError(
                "found a CUDA device inside a DataLoader worker; CUDA cannot be used after a fork: collate on the CPU "
                "and move each batch in the training loop with memfeed.to_device(batch, device)"
            )
        count = torch.cuda.device_count()
        if (checked.index or 0) >= count:
            raise LoaderError(
                f"found device {checked}; this machine has {count} CUDA devices: use cpu, or one that is there"
            )
    elif checked.type not in ("cpu", "meta"):
        module = getattr(torch, checked.type, None)  # torch.mps, torch.xpu, or that of a privately used backend
        if module is None or not module.is_available():
            raise LoaderError(
                f"found device {checked}, which this machine or this build of torch does not have; expected one that "
                'is there: device="cpu"'
            )
    return checked
