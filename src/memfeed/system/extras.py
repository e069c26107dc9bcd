"""Optional packages: asked for by name, and missed in a sentence that says how to install them."""

from __future__ import annotations

from importlib.util import find_spec


def require(extra: str, *modules: str) -> None:
    """Raises ModuleNotFoundError, naming the extra that brings them, unless every module can be imported.

    Example::

        require("vision", "torchvision", "PIL")
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(
            f"found no {' and no '.join(missing)}; expected what the extra [{extra}] brings: "
            f"pip install 'memfeed[{extra}]'",
            name=missing[0],
        )
