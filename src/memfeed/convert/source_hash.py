"""Hashes of the source of a dataset: of its class, and of what of the user's its samples are made by."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from memfeed.convert.module_data import (
    MAKERS,
    attributes_of,
    has_settings,
    is_code_of_user,
    is_entered,
    is_folder,
    parts_of,
)
from memfeed.splitting.generators import attribute_of, is_installed
from memfeed.splitting.module_names import imported_by, names_assigned, read_by
from memfeed.store.store import Store
from memfeed.system.code_content import content_of, held_by, names_used, values_written

_MOST_CALLED = 512  # functions and classes whose source is hashed
_MOST_ENTERED = 4096  # objects that may hold such
_MOST_ITEMS = 64  # of a tuple of constants; a longer one is data, which is compared as such
_MOST_WRAPPED = 16  # functions, one in another
_INNER = ("__wrapped__", "__func__", "fget", "func")  # of decorated functions, static methods, properties, partials
_CLOSED = (str, bytes, int, float, complex, type(None), torch.Tensor, np.ndarray, Store, types.ModuleType)
_DIGITS = 16  # of a hash


def hash_source(dataset: Any, without: Sequence[Any] = ()) -> tuple[str, str]:
    """Return hashes of the source of a dataset's class and of those it wraps, and the name of the class.

    What ``without`` holds does not count: steps of a pipeline that was cut, on which no stored value depends.
    The first 16 digits are of these classes. For each function or class of the user that their methods find by name,
    or that their attributes hold, for each base class and each function of a class, for each default argument that is a
    number or text, and for each variable beside them that they name, 16 digits of its name and 16 of its source follow.
    """
    hashed, name = xxhash.xxh3_64(), f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    inside = _inside(dataset)
    for cls in dict.fromkeys(map(type, inside)):
        try:
            text = _text_of(cls)
        except Exception:  # defined in a notebook or at a prompt, built in, or in a file that is no Python any more
            text = _source_of(cls)
        hashed.update(text.encode("utf-8", "replace"))
    called = {_hash(word) + _hash(text) for word, text in _called_by(inside, without)}
    return "".join([hashed.hexdigest(), *sorted(called)]), name


def _inside(dataset: Any) -> list[Any]:
    """Return a dataset and those inside it: in its attributes, and in short lists there."""
    found: dict[int, Any] = {}
    ahead = [dataset]
    while ahead and len(found) < _MOST_CALLED:
        one = ahead.pop(0)
        if one is None or id(one) in found:
            continue
        found[id(one)] = one
        ahead.append(attribute_of(one, "dataset"))
        for _, value in attributes_of(one):
            parts = value if type(value) in (list, tuple) and len(value) <= _MOST_CALLED else [value]
            ahead += [part for part in parts if isinstance(part, Dataset) and not isinstance(part, Store)]
    return list(found.values())


def is_changed_source(old: str, new: str) -> bool:
    """Return True if `hash_source` gave these for a source and for a changed one.

    A name that only one of them has is no change: another program, or a rare sample, has imported its module.
    """
    (own, gone), (own_now, come) = ((one[:_DIGITS], _hashes_in(one)) for one in (old, new))
    return own != own_now or not {one[:_DIGITS] for one in gone - come}.isdisjoint(one[:_DIGITS] for one in come - gone)


def _hashes_in(source: str) -> set[str]:
    return {source[at : at + 2 * _DIGITS] for at in range(_DIGITS, len(source), 2 * _DIGITS)}


def _hash(text: str) -> str:
    return xxhash.xxh3_64(text.encode("utf-8", "replace")).hexdigest()


def _called_by(owners: Sequence[Any], without: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield the names and sources of functions and classes of the user: of what datasets, and what these reach, find.

    What only makes the datasets is left out: what it gives them are attributes.
    """
    found, entered = dict[int, Any](), {id(one): one for one in without}  # kept, so that no id is used again
    own = dict.fromkeys(map(type, owners))
    ahead = deque(pair for cls in own for pair in _found_in("", cls, MAKERS))
    ahead += [pair for one in owners for pair in parts_of(one, "")]
    while ahead and len(found) < _MOST_CALLED and len(entered) < _MOST_ENTERED:
        name, value = ahead.popleft()
        word = name.rpartition(".")[2]
        if name.endswith("=)") and _is_constant(value):
            yield word, repr(value)
        if id(value) in entered or isinstance(value, _CLOSED):
            continue
        entered[id(value)] = value
        with contextlib.suppress(Exception):  # an object of the user's may raise when it is asked for anything
            for code in [value] if isinstance(value, type) else [*_functions_in(value), type(value)]:
                if id(code) not in found and code not in own and is_code_of_user(code):
                    found[id(code)] = code
                    yield word, _source_of(code)
                    ahead += _found_in(name, code)
            if not isinstance(value, type) and (is_entered(value) or isinstance(value, Dataset)):
                ahead += parts_of(value, name)
    functions = [code for code in found.values() if isinstance(code, types.FunctionType)]
    yield from _values_named(functions)


def _values_named(functions: Sequence[types.FunctionType]) -> Iterator[tuple[str, str]]:
    """Yield the source of the values that functions name, of variables in their files, and in their classes.

    Of those that another file, the command line or a class has (`args.size`, `Config.SIZE`), the value itself counts.
    One that a function assigns is no setting: it may count what is read.
    """
    assigned = {name for one in functions if one.__name__ not in MAKERS for name in names_assigned(one.__code__)}
    files = {one.__code__.co_filename for one in functions}
    written = {file: _until_written(values_written, file, file) for file in files}
    for one in functions:
        known, named = written[one.__code__.co_filename], read_by(one, has_settings)
        before = one.__qualname__.rpartition(".")[0]
        names = {name.partition(".")[0] for name in named} | {f"{before}.{name}" for name in names_used(one.__code__)}
        yield from ((f"{name}=", known[name]) for name in names if name in known)
        for name, value in named.items():
            if name not in known and name.rpartition(".")[2] not in assigned and _is_constant(value):
                yield f"{name}=", repr(value)


def _is_constant(value: Any) -> bool:
    """Return True for a number or text, and tuples of such. A path may be another one on another machine."""
    if isinstance(value, tuple):
        return len(value) <= _MOST_ITEMS and all(map(_is_constant, value))
    is_text = type(value) is str and not (os.path.isabs(value) or is_folder(value))
    return is_text or type(value) in (bool, int, float, complex, bytes)


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of the user in a value: itself, and those that decorators, properties and partials hold."""
    for _ in range(_MOST_WRAPPED):
        if isinstance(value, types.FunctionType) and not is_installed(value) and not _is_generated(value):
            yield value
        names = _INNER if callable(value) or hasattr(type(value), "__get__") else ()
        inner = (attribute_of(value, name) for name in names)
        value = next((one for one in inner if one is not None), None)


def _is_generated(function: types.FunctionType) -> bool:
    """Return True for what a dataclass is given: it keeps its arguments, of which the samples may need only some."""
    return function.__name__[:2] == "__" and function.__code__.co_filename == "<string>"


def _found_in(name: str, code: Any, without: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield what a function finds by name; of a class its bases, its functions, and the objects in its attributes."""
    if not isinstance(code, type):
        yield from [*read_by(code).items(), *imported_by(code), *held_by(code)]
        return
    yield from ((base.__qualname__, base) for base in code.__mro__[1:-1])
    members = {key: value for one in reversed(code.__mro__) if is_code_of_user(one) for key, value in vars(one).items()}
    for key, member in members.items():
        functions = [*_functions_in(member)]
        if key not in without:
            yield from ((function.__qualname__, function) for function in functions)
            yield from () if functions or key[:2] == "__" else [(f"{name}.{key}", member)]


def _source_of(code: Any) -> str:
    """Return the source of a function, or of the methods of a class with its name; where there is none, what it does.

    A notebook keeps the source of functions, not that of classes, and to find a class in a file takes long. The source
    of a lambda is the whole line that it is written in.
    """
    if isinstance(code, types.FunctionType):
        if code.__name__ != "<lambda>":
            with contextlib.suppress(Exception):  # as above
                return _text_of(code.__code__)  # that of the function would be of what it wraps
        return repr(content_of(code.__code__))
    members = [
        attribute_of(value, "__func__" if isinstance(value, staticmethod | classmethod) else "fget") or value
        for value in vars(code).values()
        if isinstance(value, types.FunctionType | staticmethod | classmethod | property)
    ]
    functions = [one for one in members if isinstance(one, types.FunctionType) and not _is_generated(one)]
    return "".join([code.__qualname__, *map(_source_of, functions)])


def _text_of(code: Any) -> str:
    """Return the source of a class or of the code of a function."""
    return str(_until_written(inspect.getsource, code, inspect.getsourcefile(code)))


def _until_written(read: Callable[[Any], Any], what: Any, file: str | None) -> Any:
    """Return ``read(what)``, which takes long: it is kept until the file that it reads is written again."""
    try:
        status = os.stat(file or "")
    except OSError:  # of a notebook, or of an archive
        return read(what)
    return _read_once(read, what, status.st_size, status.st_mtime_ns)


@functools.lru_cache(4096)
def _read_once(read: Callable[[Any], Any], what: Any, size: int, time_ns: int) -> Any:
    return read(what)
