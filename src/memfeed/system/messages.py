"""Messages for people: lines on stderr, and warnings."""

from __future__ import annotations

import sys
import warnings
from functools import cache
from pathlib import Path

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
