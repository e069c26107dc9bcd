"""Syncs that fail once: what they lose is written again, and no later sync that succeeds makes it durable."""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from disk import Operation, Recorder
from memfeed.errors import BuildError
from torture.powerloss import NAMES
from torture.works import WORKS, no_syncs, right, short_syncs


def fail_sync(directory: Path, name: str, fails: Callable[[Operation], bool], *, often: bool = False) -> str:
    """Do some work, again if its sync fails, and let the power fail then. Return the path whose sync failed, if any.

    With ``often`` there are many sync points.
    """
    work, base = WORKS[name], directory / "base"
    base.mkdir(parents=True)
    path = base / "a.mf"
    if work.before:
        work.before(path)
    recorder = Recorder(base, fails)
    with recorder, short_syncs() if often else contextlib.nullcontext():
        try:
            work.do(path)
        except BuildError as error:
            assert recorder.failed, error
            assert "while waiting for the disk" in str(error), error
            work.do(path)
        right(path, work)
    recorder.lose(directory / "left")
    right(directory / "left" / "a.mf", work)
    return recorder.failed


def number(at: int) -> Callable[[Operation], bool]:
    """Return what is True for sync ``at``, counted from 0."""
    syncs: list[Operation] = []
    return lambda one: syncs.append(one) or len(syncs) == at + 1


def failed_syncs(seconds: float, rng: random.Random) -> dict[str, int]:
    """Every sync of every kind of work once, in turns, as far as the time goes."""
    counts: Counter[str] = Counter()
    left = [(name, often) for name in NAMES for often in (False, True)]
    next_of = dict.fromkeys(left, 0)
    end = time.monotonic() + seconds
    while left and (time.monotonic() < end or not counts):
        name, often = key = rng.choice(left)
        at, next_of[key] = next_of[key], next_of[key] + 1
        with tempfile.TemporaryDirectory() as directory, no_syncs():
            try:
                failed = fail_sync(Path(directory), name, number(at), often=often)
            except Exception as error:
                raise AssertionError(f"{name}, sync {at}, often={often}: {error!r}") from error
        counts["failed syncs"] += bool(failed)
        if not failed:
            left.remove(key)
    counts["kinds of work left"] = len(left)
    return dict(counts)
