"""Find the callables of a dataset and of what it wraps, and put others in their places in a copy of it."""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from memfeed.errors import SplitError
from memfeed.schema.graphs import is_graph
from memfeed.splitting.generators import is_installed
from memfeed.splitting.module_names import named_by, with_names

Key = tuple[str, Any]
"""("attribute", its name), ("item", index or key of a list or dict), ("method", its name), or ("global", its name)."""
_DEEPEST = 8
_CONTAINERS = (dict, list, tuple, torch.nn.ModuleList)
_VALUES = {str, bytes, bool, int, float, type(None)}
_MOST = 256  # items of a container that are looked at
_MOST_HELPERS = 16  # parts of a container with objects of the program: longer ones hold records
_OF_COPIES = {"__copy__", "__del__", "__getstate__", "__reduce__", "__reduce_ex__"}
_SEQUENCES = (list, tuple, torch.nn.Sequential, torch.nn.ModuleList)


@dataclass(frozen=True, eq=False)
class CallablePlace:
    """A callable of a dataset, and the way to it."""

    path: tuple[Key, ...]
    value: Any

    def __str__(self) -> str:
        """Return the expression that reaches it."""
        text = "dataset"
        for kind, key in self.path:
            text = key[1] if kind == "global" else f"{text}[{key!r}]" if kind == "item" else f"{text}.{key}"
        return text


def find_places(
    dataset: Any, name: str | None = None, *, names: bool = False, helpers: bool = False
) -> list[CallablePlace]:
    """Return the callables that a dataset and those that it wraps hold, in attributes, lists, dicts and methods.

    ``name`` is the attribute that holds the pipeline; None for all. ``names`` says to return those too that methods
    find by name in their modules, ``helpers`` to look into other objects too, of classes of the program or of the
    package of what holds them; into each where it is found first.
    """
    found = list(_places(dataset, (), 0, {id(dataset)}, names, set() if helpers else None))
    if name is None:
        return found
    kinds = {"attribute": name, "method": name}
    named = [
        place
        for place in found
        if any(
            kinds.get(kind) == key or (kind == "global" and key[1].rpartition(".")[2] == name)
            for kind, key in place.path
        )
    ]
    if not named:
        raise SplitError(
            f"found no attribute {name!r} that can be called in {type(dataset).__name__}, nor in the datasets inside "
            f"it; expected one of {', '.join(map(str, found[:8])) or 'none, for it holds no callable'}"
        )
    return named


def steps_in(pipeline: Any) -> list[tuple[tuple[Key, ...], Any]]:
    """Return the steps of a sequence of steps, each with the way to it; [] for any other callable.

    A sequence is a list, a Sequential or ModuleList, or an object whose attribute ``transforms`` is one, as a Compose.
    If it does not call its steps in order, the proof of a cut finds it.
    """
    if isinstance(pipeline, torch.jit.ScriptModule):  # compiled as a whole
        return []
    inner = pipeline if isinstance(pipeline, _SEQUENCES) else getattr(pipeline, "transforms", None)
    if not isinstance(inner, _SEQUENCES) or not len(inner) or not all(map(callable, inner)):
        return []
    start: tuple[Key, ...] = ()
    if inner is not pipeline:
        holders = {**getattr(pipeline, "__dict__", {}), **getattr(pipeline, "_modules", {})}
        name = next((name for name, value in holders.items() if value is inner), None)
        if name is None:  # a property that makes a list of steps: another one cannot be put in its place
            return []
        start = (("attribute", name),)
    return [((*start, ("item", index)), step) for index, step in enumerate(inner)]


def replaced(value: Any, changes: Mapping[tuple[Key, ...], Any]) -> Any:
    """Return a shallow copy of an object with other values at these paths. The object itself does not change."""
    if () in changes:
        return changes[()]
    by_key: dict[Key, dict[tuple[Key, ...], Any]] = {}
    for path, new in changes.items():
        by_key.setdefault(path[0], {})[path[1:]] = new
    try:
        changed = copy.copy(value) if not isinstance(value, tuple) else list(value)
    except Exception as error:  # a class may raise anything
        raise SplitError(
            f"found a {type(value).__name__} that cannot be copied ({error}), so its steps cannot be watched; expected "
            "a pipeline or dataset that copy.copy copies"
        ) from error
    if changed is value:
        raise SplitError(
            f"found a {type(value).__name__} of which copy.copy returns the same object, so its steps cannot be "
            "watched; expected a pipeline or dataset that copy.copy copies"
        )
    names = {key: inner for (kind, key), inner in by_key.items() if kind == "global"}
    if names:  # before methods are bound to it
        values = named_by(type(value))
        with_names(changed, {key: replaced(values[key], inner) for key, inner in names.items()})
    is_modules = isinstance(value, torch.nn.Sequential | torch.nn.ModuleList)
    for (kind, key), inner in by_key.items():
        if kind == "item":
            old = value[key]
            new = replaced(old, inner)
            if is_modules:
                changed.__dict__["_modules"] = {**changed.__dict__["_modules"], str(key): new}
            else:
                changed[key] = new
        elif kind == "method":
            _set(changed, key, inner[()].bound_to(changed))
        elif kind == "attribute":
            _set(changed, key, replaced(_get(value, key), inner))
    return type(value)(changed) if isinstance(value, tuple) else changed


def part_of(owner: Any, key: Key) -> Any:
    """Return what an object has at one key of a path."""
    kind, name = key
    if kind == "global":
        return named_by(type(owner))[name]
    return owner[name] if kind == "item" else getattr(owner, name)


def _get(owner: Any, name: str) -> Any:
    """Return an attribute as it is kept, without properties."""
    inner = getattr(owner, "__dict__", {})
    modules = inner.get("_modules", {})
    return inner[name] if name in inner else modules[name] if name in modules else getattr(owner, name)


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a copy past its properties: some raise when they are set."""
    inner = getattr(owner, "__dict__", None)
    if inner is not None and name in inner.get("_modules", {}):
        inner["_modules"] = {**inner["_modules"], name: value}
    elif inner is not None:
        inner[name] = value
    else:
        object.__setattr__(owner, name, value)


def _places(
    owner: Any, path: tuple[Key, ...], depth: int, seen: set[int], names: bool, helpers: set[int] | None
) -> Iterator[CallablePlace]:
    """Yield the callables of an owner. ``helpers`` are the other objects that were looked into, None to enter none."""
    if depth > _DEEPEST:
        return
    for key, value in _children(owner) + (_named_steps(owner) if names else []):
        where = (*path, key)
        if isinstance(value, type | types.ModuleType | str | bytes | torch.Tensor | np.ndarray) or is_graph(value):
            continue  # a graph is data, though it can be called and has items
        if key[0] == "method":
            yield CallablePlace(where, value)
            continue
        if is_pipeline(value):
            yield CallablePlace(where, value)
            is_code = isinstance(value, types.FunctionType | types.MethodType | torch.jit.ScriptModule)
            is_wrapper = "__wrapped__" in getattr(value, "__dict__", {})  # of functools: a copy of it is itself
            descends = not steps_in(value) and not is_code and not is_wrapper
        elif helpers is None or _is_owner(value):
            descends = _is_owner(value)
        else:  # each once, and not all of a large tree: they may refer to one another in many ways
            descends = id(value) not in helpers and len(helpers) < _MOST and _holds_helpers(value, owner)
            helpers |= {id(value)} if descends else set()
        if descends and id(value) not in seen:
            yield from _places(value, where, depth + 1, seen | {id(value)}, names, helpers)


def is_pipeline(value: Any) -> bool:
    """Return True for a callable, which may be a step or a pipeline."""
    return callable(value) and not isinstance(value, type | torch.nn.ModuleList | weakref.ReferenceType)


def _is_owner(value: Any) -> bool:
    """Return True for what may hold a pipeline: datasets, and short containers of datasets or callables.

    Each container is looked into once: records may refer to one another.
    """
    if not isinstance(value, _CONTAINERS):
        return _is_dataset(value)
    left, seen = [(value, 0)], set[int]()
    while left:
        container, depth = left.pop()
        if id(container) in seen or depth > _DEEPEST:
            continue
        seen.add(id(container))
        for part in islice(container.values() if isinstance(container, dict) else container, _MOST):
            if type(part) in _VALUES:
                continue
            if is_pipeline(part) or _is_dataset(part):
                return True
            if isinstance(part, _CONTAINERS):
                left.append((part, depth + 1))
    return False


def _holds_helpers(value: Any, owner: Any) -> bool:
    """Return True for an object that a dataset may leave its random steps to, and for a short container of some."""
    if isinstance(value, dict | list | tuple):
        parts = list(value.values() if isinstance(value, dict) else value) if len(value) <= _MOST_HELPERS else []
        return any(_is_helper(part, owner) for part in parts)
    return _is_helper(value, owner)


def _is_helper(value: Any, owner: Any) -> bool:
    """Return True for an object with attributes, of a class of the program or of the package of its owner.

    A class that says how it is copied or ends does not count: a copy may lack a file, or close it.
    """
    if not isinstance(getattr(value, "__dict__", None), dict) or isinstance(value, type | types.ModuleType):
        return False
    package, of_owner = (type(one).__module__.partition(".")[0] for one in (value, owner))
    defined = [item for cls in type(value).__mro__[:-1] for item in vars(cls).items()]
    is_own = any(isinstance(one, types.FunctionType) and not is_installed(one) for _, one in defined)
    return (package == of_owner or is_own) and _OF_COPIES.isdisjoint(name for name, _ in defined)


def _is_dataset(value: Any) -> bool:
    is_plain = isinstance(value, dict | list | tuple | set | str | bytes | torch.Tensor | np.ndarray | range)
    return isinstance(value, Dataset) or (not is_plain and hasattr(value, "__getitem__"))


def _children(owner: Any) -> list[tuple[Key, Any]]:
    if isinstance(owner, dict):
        return [(("item", key), value) for key, value in list(owner.items())[:_MOST]]
    if isinstance(owner, list | tuple | torch.nn.ModuleList):
        return [(("item", index), value) for index, value in enumerate(list(owner)[:_MOST])]
    slots = [name for cls in type(owner).__mro__ for name in getattr(cls, "__slots__", ())]
    inner = {name: getattr(owner, name) for name in slots if hasattr(owner, name)}
    inner |= getattr(owner, "__dict__", {})
    inner |= inner.pop("_modules", None) or {} if isinstance(owner, torch.nn.Module) else {}
    found: list[tuple[Key, Any]] = [
        (("attribute", name), value) for name, value in inner.items() if not (name[:1] == "_" and name[-6:] == "_hooks")
    ]
    return found + list(_of_classes(owner, inner))


def _named_steps(owner: Any) -> list[tuple[Key, Any]]:
    """Return the pipelines, containers of some, and datasets that methods of an owner find by name in their modules.

    Functions are none: most of them read or convert samples, and one that draws would run in one process.
    """
    if isinstance(owner, dict | list | tuple) or (callable(owner) and not _is_dataset(owner)):
        return []
    functions = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, np.ufunc)
    return [
        (("global", name), value)
        for name, value in named_by(type(owner)).items()
        if not isinstance(value, functions) and (is_pipeline(value) or _holds_pipelines(value))
    ]


def _holds_pipelines(value: Any) -> bool:
    """Return True for a dataset of torch, and for a container of pipelines."""
    return isinstance(value, Dataset) or (isinstance(value, dict | list | tuple) and _is_owner(value))


def _of_classes(owner: Any, inner: Mapping[str, Any]) -> Iterator[tuple[Key, Any]]:
    """Yield the methods that a user wrote: one may be the random step. Also yield steps of the class."""
    is_helper = not callable(owner) and not isinstance(owner, dict | list | tuple)
    if not (_is_dataset(owner) or is_helper) or not hasattr(owner, "__dict__"):
        return
    for cls in type(owner).__mro__[:-1]:
        for name, value in list(vars(cls).items()):  # another thread may add to it
            if name in inner or (name[:2] == "__" and name[-2:] == "__"):
                continue
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if isinstance(function, types.FunctionType):
                if not is_installed(function):
                    yield ("method", name), getattr(owner, name)
            elif callable(value) and not hasattr(type(value), "__get__"):
                yield ("attribute", name), value
