"""Messages for people, on stderr."""

from __future__ import annotations

import sys
from functools import cache


@cache
def say_once(text: str) -> None:
    """Print a message to stderr, once in a process."""
    print(text, file=sys.stderr)
