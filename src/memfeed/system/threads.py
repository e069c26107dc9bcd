"""Threads that the work can do without."""

from __future__ import annotations

import threading


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
