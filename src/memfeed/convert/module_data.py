"""Data and folders that the code of a dataset finds in no attribute: in variables around it, and written in it."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterator, Set
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from memfeed.splitting.generators import has_class, is_installed, is_library
from memfeed.splitting.module_names import functions_of, imported_by, read_by
from memfeed.store.store import Store
from memfeed.system.code_content import held_by, names_used, texts_used

_MOST_ENTERED = 512  # functions, classes, objects and containers
_MOST_ITEMS = 64  # of a container that may hold steps or settings; a larger one holds data
_DEEPEST_SETTING = 3
_CLOSED = (Dataset, Store, types.ModuleType, torch.Tensor, np.ndarray, str, bytes, os.PathLike)
_SCALARS = (str, bytes, int, float, complex, type(None))
_OF_CALLABLES = {functools.partial: ("func", "args", "keywords"), types.MethodType: ("__func__", "__self__")}
MAKERS = ("__init__", "__post_init__", "__new__", "__setstate__")  # what they name may be read nowhere else
_WEIGHTS = ("_parameters", "_buffers")  # of a model: they may be drawn at random


def values_read(owner: Any) -> dict[str, Any]:
    """Return what the code that makes an object's samples finds outside of the object's attributes.

    The code is that of its methods, and of the functions, classes and objects of the user that these and its attributes
    reach. It finds variables of modules of the user and of functions around, default arguments, arguments of partials,
    and those attributes of what it reaches that it names. Names are expressions: "FILES", "args.root", and
    ".load.keywords['table']" of what the attribute ``load`` reaches. One that is another value in another module has
    that module's name before.
    """
    found: dict[str, Any] = {}
    of_objects, words = dict[str, str](), {"_value_"}  # of a member of an Enum
    entered: dict[int, Any] = {}  # kept, so that no id is used again
    ahead = deque([("", owner, True)])
    while ahead and len(entered) < _MOST_ENTERED:
        path, one, is_own = ahead.popleft()
        if id(one) in entered:
            continue
        entered[id(one)] = one
        if isinstance(one, types.FunctionType) and one.__name__ not in MAKERS:
            words.update(names_used(one.__code__), texts_used(one.__code__))
        is_object = not isinstance(one, list | tuple | dict) and not _is_code(one)
        is_listed = not is_own and (not is_object or _is_of_user(one))
        for name, value in _reached_from(one, path):
            if is_listed and found.setdefault(name, value) is not value:
                name = f"{getattr(one, '__module__', None)}.{name}"
                found[name] = value
            if is_object:
                of_objects[name] = name.rpartition(".")[2]
            if is_entered(value):
                ahead.append((name, value, is_own and isinstance(value, list | tuple | dict)))
    return {name: value for name, value in found.items() if name not in of_objects or of_objects[name] in words}


def parts_of(one: Any, path: str) -> list[tuple[str, Any]]:
    """Return the items of a container, and the attributes of any other object, by the expressions that reach them."""
    parts: list[tuple[str, Any]] = []
    with contextlib.suppress(Exception):  # an object may raise when it is asked for its attributes
        if isinstance(one, list | tuple | dict):
            items = one.items() if isinstance(one, dict) else enumerate(one)
            parts = [(f"{path}[{key!r}]", value) for key, value in items if type(key) in (int, str)]
        elif isinstance(one, weakref.ref):
            parts = [(f"{path}()", one())]
        else:
            names = next((names for kind, names in _OF_CALLABLES.items() if isinstance(one, kind)), ())
            parts = [(f"{path}.{name}", getattr(one, name)) for name in names]
            hidden = _hidden_of(one) if isinstance(one, torch.nn.Module) else ()
            own = [(name, value) for name, value in attributes_of(one) if name[:2] != "__" or name == "__wrapped__"]
            parts += [(f"{path}.{name}", value) for name, value in own if name not in hidden]
    return parts


def _reached_from(one: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield what a function, a class, an object or a container refers to, by the expressions that reach it."""
    parts = parts_of(one, path)
    if isinstance(one, types.FunctionType):
        parts += _read_in(one)
    elif not isinstance(one, list | tuple | dict):
        cls = one if isinstance(one, type) else type(one)
        if not path or _is_of_user(cls):
            parts += [(f"{path}.{name}", function) for name, function in functions_of(cls)]
            parts += [(f"{path}.__class__", cls)] if path and cls is not one else []
    yield from ((name, value) for name, value in parts if has_class(value))


def _hidden_of(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the attributes of a model that are not looked into: also the parts of one of a library that has weights.

    No code of the user runs there, and there may be hundreds. A transform of a library has no weights.
    """
    is_of_library = not _is_of_user(model) and next(model.parameters(), None) is not None
    return (*_WEIGHTS, "_modules") if is_of_library else _WEIGHTS


def _read_in(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function closes over, its default arguments, and what it reads by name."""
    yield from held_by(function)
    if not is_installed(function):
        with contextlib.suppress(Exception):  # an object may raise when it is asked for its attributes
            yield from read_by(function, has_settings).items()
        yield from imported_by(function)


def attributes_of(value: Any) -> list[tuple[str, Any]]:
    """Return the names and values of an object's own attributes, also of those in slots.

    A value that cannot be asked for its class is left out: the ``f`` of ``np.load('a.npz')``, a proxy without object.
    """
    found: list[tuple[str, Any]] = []
    with contextlib.suppress(Exception):  # it has none, and its class may raise anything then
        found += value.__dict__.items()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with contextlib.suppress(Exception):  # it is not set
                found += [(name, getattr(value, name))] if name[:2] != "__" else []
    return [(name, one) for name, one in found if has_class(one)]


def _is_code(value: Any) -> bool:
    return isinstance(value, types.FunctionType | types.MethodType | functools.partial | weakref.ref)


def is_entered(value: Any) -> bool:
    """Return True for what may hold code or data of the user: of libraries, only what can be called."""
    try:
        if _is_code(value):
            return True
        if isinstance(value, list | tuple | dict):
            parts = list(islice(value.values() if isinstance(value, dict) else value, _MOST_ITEMS + 1))
            return len(parts) <= _MOST_ITEMS and not all(isinstance(one, _SCALARS) for one in parts)
        if isinstance(value, _CLOSED) or _module_of(value).startswith("memfeed."):
            return False
        return _is_of_user(value) or (callable(value) and hasattr(value, "__dict__") and not isinstance(value, type))
    except Exception:  # a class of the user's may raise when it is asked for anything
        return False


def is_code_of_user(value: Any) -> bool:
    """Return True for a function or a class that the user wrote."""
    if isinstance(value, types.FunctionType):
        return not is_installed(value)
    return isinstance(value, type) and _is_of_user(value)


def _is_of_user(value: Any) -> bool:
    """Return True for a class of the user, and for an object of one."""
    module = sys.modules.get(name := _module_of(value))
    return name in ("__main__", "__mp_main__") or (module is not None and not is_library(module))


def _module_of(value: Any) -> str:
    return str((value if isinstance(value, type) else type(value)).__module__)


def folders_in_code(owner: Any, values: dict[str, Any]) -> list[str]:
    """Return the folders that methods of an owner's classes write before the names of files, or read by name.

    Those of settings count, whose name a method or its function has: `args.root`, `self.args.root`, `CFG["root"]`.
    ``values`` are those of `values_read`.
    """
    codes = [function.__code__ for _, function in functions_of(type(owner))]
    texts = dict.fromkeys(text for code in codes for text in texts_used(code))
    written = [text for text in texts if os.sep in text and text.strip("./") and is_folder(text)]
    codes += [one.__code__ for one in values.values() if isinstance(one, types.FunctionType) and not is_installed(one)]
    words = {word for code in codes for word in (*names_used(code), *texts_used(code))}
    settings = [*values.values(), *getattr(owner, "__dict__", {}).values()]
    return list(dict.fromkeys([*written, *(folder for one in settings for folder in _folders_of(one, words, 0))]))


def _folders_of(value: Any, words: Set[str], depth: int) -> Iterator[str]:
    """Yield a folder, and those that an object or a dict of settings has by one of these names."""
    if is_folder(value):
        yield os.fspath(value)
    elif depth < _DEEPEST_SETTING:
        inner: list[Any] = []
        with contextlib.suppress(Exception):  # a class of the user's that raises
            if not isinstance(value, Dataset | torch.nn.Module):
                known = value if isinstance(value, dict) else vars(value) if has_settings(value) else {}
                inner = [known[word] for word in sorted(known.keys() & words)]
        for one in inner:
            yield from _folders_of(one, words, depth + 1)


def is_folder(value: Any) -> bool:
    """Return True for the path of a directory. A word without a separator is no path."""
    cls = type(value)  # `__class__` raises in some values, as the `f` of np.load("data.npz")
    is_path = issubclass(cls, os.PathLike) or (issubclass(cls, str) and (os.sep in value or value[:1] in ".~"))
    try:
        return is_path and os.path.isdir(value)
    except ValueError:
        return False


def has_settings(value: Any) -> bool:
    """Return True for an object whose attributes a program reads as settings: a class, a namespace of arguments."""
    is_function = isinstance(value, types.FunctionType | types.MethodType | types.ModuleType)
    try:
        return not is_function and hasattr(value, "__dict__")
    except Exception:  # of a class of the user's, asked for an attribute
        return False
