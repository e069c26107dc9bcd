"""Recognise values of tensordict and other libraries without importing them.

The import of tensordict takes a second and 100 MB (torch._dynamo). A value can be one of a library only if somebody has
imported it. What makes such values imports the library in the function that does so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def is_a(value: Any, library: str, *names: str) -> bool:
    """Return True if ``value`` is an instance of one of these classes of a library. The library is never imported."""
    module = sys.modules.get(library)
    return module is not None and isinstance(
        value, tuple(cls for name in names if (cls := getattr(module, name, None)))
    )


def _function(name: str) -> Callable[[Any], bool] | None:
    """Return a function of tensordict; None if tensordict is not imported, or another thread is importing it."""
    function: Callable[[Any], bool] | None = getattr(sys.modules.get("tensordict"), name, None)
    return function


def is_tensor_collection(value: Any) -> bool:
    """Return True for a TensorDict or a tensorclass, and for a class of them."""
    check = _function("is_tensor_collection")
    return check is not None and bool(check(value))


def is_tensorclass(value: Any) -> bool:
    """Return True for a tensorclass, and for an instance of one."""
    check = _function("is_tensorclass")
    return check is not None and bool(check(value))


def is_tensordict(value: Any) -> bool:
    """Return True for a TensorDict of any class, and for an instance of a tensorclass."""
    return is_a(value, "tensordict", "TensorDictBase") or is_tensorclass(type(value))
