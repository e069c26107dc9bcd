"""Text for people: lines on stderr, warnings, numbers with units, and how to install a package that is missing."""

from __future__ import annotations

import os
import re
import sys
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from memfeed.errors import StoreError, brief, escape

_PACKAGE = str(Path(__file__).parents[1])


@cache
def say_once(text: str) -> None:
    """Print a message to stderr, once in a process."""
    print(text, file=sys.stderr)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line outside this package that led here, which is the line that its author can change."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def format_bytes(count: float) -> str:
    """Format bytes in powers of 1000: 1536 -> "1.5 KB"."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def parse_bytes(name: str, value: int | str | None) -> int | None:
    """Return the bytes that an argument means: an int, or text such as "200GB", "1.5 TB" or "64MiB"; None stays None.

    Raises ValueError, which names the argument, for anything else.
    """
    if value is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", str(value), re.IGNORECASE)
    size = 0
    if found is not None and not isinstance(value, bool) and (found[2] or not found[3]):
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " "))
    if size <= 0:
        raise ValueError(f'found {name}={value!r:.60}; expected bytes, such as {name}="200GB"')
    return size


def printable(text: object) -> str:
    """Return ``text`` in one line, with characters that can harm a terminal escaped; see `memfeed.errors.escape`."""
    return escape(str(text))


def format_seconds(seconds: float) -> str:
    """Format seconds: 75 -> "1 min 15 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def format_short(seconds: float) -> str:
    """Format a short time: 0.0123 -> "12 ms"."""
    if seconds >= 1:
        return format_seconds(seconds)
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"


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


def path_text(path: Any, expected: str = "a path, as 'ants.mf'") -> str:
    """Return a path, a str or an object such as pathlib.Path, as text. ``~`` stands for the home directory.

    Raise TypeError for anything else, and StoreError for an empty text.
    """
    if isinstance(path, type) or not isinstance(path, str | bytes | os.PathLike):
        what = f"the class {path.__name__} itself" if isinstance(path, type) else f"an object of {type(path).__name__}"
        what = "None" if path is None else what
        of_it = ": its own is in .path" if isinstance(getattr(path, "path", None), os.PathLike) else ""
        raise TypeError(f"found {what}; expected {expected}{of_it}")
    text = os.fspath(path)
    if isinstance(text, bytes):
        raise TypeError(f"found {brief(text)}, which is bytes; expected {expected}, as str: os.fsdecode(path)")
    if not text:
        raise StoreError(f"found an empty text; expected {expected}: was it read from a variable that is not set?")
    return os.path.expanduser(text)
