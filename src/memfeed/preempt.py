"""SIGTERM, which a scheduler sends before it takes the machine away."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Terminated(BaseException):
    """Raised in the main thread at a SIGTERM, so that what is open there is left in order."""


class Sigterm:
    """Whether a SIGTERM came, and whether it ends this process."""

    def __init__(self) -> None:
        self.came = False
        self.ends = False

    def check(self) -> None:
        """Raises Terminated again where a dataset's own code has swallowed it."""
        if self.came and self.ends:
            raise Terminated


@contextlib.contextmanager
def in_order() -> Iterator[Sigterm]:
    """Meanwhile a SIGTERM unwinds the with-block; on leaving it the process ends by that signal, as it would have.

    A handler of the user's decides alone: it is called at once, and what it raises unwinds the block too. If it returns
    the work goes on. Outside of the main thread, and where SIGTERM is ignored, nothing is changed.
    """
    sigterm = Sigterm()
    previous = signal.getsignal(signal.SIGTERM) if threading.current_thread() is threading.main_thread() else None
    if previous is None or previous == signal.SIG_IGN:
        yield sigterm
        return
    own, sigterm.ends = os.getpid(), not callable(previous)

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:  # a child that was forked a moment ago
            signal.signal(signal.SIGTERM, previous)
            signal.raise_signal(signal.SIGTERM)
            return
        sigterm.came = True
        if callable(previous):
            previous(number, frame)
        else:
            raise Terminated

    signal.signal(signal.SIGTERM, handle)
    try:
        yield sigterm
    except Terminated:
        pass  # the signal follows
    finally:
        signal.signal(signal.SIGTERM, previous)
        if sigterm.came and sigterm.ends:
            signal.raise_signal(signal.SIGTERM)
