"""Hash what the result of a function depends on beside its arguments: its code, and the values that it reads."""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import logging
import os
import re
import sys
import sysconfig
import types
from typing import Any

import numpy as np
import torch

from memfeed.errors import SchemaError
from memfeed.schema import values
from memfeed.system.code_content import content_of, names_used

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")  # also of a user, of Debian, and of another environment
_COMPILED = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    np.ufunc,
)
_DEEPEST = 20
DIGITS = 16


class Reads:
    """The variables that functions read, and the objects that these named when they were hashed."""

    def __init__(self) -> None:
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []

    def add(self, where: dict[str, Any] | types.CellType, name: str, value: Any, code: types.CodeType) -> None:
        """Add a variable, unless the function sets it itself."""
        if name in _set_by(code):
            return
        if isinstance(where, dict):
            self._globals.append((where, name, value))
        else:
            self._cells.append((where, value))

    def are_changed(self) -> bool:
        """Return True if a variable names another object now, as a global does that was assigned again."""
        for names, name, value in self._globals:
            if names.get(name, self) is not value:
                return True
        for cell, value in self._cells:
            try:
                if cell.cell_contents is not value:
                    return True
            except ValueError:  # the variable was deleted
                return True
        return False


def hash_function(function: Any, version: object = None) -> str:
    """Return a hash of a function, in hexadecimal.

    With ``version`` it is one of its name and of ``version``. Without, it is one of its code and of what that names:
    defaults, values of enclosing functions, and globals; the functions and classes among these that do not come from a
    library are hashed in the same way. Libraries are not.

    Raises SchemaError for a value whose state is not known.
    """
    return hash_and_reads(function, version)[0]


def hash_and_reads(function: Any, version: object = None) -> tuple[str, Reads]:
    """Return the hash of a function, and the variables that it is one of."""
    hashed = _Hash(getattr(function, "__qualname__", type(function).__qualname__))
    if version is not None:
        hashed.add("version", _module_of(function), hashed.name, type(version).__name__, repr(version))
    else:
        hashed.value(function, "it", 0)
    return hashed.hexdigest(), hashed.reads


class _Hash:
    def __init__(self, name: str) -> None:
        self.name = name
        self._hash = hashlib.blake2b(digest_size=DIGITS // 2)
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is used again
        self.reads = Reads()

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def add(self, *texts: str | bytes) -> None:
        """Add texts, each with its length."""
        for text in texts:
            data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
            self._hash.update(len(data).to_bytes(8, "little") + data)

    def value(self, value: Any, where: str, depth: int) -> None:
        """Add a value; ``where`` says in errors what it is."""
        kind = type(value)
        self.add(_module_of(kind), kind.__qualname__)
        if value is None or kind in (bool, int, float, complex, str, bytes) or isinstance(value, np.generic):
            self.add(value if kind in (str, bytes) else repr(value))
            return
        if id(value) in self._seen:
            self.add("seen", str(self._seen[id(value)]))
            return
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        if depth > _DEEPEST:
            raise self._unknown(value, where)
        self._object(value, where, depth + 1)

    def _object(self, value: Any, where: str, depth: int) -> None:
        if isinstance(value, os.PathLike):
            self.add(os.fspath(value))
        elif isinstance(value, torch.Tensor | np.ndarray):
            tensor = values.as_tensor(value)
            if tensor is None:
                raise self._unknown(value, where)
            self.add(str(tensor.dtype), repr(tuple(tensor.shape)), values.bytes_of(tensor).tobytes())
        elif isinstance(value, list | tuple):
            for one in value:
                self.value(one, where, depth)
        elif isinstance(value, dict):
            for key, one in value.items():
                self.value(key, where, depth)
                self.value(one, where, depth)
        elif isinstance(value, set | frozenset):
            parts = []
            for one in value:
                part = _Hash(self.name)
                part.value(one, where, depth)
                parts.append(part.hexdigest())
            self.add(*sorted(parts))
        elif isinstance(value, types.ModuleType | logging.Logger):
            self.add(value.__name__ if isinstance(value, types.ModuleType) else value.name)
        elif isinstance(value, functools.partial):
            self.value((value.func, value.args, value.keywords), where, depth)
        elif isinstance(value, staticmethod | classmethod | property | functools.cached_property):
            for one in (getattr(value, name, None) for name in ("__func__", "fget", "func")):
                self.value(one, where, depth)
        elif isinstance(value, types.MethodType):
            self.value((value.__func__, value.__self__), where, depth)
        elif isinstance(value, types.FunctionType):
            self._function(value, depth)
        elif isinstance(value, type):
            self._class(value, where, depth)
        elif isinstance(value, _COMPILED):
            self.add(getattr(value, "__module__", None) or "", getattr(value, "__qualname__", value.__name__))
        elif wrapped := getattr(value, "__wrapped__", None):
            self.value(wrapped, where, depth)
        else:
            self._instance(value, where, depth)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        self.add(_module_of(function), function.__qualname__)
        if _is_of_library(function.__code__.co_filename):
            return
        self.add(repr(content_of(function.__code__)))  # not its source: the file may have changed since it was imported
        self.value((function.__defaults__, function.__kwdefaults__), f"a default of {function.__qualname__}", depth)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not set yet
                continue
            self.add(name)
            self.reads.add(cell, name, content, function.__code__)
            self.value(content, f"`{name}`, which {function.__qualname__} uses", depth)
        names = sorted(set(names_used(function.__code__)))
        for name in names:
            if name in function.__globals__:
                found = function.__globals__[name]
                self.add(name)
                self.reads.add(function.__globals__, name, found, function.__code__)
                self.value(found, f"`{name}`, which {function.__qualname__} uses", depth)
                if isinstance(found, types.ModuleType) and not _is_of_library(getattr(found, "__file__", None) or ""):
                    for attribute in names:  # of a module of the user's: config.SIZE
                        if attribute in vars(found) and attribute != name:
                            self.add(attribute)
                            self.reads.add(vars(found), attribute, vars(found)[attribute], function.__code__)
                            where = f"`{name}.{attribute}`, which {function.__qualname__} uses"
                            self.value(vars(found)[attribute], where, depth)

    def _class(self, cls: type, where: str, depth: int) -> None:
        self.add(_module_of(cls), cls.__qualname__)
        module = sys.modules.get(cls.__module__)
        if module is not None and _is_of_library(getattr(module, "__file__", None) or ""):
            return
        for base in cls.__bases__:
            self.value(base, where, depth)
        for name, one in sorted(vars(cls).items()):
            if not (name.startswith("__") and name.endswith("__")) or isinstance(one, types.FunctionType):
                if name == "_abc_impl":  # of an abstract class
                    continue
                self.add(name)
                self.value(one, f"`{name}` of {cls.__qualname__}", depth)

    def _instance(self, value: Any, where: str, depth: int) -> None:
        is_generator = isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState)
        if is_generator or hasattr(value, "__next__"):
            raise self._unknown(value, where)
        if not hasattr(value, "__dict__"):  # a dtype, a pattern, a date, an instance with __slots__: as pickle has it
            try:
                reducer: Any = copyreg.dispatch_table.get(type(value), lambda one: one.__reduce_ex__(2))
                reduced = reducer(value)
            except TypeError:
                raise self._unknown(value, where) from None
            parts = reduced if isinstance(reduced, str) else [*reduced[:3], *map(list, filter(None, reduced[3:5]))]
            self.value(parts, where, depth)
            return
        self.value(type(value), where, depth)
        for name, one in sorted(vars(value).items()):
            self.add(name)
            self.value(one, f"{where}: its attribute {name}", depth)

    def _unknown(self, value: Any, where: str) -> SchemaError:
        return SchemaError(
            f"found {where}, of {type(value).__name__} (of {type(value).__module__}), whose state cannot be hashed, so "
            f"nobody would notice that the results of {self.name} change with it; expected values such as numbers, "
            "text, arrays and functions: pass version=1, and another version whenever its results change"
        )


def _module_of(value: Any) -> str:
    """Return the module of a function or class; the program itself has another name in processes that it spawns."""
    name = getattr(value, "__module__", None) or ""
    return "__main__" if name == "__mp_main__" else name


@functools.lru_cache
def _set_by(code: types.CodeType) -> frozenset[str]:
    """Return the names of other scopes that a function, or one inside it, assigns."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname in ("STORE_GLOBAL", "STORE_DEREF")}
    return frozenset(found.union(*(_set_by(one) for one in code.co_consts if isinstance(one, types.CodeType))))


def _is_of_library(path: str) -> bool:
    return not path or path.startswith(("<frozen", *_LIBRARIES)) or _INSTALLED.search(path) is not None
