"""Data and folders that methods of a dataset find in no attribute: in variables around them, and written in code."""

from __future__ import annotations

import contextlib
import os
import types
from typing import Any

from memfeed.splitting.generators import is_installed
from memfeed.splitting.module_names import functions_of, read_by
from memfeed.system.code_content import texts_used

_MOST_FUNCTIONS = 64


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

    ``values`` are those of `values_read`.
    """
    functions = [function for _, function in functions_of(type(owner))]
    texts = dict.fromkeys(text for function in functions for text in texts_used(function.__code__))
    written = [text for text in texts if os.sep in text and text.strip("./") and is_folder(text)]
    return [*written, *(os.fspath(one) for one in values.values() if is_folder(one))]


def is_folder(value: Any) -> bool:
    """Return True for the path of a directory. A word without a separator is no path."""
    is_path = isinstance(value, os.PathLike) or (isinstance(value, str) and (os.sep in value or value[:1] in ".~"))
    try:
        return is_path and os.path.isdir(value)
    except ValueError:
        return False


def _has_settings(value: Any) -> bool:
    """Return True for an object whose attributes a program reads as settings: a class, a namespace of arguments."""
    is_function = isinstance(value, types.FunctionType | types.MethodType | types.ModuleType)
    return not is_function and hasattr(value, "__dict__")
