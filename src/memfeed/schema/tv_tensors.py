"""torchvision's tv_tensors: what a store keeps of one beside its numbers, and how it is made again.

torchvision is imported only to make one again, and only its own classes, whose names stand here.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch

NAMED = frozenset({"Image", "Mask", "Video"})
"""Classes that hold nothing beside their numbers: the leaf of the structure has their name."""

SIZED = frozenset({"BoundingBoxes", "KeyPoints"})
"""Classes with the size of the image that they belong to, which is kept for each row."""

SIZED_KEYS = ("values", "canvas_size")
_OPTIONS = ("format", "clamping_mode")


def class_name(value: Any) -> str:
    """Return the name of the class of a tv_tensor, or an empty string for any other value."""
    cls = type(value)
    if cls.__module__.startswith("torchvision.tv_tensors") and cls.__name__ in NAMED | SIZED:
        return cls.__name__
    return ""


def options_of(value: Any) -> dict[str, str | None]:
    """Return the format and other options of boxes or key points, as JSON values."""
    options = {name: getattr(value, name) for name in _OPTIONS if hasattr(value, name)}
    return {name: getattr(option, "name", option) for name, option in options.items()}


def parts_of(value: Any) -> tuple[torch.Tensor, list[int]]:
    """Return the numbers of boxes or key points, and the height and width of their image."""
    return value.as_subclass(torch.Tensor), [int(size) for size in value.canvas_size]


def name_wrapper(name: str) -> Callable[[Any], Any] | None:
    """Return a function that makes a tensor an Image, a Mask or a Video; None without torchvision."""
    cls = _class(name) if name in NAMED else None
    return None if cls is None else lambda value: _made(cls, value, {})


def sized_wrapper(name: str, options: Mapping[str, str | None]) -> Callable[[Sequence[Any]], Any]:
    """Return a function that makes boxes or key points of their parts; without torchvision it returns the numbers."""
    cls = _class(name) if name in SIZED else None
    if cls is None:
        return operator.itemgetter(0)
    known = inspect.signature(cls.__new__).parameters
    kept = {key: option for key, option in options.items() if key in known}
    return lambda parts: _made(cls, parts[0], {"canvas_size": tuple(parts[1]), **kept})


def _made(cls: Any, value: Any, options: Mapping[str, Any]) -> Any:
    """Return a tv_tensor that shares the memory of a tensor; the value itself where it cannot be one.

    The manifest may be of a stranger, or name a format that the installed torchvision does not have.
    """
    if not isinstance(value, torch.Tensor):
        return value
    try:
        return cls(value, **options)
    except (TypeError, ValueError, KeyError, RuntimeError):
        return value


@cache
def _class(name: str) -> Any:
    try:
        return getattr(import_module("torchvision.tv_tensors"), name, None)
    except ImportError:
        return None
