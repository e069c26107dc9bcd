"""Park the threads of a loader, for a time in which nobody else may use the device."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager


class Pause:
    """Threads do each piece of work within ``working``; ``paused`` waits for these, and keeps new ones waiting."""

    def __init__(self) -> None:
        self._begin_anew()
        _all.add(self)

    def _begin_anew(self) -> None:
        self._changed = threading.Condition()
        self._working = 0
        self._paused_by: list[int] = []

    @property
    def is_paused_by_me(self) -> bool:
        """Return True within a ``paused`` block of the calling thread."""
        return threading.get_ident() in self._paused_by

    @contextmanager
    def working(self) -> Iterator[None]:
        """Wait until nobody pauses; then count as working."""
        changed = self._changed
        with changed:
            changed.wait_for(lambda: not self._paused_by)
            self._working += 1
        try:
            yield
        finally:
            with changed:
                self._working -= 1
                changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait until nobody works; nobody begins to work before the end of the block."""
        changed = self._changed
        with changed:
            self._paused_by.append(threading.get_ident())
            changed.wait_for(lambda: not self._working)
        try:
            yield
        finally:
            with changed:
                self._paused_by.remove(threading.get_ident())
                changed.notify_all()


_all: weakref.WeakSet[Pause] = weakref.WeakSet()


def _after_fork() -> None:
    # a child has none of the threads that were working, and perhaps a lock that one of them held
    for pause in list(_all):
        pause._begin_anew()


os.register_at_fork(after_in_child=_after_fork)
