"""Syncs that fail: what they were to make durable is forgotten, because no later sync tells of it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from memfeed.errors import MemfeedError
from memfeed.system import files
from memfeed.system.signals import defer_signals

SYNCING = "syncing"
"""The name of the mark in a work directory."""


@contextlib.contextmanager
def if_unsynced(forget: Callable[[], object], mark: Path | None = None) -> Iterator[None]:
    """Call ``forget`` if a sync of the block fails, and raise the error of the sync.

    The system reports a failed sync once, drops the bytes that it could not write, and lets the next sync succeed.
    Until they are dropped from memory too, they can still be read, so to hash them shows nothing. So ``forget`` has to
    see to it that whatever the block was to make durable counts as not there, and is written again. Nothing has to be
    forgotten where the next try writes the same bytes again in any case.

    The file ``mark`` is there during the block. It stays if the process is killed meanwhile, or if ``forget`` fails:
    whoever goes on calls `forget_marked`. One process at a time may be in a block with the same mark.
    """
    outer = sys.exc_info()[1]
    if mark is not None:
        with files.opened(mark, os.O_CREAT):
            pass
    try:
        yield
    except BaseException as error:
        with defer_signals(), contextlib.suppress(MemfeedError, OSError):  # report the first error
            if _tells_of_sync(error, outer):
                forget()
            _remove(mark)
        raise
    _remove(mark)


def forget_marked(forget: Callable[[], object], mark: Path) -> None:
    """Call ``forget`` if there is the mark of an `if_unsynced` that did not come to its end."""
    if mark.exists():
        forget()
        _remove(mark)


def _remove(mark: Path | None) -> None:
    if mark is not None:
        files.remove(mark)


def _tells_of_sync(error: BaseException | None, outer: BaseException | None) -> bool:
    """Return True if a sync failed before ``error`` was raised, but after ``outer`` was.

    Ctrl-C during a sync takes the place of the error of the sync, which is its context then.
    """
    is_signal = not isinstance(error, Exception)
    while error is not None and error is not outer:
        if getattr(error, "unsynced", False) or (is_signal and isinstance(error, OSError)):
            return True
        error = error.__context__
    return False
