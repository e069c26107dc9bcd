"""Callables that the methods of an object find by name in their modules, and a copy of the object that finds others.

A copy gets a class of its own, whose methods have the code of the old ones and look these names up elsewhere. Nothing
changes in the module.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.util import resolve_name
from typing import Any

from memfeed.errors import SplitError
from memfeed.splitting.generators import is_installed, is_library
from memfeed.system.code_content import names_used

GlobalName = tuple[str, str]
"""The name of a module, and a name in it; "config.transform" is one in a module of the user that it imports."""


def named_by(cls: type) -> dict[GlobalName, Any]:
    """Return what the methods of a class, which a user wrote, find by name in their modules; no names they assign."""
    found: dict[GlobalName, Any] = {}
    for _, function in functions_of(cls):
        where, values = _module(function), {} if _assigns(function.__code__) else read_by(function)
        found.update({(where, name): value for name, value in values.items()})
    return found


def with_names(owner: Any, values: Mapping[GlobalName, Any]) -> None:
    """Let the methods of an object find these values by these names. Raise SplitError for a class that forbids it."""
    cls = type(owner)
    try:
        has = {name for one in cls.__mro__[:-1] for name, value in vars(one).items() if value}
        if not has.isdisjoint(("__reduce__", "__reduce_ex__", "__slots__")):
            raise TypeError("it has __slots__, or says itself how it is pickled")
        if any(
            isinstance(one, types.FunctionType) and not is_installed(one) for one in map(_function_of, _makers(cls))
        ):
            raise TypeError("it counts its subclasses, by __init_subclass__ or its metaclass")
        object.__setattr__(owner, "__class__", _class_with(cls, dict(values)))  # past the one of a frozen dataclass
    except Exception as error:  # a metaclass may raise anything
        raise SplitError(
            f"found {', '.join(name for _, name in values)} in a variable of a module, and no class like "
            f"{cls.__name__} can be made that finds another one there ({error}); expected it in an attribute of the "
            "dataset"
        ) from error


def own_method(owner: Any, function: types.FunctionType) -> types.FunctionType:
    """Return a method of a class as an object of it has it: with other names, see `with_names`."""
    own = getattr(type(owner), function.__name__, None)
    if not isinstance(own, types.FunctionType) or own.__code__ is not function.__code__:
        return function
    return own if own.__closure__ is function.__closure__ else function


class _Globals(dict[str, Any]):
    """The global variables of a function: some with values of their own, and all others as they are in its module."""

    def __init__(self, function: types.FunctionType, values: Mapping[GlobalName, Any]) -> None:
        self._module = function.__globals__
        # Python itself looks up the names with underscores, without __missing__
        found_by_python = {name: value for name, value in self._module.items() if name[:2] == "__"}
        super().__init__(found_by_python | _of_module(function, values))

    def __missing__(self, name: str) -> Any:
        return self._module[name]


class _Variables(types.ModuleType):
    """A module some of whose variables have values of their own. All others are read and set in the module itself."""

    def __init__(self, module: types.ModuleType, values: Mapping[str, Any]) -> None:
        super().__init__(module.__name__)
        vars(self).clear()
        vars(self).update(_with_modules(vars(module), values), __real__=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["__real__"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["__real__"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["__real__"], name)


def _class_with(cls: type, values: dict[GlobalName, Any]) -> type:
    """Return a class like another one, whose methods find other values. Its objects are pickled with these."""
    made: dict[str, Any] = {}
    for name, function in functions_of(cls):
        names = [] if _assigns(function.__code__) else read_by(function)
        if not values.keys().isdisjoint((_module(function), one) for one in names):
            copied = types.FunctionType(
                function.__code__,
                _Globals(function, values),
                function.__name__,
                function.__defaults__,
                function.__closure__,
            )
            copied.__kwdefaults__, copied.__dict__ = function.__kwdefaults__, {**function.__dict__}
            made[name] = _like(next(vars(one)[name] for one in cls.__mro__ if name in vars(one)), copied)

    def reduced(self: Any, protocol: int) -> Any:
        state = cls.__getstate__(self) if hasattr(cls, "__getstate__") else self.__dict__
        return _blank, (cls, list(values)), (state, values)

    def restore(self: Any, state: Any) -> None:
        own, kept = state
        values.update(kept)
        for one in made.values():
            function = _function_of(one)
            function.__globals__.update(_of_module(function, kept))
        if hasattr(cls, "__setstate__"):
            cls.__setstate__(self, own)
        else:
            self.__dict__.update(own or {})  # None for an object without attributes

    same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "__slots__": ()}
    return type(cls)(cls.__name__, (cls,), {**same, **made, "__reduce_ex__": reduced, "__setstate__": restore})


def _makers(cls: type) -> list[Any]:
    """Return what runs when a subclass is made: a registry would then hold it in place of the class."""
    meta = type(cls)
    return [getattr(cls, "__init_subclass__", None), meta.__new__, meta.__init__, getattr(meta, "__prepare__", None)]


def _like(member: Any, function: types.FunctionType) -> Any:
    """Return a function as the kind of member of a class that another one is."""
    if isinstance(member, property):
        return property(function, member.fset, member.fdel)
    return function if isinstance(member, types.FunctionType) else type(member)(function)


def _blank(cls: type, names: Iterable[GlobalName]) -> Any:
    """Return an object without attributes, of a class whose methods find values by these names that come later."""
    return object.__new__(_class_with(cls, dict.fromkeys(names)))


def functions_of(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the methods and properties of a class that a user wrote, each by its name."""
    seen: set[str] = set()
    for one in cls.__mro__[:-1]:
        for name, value in list(vars(one).items()):  # another thread may add to it
            function = _function_of(value)
            is_plain = type(value) in (types.FunctionType, staticmethod, classmethod, property)
            if (
                name not in seen
                and is_plain
                and isinstance(function, types.FunctionType)
                and not is_installed(function)
            ):
                yield name, function
            seen.add(name)


def read_by(function: types.FunctionType, enters: Callable[[Any], bool] = lambda value: False) -> dict[str, Any]:
    """Return what a function reads by name in its module, and in modules of the user that the module imports.

    ``enters`` returns True for other objects whose attributes count as the variables of a module do.
    """
    found: dict[str, Any] = {}
    for first, *rest in _names_read(function.__code__):
        if first in function.__globals__:
            name, value = first, function.__globals__[first]
            found[name] = value
            while rest and (_is_of_user(value) or enters(value)) and rest[0] in vars(value):
                value = vars(value)[rest[0]]
                name = f"{name}.{rest.pop(0)}"
            found[name] = value
    return found


def imported_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function may read in modules of the user that it imports itself: all that its code names there."""
    words = dict.fromkeys(names_used(function.__code__))
    for level, name, parts in _imports(function.__code__):
        full = name if not level else resolve_name("." * level + name, str(function.__globals__.get("__package__")))
        for module in (full, *(f"{full}.{part}" for part in parts)):
            variables = vars(sys.modules[module]) if _is_of_user(sys.modules.get(module)) else {}
            yield from ((f"{module}.{word}", variables[word]) for word in words if word in variables)


def _is_of_user(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and not is_library(value)


@cache
def _assigns(code: types.CodeType) -> bool:
    """Return True for code that assigns a variable of its module: a copy of its function would assign its own."""
    if any(one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for one in dis.get_instructions(code)):
        return True
    return any(_assigns(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))


@cache
def names_assigned(code: types.CodeType) -> frozenset[str]:
    """Return the attributes, and the variables of its module, that code assigns."""
    stored = (one.argval for one in dis.get_instructions(code) if one.opname in ("STORE_ATTR", "STORE_GLOBAL"))
    inner = (names_assigned(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return frozenset(stored).union(*inner)


@cache
def _names_read(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the global variables that code reads, each with the attributes of it that are read at once."""
    found: dict[tuple[str, ...], None] = {}
    last: list[str] = []
    for one in dis.get_instructions(code):
        if one.opname == "LOAD_GLOBAL":
            found[tuple(last)] = None
            last = [one.argval]
        elif last and one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            last.append(one.argval)
        elif one.opname != "EXTENDED_ARG":
            found[tuple(last)] = None
            last = []
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found.update(dict.fromkeys(_names_read(inner)))
    return tuple(names for names in found if names)


@cache
def _imports(code: types.CodeType) -> tuple[tuple[int, str, tuple[str, ...]], ...]:
    """Return what code imports: the level of a relative import, the name of the module, the names taken from it."""
    found: list[tuple[int, str, tuple[str, ...]]] = []
    level, parts = None, None
    for one in dis.get_instructions(code):
        if one.opname == "IMPORT_NAME":
            found.append((level if isinstance(level, int) else 0, one.argval, parts or ()))
        level, parts = parts, one.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found += _imports(inner)
    return tuple(found)


def _function_of(member: Any) -> Any:
    """Return the function of a static or class method, of a property, or of a method."""
    return getattr(member, "__func__", getattr(member, "fget", member))


def _of_module(function: types.FunctionType, values: Mapping[GlobalName, Any]) -> dict[str, Any]:
    """Return the values of the names in the module of a function, with modules that have the others."""
    own = {name: value for (where, name), value in values.items() if where == _module(function)}
    variables = function.__globals__
    return _with_modules(variables._module if isinstance(variables, _Globals) else variables, own)


def _with_modules(variables: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by names without dots: in place of those that have one, modules among ``variables`` with them."""
    found = {name: value for name, value in values.items() if "." not in name}
    for first in {name.partition(".")[0] for name in values if "." in name}:
        inner = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{first}.")}
        found[first] = _Variables(variables[first], inner)
    return found


def _module(function: types.FunctionType) -> str:
    """Return the name of a function's module, the same in a process that imports the program again."""
    name = str(function.__globals__.get("__name__"))
    return "__main__" if name == "__mp_main__" else name
