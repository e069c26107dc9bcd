"""Threads that the work can do without, and threads that end before the interpreter does."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Protocol


class ThreadedWork(Protocol):
    """Work in threads of this process, such as the filling of a store. A thread that runs keeps its work alive."""

    def release(self, *, at_exit: bool = False) -> None:
        """Let the threads end soon, without waiting for them; ``at_exit``: the process ends, and this is its thread."""

    def join(self) -> None:
        """Wait until the threads have ended, at most for as long as a user would wait."""


_work: weakref.WeakSet[ThreadedWork] = weakref.WeakSet()
_is_registered = False

os.register_at_fork(after_in_child=lambda: _work.clear())  # the threads of the parent are not there


def end_at_exit(work: ThreadedWork) -> None:
    """End this work before the interpreter ends: a thread that is inside torch then would abort the process."""
    global _is_registered
    if not _is_registered:
        # before what atexit runs: pools of threads, which a commit needs, take no tasks then
        getattr(threading, "_register_atexit", atexit.register)(end_all)
        _is_registered = True
    _work.add(work)


def end_all() -> None:
    """End all work of `end_at_exit`, and wait for that."""
    everything = list(_work)
    for work in everything:
        work.release(at_exit=True)
    for work in everything:
        work.join()


def started(thread: threading.Thread) -> bool:
    """Start a thread. Return False if the system gives no more: the caller then does its work itself."""
    try:
        thread.start()
    except RuntimeError as error:
        if not has_no_thread(error):
            raise
        return False
    return True


def has_no_thread(error: BaseException) -> bool:
    """Return True if Python raised this error because the system gives no more threads."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)
