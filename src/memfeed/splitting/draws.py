"""Find the line of code that draws a random number, for messages."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

from memfeed.errors import MemfeedError
from memfeed.splitting.generators import LIBRARIES, Generators, State

_OWN = str(Path(__file__).parents[1])
Calls = list[tuple[list[State], list[State]]]


def drawing_line(
    read: Callable[[int], Any],
    rows: Sequence[int],
    generators: Generators,
    calls: Callable[[], Calls | None] = list,
    watched: Sequence[int] | None = None,
) -> str:
    """Return " (FILE:LINE)" of the first line of the user's that draws when a sample is read; "" if none is found.

    It reads samples with a trace function, which is slow.

    Args:
        read: reads the sample of an index.
        rows: the indices of samples to read.
        generators: all that may be drawn from.
        calls: returns the states before and after each call that may draw, of those that this reading has made so far;
            None inside such a call.
        watched: the numbers of the generators that count; None for all.
    """
    found: list[str] = []
    states, outer = generators.save(), sys.gettrace()
    last, line, known = states, "", 0

    def look() -> None:
        nonlocal last, known
        made = calls()
        if made is None:
            return
        edges = [last, *chain.from_iterable(made[known:]), last := generators.save()]
        known = len(made)
        moved = set[int]().union(*map(generators.moved, edges[::2], edges[1::2]))
        if line and (moved if watched is None else moved & {*watched}):
            found.append(line)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal line
        if found or frame.f_code.co_filename.startswith((*LIBRARIES, _OWN, "<frozen")):
            return None
        look()
        if calls() is not None:
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return trace

    try:
        for index in rows:
            last, line, known = generators.seed(index, 0), "", 0
            sys.settrace(trace)
            try:
                with contextlib.suppress(MemfeedError):  # the one that the line is looked for
                    read(index)
            finally:
                sys.settrace(outer)
            look()
            if found:
                break
    finally:
        generators.restore(states)
    return f" ({found[0]})" if found else ""
