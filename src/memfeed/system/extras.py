"""Optional packages: an error that says how to install those that are missing."""

from __future__ import annotations

from importlib.util import find_spec


def require(extra: str, *modules: str) -> None:
    """Raise ModuleNotFoundError, which names the extra to install, unless every module can be imported.

    Example::

        require("vision", "torchvision", "PIL")
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(
            f"found no {' and no '.join(missing)}; expected the packages of the extra [{extra}]: "
            f"pip install 'memfeed[{extra}]'",
            name=missing[0],
        )
