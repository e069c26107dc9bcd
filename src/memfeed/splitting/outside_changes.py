"""Find attributes of random steps that a dataset sets while it reads a sample: a store cannot set them again."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

from memfeed.splitting.generators import is_generator, names_used

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class StepAttributes:
    """The attributes of some steps, as they were when `note` was called. Both calls are made for each sample.

    For a method: the attributes of its object that its code names, or the code of the methods that it calls.

    Args:
        steps: callables.
    """

    def __init__(self, steps: Iterable[Any]) -> None:
        self._owners: dict[int, tuple[dict[str, Any], set[str] | None]] = {}
        for step in steps:
            is_method = isinstance(step, types.MethodType)
            owner = step.__self__ if is_method else step
            inner = getattr(owner, "__dict__", None)
            if isinstance(inner, dict):
                names = _names_of(step.__func__, type(owner)) if is_method else None
                _, others = self._owners.get(id(inner), (inner, set()))
                self._owners[id(inner)] = inner, None if names is None or others is None else names | others
        self.note()

    def note(self) -> None:
        """Remember the attributes as they are now."""
        self._noted = [inner.copy() for inner, _ in self._owners.values()]

    def changed(self) -> str:
        """Return the name of an attribute that has another value now, or an empty string. Generators do not count."""
        for (inner, names), noted in zip(self._owners.values(), self._noted, strict=True):
            if len(inner) == len(noted) and all(map(is_, inner.values(), noted.values())):
                continue
            for key in {**noted, **inner}:
                one, other = noted.get(key, _MISSING), inner.get(key, _MISSING)
                if (names is None or key in names) and not is_generator(other) and not _is_same(one, other):
                    return key
        return ""


_MISSING = object()


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
