"""Data and folders that methods of a dataset find in no attribute: in variables around them, and written in code."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from memfeed.splitting.generators import is_installed
from memfeed.splitting.module_names import functions_of, read_by
from memfeed.system.code_content import names_used, texts_used

_MOST_FUNCTIONS = 64
_DEEPEST_SETTING = 3


def values_read(owner: Any) -> dict[str, Any]:
    """Return what the methods of an object, and functions that these call, read by name outside of the object.

    These are variables of modules of the user, and of functions around. Names are expressions: "FILES", "args.root".
    One that is another value in another module has that module's name before it.
    """
    found: dict[str, Any] = {}
    ahead = [function for _, function in functions_of(type(owner))]
    seen: set[types.FunctionType] = set()
    while ahead and len(seen) < _MOST_FUNCTIONS:
        function = ahead.pop()
        if function in seen:
            continue
        seen.add(function)
        named = _closed_over(function)
        with contextlib.suppress(Exception):  # an object may raise when it is asked for its attributes
            named |= read_by(function, _has_settings)
        for name, value in named.items():
            if found.setdefault(name, value) is not value:
                found[f"{function.__module__}.{name}"] = value
        ahead += [one for one in named.values() if isinstance(one, types.FunctionType) and not is_installed(one)]
    return found


def _closed_over(function: types.FunctionType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            found[name] = cell.cell_contents
    return found


def folders_in_code(owner: Any, values: dict[str, Any]) -> list[str]:
    """Return the folders that methods of an owner's classes write before the names of files, or read by name.

    Those of settings count, whose name a method or its function has: `args.root`, `self.args.root`, `CFG["root"]`.
    ``values`` are those of `values_read`.
    """
    codes = [function.__code__ for _, function in functions_of(type(owner))]
    texts = dict.fromkeys(text for code in codes for text in texts_used(code))
    written = [text for text in texts if os.sep in text and text.strip("./") and is_folder(text)]
    codes += [one.__code__ for one in values.values() if isinstance(one, types.FunctionType) and not is_installed(one)]
    words = list(dict.fromkeys(word for code in codes for word in (*names_used(code), *texts_used(code))))
    settings = [*values.values(), *getattr(owner, "__dict__", {}).values()]
    return list(dict.fromkeys([*written, *(folder for one in settings for folder in _folders_of(one, words, 0))]))


def _folders_of(value: Any, words: Sequence[str], depth: int) -> Iterator[str]:
    """Yield a folder, and those that an object or a dict of settings has by one of these names."""
    if is_folder(value):
        yield os.fspath(value)
    elif depth < _DEEPEST_SETTING:
        inner: list[Any] = []
        with contextlib.suppress(Exception):  # a class of the user's that raises
            if not isinstance(value, Dataset | torch.nn.Module):
                known = value if isinstance(value, dict) else vars(value) if _has_settings(value) else {}
                inner = [known[word] for word in words if word in known]
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


def has_class(value: Any) -> bool:
    """Return False for a value that raises when it is asked for its class."""
    try:
        return value.__class__ is not None
    except Exception:
        return False


def _has_settings(value: Any) -> bool:
    """Return True for an object whose attributes a program reads as settings: a class, a namespace of arguments."""
    is_function = isinstance(value, types.FunctionType | types.MethodType | types.ModuleType)
    return not is_function and hasattr(value, "__dict__")
