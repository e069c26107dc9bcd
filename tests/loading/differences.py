"""Compare what two loaders give, and say in a line how they differ."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import is_tensor_collection

from memfeed.errors import MemfeedError


@dataclasses.dataclass(frozen=True)
class Raised:
    """An exception in place of a result."""

    error: BaseException

    def __str__(self) -> str:
        name = type(self.error).__name__
        return f"memfeed's {name}" if self.says_what_to_do else f"raises {name}"

    @property
    def says_what_to_do(self) -> bool:
        """Return True for an error of memfeed: its own class, or a ValueError in its form."""
        return isinstance(self.error, MemfeedError) or str(self.error).startswith("found ")


class InAnyOrder(NamedTuple):
    """The rows that a loader has drawn, its batches, and those that DataLoader makes of the same rows."""

    rows: list[int]
    batches: Any
    as_dataloader: Any


def shown(value: Any) -> str:
    """Return the kind of a value, without its numbers: what a reader of a table wants to know."""
    if isinstance(value, Raised):
        return str(value)
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return "nested tensor"
        cls = "tensor" if type(value) is torch.Tensor else type(value).__name__
        return f"{cls} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if type(value) in (list, tuple):
        parts = list(dict.fromkeys(map(shown, value)))
        return f"{type(value).__name__} of {' | '.join(parts) or 'nothing'}"
    return type(value).__name__


def differences(theirs: Any, ours: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each place where ``ours`` differs from ``theirs``: ``.path: theirs -> ours``."""
    line = f"{path}: {shown(theirs)} -> {shown(ours)}"
    if isinstance(theirs, Raised) or isinstance(ours, Raised):
        both_raise = isinstance(theirs, Raised) and isinstance(ours, Raised)
        if not both_raise or not (type(theirs.error) is type(ours.error) or ours.says_what_to_do):
            yield line
    elif isinstance(ours, InAnyOrder):
        yield from differences(theirs.rows, ours.rows, f"{path}.rows")
        yield from differences(ours.as_dataloader, ours.batches, path)
    elif type(theirs) is not type(ours) and not (type(theirs) is list and isinstance(ours, list)):
        same = isinstance(theirs, Mapping) and isinstance(ours, Mapping)
        yield line
        if same:
            yield from _parts(theirs, ours, path)
    elif isinstance(theirs, torch.Tensor):
        yield from _tensors(theirs, ours, path, line)
    elif isinstance(theirs, np.ndarray):
        if theirs.dtype != ours.dtype or theirs.shape != ours.shape or theirs.tobytes() != ours.tobytes():
            yield line
    elif is_tensor_collection(theirs):
        if theirs.batch_size != ours.batch_size:
            yield f"{path}: batch_size {list(theirs.batch_size)} -> {list(ours.batch_size)}"
        yield from _parts(dict(theirs.items()), dict(ours.items()), path)
    elif isinstance(theirs, Mapping):
        yield from _parts(theirs, ours, path)
    elif isinstance(theirs, list | tuple | collections.deque):
        if len(theirs) != len(ours):
            yield f"{path}: {len(theirs)} entries -> {len(ours)} ({line})"
        else:
            for index, (one, other) in enumerate(zip(theirs, ours, strict=True)):
                yield from differences(one, other, f"{path}[{index}]")
    elif dataclasses.is_dataclass(theirs):
        yield from _parts(vars(theirs), vars(ours), path)
    elif theirs != ours and not (theirs != theirs and ours != ours):
        yield f"{path}: value {theirs!r} -> {ours!r}"


def _parts(theirs: Mapping[Any, Any], ours: Mapping[Any, Any], path: str) -> Iterator[str]:
    if list(theirs) != list(ours):
        yield f"{path}: keys {list(theirs)} -> {list(ours)}"
    for key in theirs:
        if key in ours:
            yield from differences(theirs[key], ours[key], f"{path}.{key}")


def _tensors(theirs: torch.Tensor, ours: torch.Tensor, path: str, line: str) -> Iterator[str]:
    if theirs.is_nested or ours.is_nested:
        if theirs.is_nested != ours.is_nested:
            yield line
        else:
            yield from differences(list(theirs.unbind()), list(ours.unbind()), path)
    elif (theirs.dtype, theirs.shape, theirs.layout) != (ours.dtype, ours.shape, ours.layout):
        yield line
    elif theirs.layout is torch.strided:
        if theirs.requires_grad != ours.requires_grad:
            yield f"{path}: requires_grad {theirs.requires_grad} -> {ours.requires_grad}"
        mine, yours = (x.detach().contiguous().view(-1) for x in (theirs, ours))
        if mine.numel() and not torch.equal(mine.view(torch.uint8), yours.view(torch.uint8)):
            yield f"{path}: values differ ({line})"
    elif not torch.equal(theirs.to_dense(), ours.to_dense()):
        yield f"{path}: values differ ({line})"


def attempt(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or what it raised."""
    try:
        return call()
    except Exception as error:
        return Raised(error)
