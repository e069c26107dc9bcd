"""Signals: SIGTERM, which a scheduler sends before it takes the machine away, and moments in which they wait."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Terminated(BaseException):
    """Raised in the main thread at a SIGTERM, so that what is open there is left in order."""


class Sigterm:
    """Whether a SIGTERM ``came``, and whether it ``ends`` this process: where no handler of the user's decides."""

    def __init__(self) -> None:
        self.came = self.ends = self._over = False
        self._own = os.getpid()
        self._before: Any = signal.SIG_DFL

    @property
    def ending(self) -> bool:
        """Whether this process ends as soon as all is in order."""
        return self.came and self.ends

    def check(self) -> None:
        """Raises Terminated again where the user's own code has swallowed it."""
        if self.ending:
            raise Terminated

    def passed(self) -> bool:
        """Whether one came since this was last asked that a handler of the user's lets pass: the work goes on."""
        passed = self.came and not self.ends
        self.came = self.ending
        return passed

    def begin(self) -> None:
        """Puts its handler before the one that is there."""
        self._before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._handle)

    def end(self) -> None:
        """Takes it away again, unless another stands before it now, which will pass it over."""
        self._over = True
        if signal.getsignal(signal.SIGTERM) == self._handle:
            with contextlib.suppress(ValueError):  # not in the main thread any more
                signal.signal(signal.SIGTERM, self._behind())

    def _behind(self) -> Any:
        """What stands behind it; blocks need not end in the order they began."""
        found = self._before
        while isinstance(other := getattr(found, "__self__", None), Sigterm) and other._over:
            found = other._before
        return found

    def _handle(self, number: int, frame: FrameType | None) -> None:
        behind = self._behind()
        if self._over or os.getpid() != self._own:  # a child that was forked a moment ago
            signal.signal(signal.SIGTERM, behind)
            signal.raise_signal(signal.SIGTERM)
            return
        self.came, self.ends = True, not callable(behind)
        if self.ends:
            raise Terminated
        behind(number, frame)


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[Sigterm]:
    """Meanwhile a SIGTERM unwinds the with-block; on leaving it the process ends by that signal, as it would have.

    A handler of the user's decides alone: it is called at once, and what it raises unwinds the block too. If it returns
    the work goes on. Outside of the main thread, and where SIGTERM is ignored, nothing is changed.
    """
    sigterm = Sigterm()
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) in (None, signal.SIG_IGN):
        yield sigterm
        return
    sigterm.begin()
    try:
        yield sigterm
    except Terminated:
        if not sigterm.ending:
            raise  # of a block around this one
    finally:
        sigterm.end()
        if sigterm.ending:
            signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """SIGINT and SIGTERM wait until the block is left: an exception may leave a lock taken for ever.

    For what is short; a second signal of the same kind waits no more. Outside of the main thread nothing is changed: no
    handler runs there.
    """
    came: list[int] = []
    before: dict[int, Any] = {}
    own, over = os.getpid(), False

    def note(number: int, frame: FrameType | None) -> None:
        if over or os.getpid() != own:  # it was left there by an exception, or in a child that was forked meanwhile
            signal.signal(number, before[number])
            signal.raise_signal(number)
        elif number in came:
            came.remove(number)
            before[number](number, frame)
        else:
            came.append(number)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(handler := signal.getsignal(number)):
                    before[number] = handler
                    signal.signal(number, note)
        yield
    finally:
        over = True
        for held, handler in before.items():
            if signal.getsignal(held) is note:
                signal.signal(held, handler)
        with contextlib.ExitStack() as stack:  # each, though one raises
            for caught in came:
                stack.callback(signal.raise_signal, caught)
