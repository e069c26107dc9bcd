"""Find attributes of random steps that a dataset sets while it reads a sample: a store cannot set them again."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

from memfeed.splitting.generators import is_generator, names_used

Attributes = dict[tuple[int, str], Any]
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def attributes_of(owners: Iterable[Any]) -> Attributes:
    """Return the attributes of steps, by the identity of their owner and their name, without random generators.

    For a method: the attributes of its object that its code names, or the code of the methods that it calls.
    """
    found: Attributes = {}
    for one in owners:
        owner = getattr(one, "__self__", None) if isinstance(one, types.MethodType) else one
        names = _names_of(one.__func__, type(owner)) if isinstance(one, types.MethodType) else None
        inner = getattr(owner, "__dict__", {})
        found.update(
            ((id(owner), key), value)
            for key, value in inner.items()
            if (names is None or key in names) and not is_generator(value)
        )
    return found


def changed_attribute(before: Attributes, after: Attributes) -> str:
    """Return the name of an attribute that has another value, or an empty string."""
    for key in {**before, **after}:
        if key not in before or key not in after or not _is_same(before[key], after[key]):
            return key[1]
    return ""


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other))


def _names_of(function: Any, owner: type) -> set[str]:
    """Return the names in the code of a method, and of the methods of its class that it names."""
    seen, left = set[str](), list(_code_names(function))
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += _code_names(getattr(owner, name, None))
    return seen


def _code_names(function: Any) -> Iterator[str]:
    return names_used(function.__code__) if isinstance(function, types.FunctionType) else iter(())
