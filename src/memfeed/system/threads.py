"""Threads that the work can do without, and threads that end before the interpreter does."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import threading
import weakref
from multiprocessing import util
from typing import Protocol

FREE_SECONDS = 2.0  # that a thread may take to free the work whose last reference it has
_BEFORE_CHILDREN = 100  # of multiprocessing: what has a priority is done before children are ended


class ThreadedWork(Protocol):
    """Work in threads of this process, such as the filling of a store. A thread that runs keeps its work alive."""

    def release(self, *, at_exit: bool = False) -> None:
        """Let the threads end soon, without waiting for them; ``at_exit``: the process ends, and this is its thread."""

    def join(self) -> None:
        """Wait until the threads have ended, at most for as long as a user would wait."""


_work: weakref.WeakSet[ThreadedWork] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_is_registered = False


def _forget() -> None:
    """Forget the threads of the parent, which are not there in a forked child, and what it does at its end."""
    global _is_registered
    _work.clear()
    _threads.clear()
    _is_registered = False


os.register_at_fork(after_in_child=_forget)


def end_at_exit(work: ThreadedWork, thread: threading.Thread | None = None) -> None:
    """End this work before the interpreter ends: a thread that is inside torch then would abort the process.

    A ``thread`` that has the last reference to the work frees it as it ends: it is waited for after the work is gone.
    """
    global _is_registered
    if not _is_registered:
        if multiprocessing.parent_process() is None:
            # before what atexit runs: pools of threads, which a commit needs, take no tasks then
            getattr(threading, "_register_atexit", atexit.register)(end_all)
        else:  # such a process ends its children before that: the workers, which a commit needs too
            util.Finalize(None, end_all, exitpriority=_BEFORE_CHILDREN)
        _is_registered = True
    _work.add(work)
    if thread is not None:
        _threads.add(thread)


def end_all() -> None:
    """End all work of `end_at_exit`, and wait for that."""
    everything = list(_work)
    for work in everything:
        work.release(at_exit=True)
    for work in everything:
        work.join()
    for thread in list(_threads):
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(FREE_SECONDS)


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
