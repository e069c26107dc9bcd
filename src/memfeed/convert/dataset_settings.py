"""The settings in a dataset: numbers, text and tables of its pipelines and configs, compared when an epoch begins."""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import os
import random
import types
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from memfeed.convert.digests import SOME, hash_value
from memfeed.convert.module_data import attributes_of
from memfeed.convert.plain_data import (
    DEEPEST,
    DEEPEST_OBJECT,
    MOST_PARTS,
    OF_MODULE,
    SETTINGS,
    WIDEST,
    content_of,
    is_array,
    is_owner,
    is_record,
)
from memfeed.splitting.places import CallablePlace, part_of
from memfeed.system.code_content import held_by

MOST_SETTINGS = 10_000
MOST_ENTRIES = 20_000  # of a table of a pipeline that are hashed; of a longer one some are
SMALL_BYTES = 1 << 20  # an array of a pipeline with more is no setting
EMPTY = "None or empty"  # of an attribute of a dataset; a step may keep what it drew in the place of None

_GENERATORS = (random.Random, torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, type)
_OF_MODULES = ("_modules", "_parameters", "_buffers")


class _OfClass:
    """An attribute of the class: other datasets may change it, so what counts is another one of the object's own."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OfClass) or other == self._value

    def __hash__(self) -> int:
        return hash(_OfClass)

    def __repr__(self) -> str:
        return f"{self._value!r} in its class"


class _Length(int):
    """The length of a container in a pipeline, with the container."""

    container: Any


def is_replaced(length: Any, later: Any) -> bool:
    """Return True for the lengths of two containers, of which the later one stands where the other one was."""
    are_lengths = isinstance(length, _Length) and isinstance(later, _Length)
    return are_lengths and length.container is not later.container


def settings_of(dataset: Any, places: Sequence[CallablePlace] = ()) -> dict[str, Any]:
    """Return the numbers, text and classes of the pipelines of a dataset, and of those inside it, by their paths.

    A pipeline is any attribute that can be called, or a list of such. Of a function these are its code and what it
    closes over. What a step keeps for itself, with a name that begins with ``_``, and generators are left out.

    Args:
        dataset: any.
        places: callables of the dataset that count too, with the objects on the way to them.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    _collect_owner(dataset, "", found, seen, 0)
    for place in places:
        value = dataset
        with contextlib.suppress(Exception):  # the way is another one now
            for end, key in enumerate(place.path, 1):
                value = part_of(value, key)
                text = str(CallablePlace(place.path[:end], value)).removeprefix("dataset.")
                text = OF_MODULE + text if any(kind == "global" for kind, _ in place.path[:end]) else text
                if isinstance(value, dict | list | tuple):
                    found[f"len({text})"] = len(value)
                else:
                    _collect(value, text, found, seen, 0)
    return found


def _collect_owner(owner: Any, path: str, found: dict[str, Any], seen: set[int], depth: int) -> None:
    if id(owner) in seen or depth > DEEPEST or not is_owner(owner, path):
        return
    seen.add(id(owner))
    for cls in reversed(type(owner).__mro__):
        for name, value in list(vars(cls).items()):  # another thread may add to it
            if isinstance(value, _PLAIN) and name[:2] != "__":
                found[f"{path}.{name}" if path else name] = _OfClass(value)
    for name, value in attributes_of(owner):
        inner = f"{path}.{name}" if path else name
        if found.pop(inner, None) and isinstance(value, _PLAIN):
            found[inner] = value
        if value is None or (isinstance(value, list | tuple | dict | set | deque) and _is_empty(value)):
            found[inner] = EMPTY
        elif callable(value) or _are_callable(value) or _is_config(value):
            _collect(value, inner, found, seen, 0)
        elif isinstance(value, list | tuple | dict):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, one in itertools.islice(items, MOST_PARTS):
                if _is_config(one):
                    _collect(one, f"{inner}[{key!r}]", found, seen, 0)
                elif not is_array(one) and hasattr(one, "__getitem__") and hasattr(one, "__dict__"):
                    _collect_owner(one, f"{inner}[{key!r}]", found, seen, depth + 1)
        else:
            _collect_owner(value, inner, found, seen, depth + 1)


def _is_empty(value: Any) -> bool:
    with contextlib.suppress(Exception):  # a class of the user's: the len of a sparse matrix raises
        return len(value) == 0
    return False


def _are_callable(value: Any) -> bool:
    return isinstance(value, list | tuple) and 0 < len(value) <= MOST_PARTS and all(map(callable, value))


def _is_config(value: Any, depth: int = 0) -> bool:
    """Return True for an object with nothing but settings, as ``argparse`` and dataclasses make them.

    Others change without a read: a logger, a trainer, a progress bar.
    """
    if depth > DEEPEST_OBJECT or not is_record(value):
        return False
    parts = [one for _, one in attributes_of(value)]
    return 0 < len(parts) <= WIDEST and all(_is_setting(one, depth) or _is_config(one, depth + 1) for one in parts)


def _is_setting(value: Any, depth: int) -> bool:
    if isinstance(value, list | tuple | dict | set | frozenset):
        parts = list(value.values()) if isinstance(value, dict) else list(value)[: SETTINGS + 1]
        return len(parts) <= SETTINGS and depth < DEEPEST_OBJECT and all(_is_setting(one, depth + 1) for one in parts)
    return isinstance(value, _PLAIN + (os.PathLike,)) or content_of(value) is not None


def _collect(value: Any, path: str, found: dict[str, Any], seen: set[int], depth: int) -> None:
    """Add what one step of a pipeline, or one part of it, holds."""
    if len(found) >= MOST_SETTINGS or depth > DEEPEST or isinstance(value, _GENERATORS):
        return
    if isinstance(value, _PLAIN):
        found[path] = value if value == value else "nan"
        for name, one in list(vars(value).items()) if isinstance(value, type) else ():
            if isinstance(one, _PLAIN) and not isinstance(one, type) and name[:1] != "_":
                found[f"{path}.{name}"] = one
        return
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        if value.nbytes <= SMALL_BYTES and (text := hash_value(value)) is not None:
            found[path] = text
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, list | tuple | set | frozenset | Mapping):
        found[f"len({path})"] = length = _Length(len(value))
        length.container = value
        if len(value) > MOST_SETTINGS // 100 or isinstance(value, set | frozenset):
            found[path] = hash_value(value, SOME if len(value) > MOST_ENTRIES else 0)
            return
        found[path] = type(value)  # a Compose may take the place of a list
        for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            _collect(one, f"{path}[{key!r}]" if type(key) in (int, str) else f"{path}[?]", found, seen, depth + 1)
    elif isinstance(value, types.FunctionType):
        found[path] = value.__code__
        for name, one in held_by(value):
            _collect(one, f"{path}.{name}", found, seen, depth + 1)
    elif isinstance(value, types.MethodType):
        _collect(value.__func__, path, found, seen, depth + 1)  # a function may take its place
    elif isinstance(value, functools.partial):
        found[path] = functools.partial
        for name in ("func", "args", "keywords"):
            _collect(getattr(value, name), f"{path}.{name}", found, seen, depth + 1)
    else:
        found[path] = type(value)
        for name, one in attributes_of(value):
            if name[:1] != "_":
                _collect(one, f"{path}.{name}", found, seen, depth + 1)
            elif name in _OF_MODULES and isinstance(value, torch.nn.Module):
                for key, part in one.items():
                    _collect(part, f"{path}[{key}]", found, seen, depth + 1)
