"""Recognise values of tensordict without importing it: the import takes a second and 100 MB (torch._dynamo).

A value can be one of tensordict's only if somebody has imported it. What makes such values imports it in the function
that does so.
"""

from __future__ import annotations

import sys
from typing import Any


def is_a(value: Any, *names: str) -> bool:
    """Return True if ``value`` is an instance of one of these classes of tensordict."""
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(
        value, tuple(cls for name in names if (cls := getattr(module, name, None)))
    )


def is_tensor_collection(value: Any) -> bool:
    """Return True for a TensorDict or a tensorclass, and for a class of them."""
    module = sys.modules.get("tensordict")
    return module is not None and bool(module.is_tensor_collection(value))


def is_tensorclass(value: Any) -> bool:
    """Return True for a tensorclass, and for an instance of one."""
    module = sys.modules.get("tensordict")
    return module is not None and bool(module.is_tensorclass(value))


def is_tensordict(value: Any) -> bool:
    """Return True for a TensorDict of any class, and for an instance of a tensorclass."""
    return is_a(value, "TensorDictBase") or is_tensorclass(type(value))
