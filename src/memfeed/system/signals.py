"""SIGTERM as an exception that unwinds a block, blocks that defer SIGINT and SIGTERM, and what handlers raise.

A scheduler sends SIGTERM some seconds before it takes the machine away.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from itertools import pairwise
from types import FrameType
from typing import Any


class Terminated(BaseException):
    """Raised in the main thread by SIGTERM, so that with-blocks and finally-blocks clean up."""


class Sigterm:
    """The SIGTERM handler of one block: records that a signal was ``received``, and if it ``terminates`` the process.

    It terminates the process only if the user has installed no handler of their own.
    """

    def __init__(self) -> None:
        self.received = self.terminates = self._is_over = False
        self._pid = os.getpid()
        self._previous: Any = signal.SIG_DFL

    @property
    def terminating(self) -> bool:
        """Return True after a termination signal, while only cleanup is left."""
        return self.received and self.terminates

    def check(self) -> None:
        """Raise Terminated again if the user's code has swallowed it."""
        if self.terminating:
            raise Terminated

    def ignored(self) -> bool:
        """Return True once for each signal after which the user's handler let the work continue."""
        ignored = self.received and not self.terminates
        self.received = self.terminating
        return ignored

    def install(self) -> None:
        """Replace the current handler. It is still called by this one."""
        self._previous = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._handle)

    def remove(self) -> None:
        """Restore the previous handler. A handler that was installed after this one stays, and skips this one."""
        self._is_over = True
        if signal.getsignal(signal.SIGTERM) == self._handle:
            with contextlib.suppress(ValueError):  # not in the main thread any more
                signal.signal(signal.SIGTERM, self._next_handler())

    def _next_handler(self) -> Any:
        """Return the handler to call after this one. Blocks need not end in the order in which they began."""
        handler = self._previous
        while isinstance(other := getattr(handler, "__self__", None), Sigterm) and other._is_over:
            handler = other._previous
        return handler

    def _handle(self, number: int, frame: FrameType | None) -> None:
        handler = self._next_handler()
        if self._is_over or os.getpid() != self._pid:  # os.getpid: in a child that was just forked
            signal.signal(signal.SIGTERM, handler)
            signal.raise_signal(signal.SIGTERM)
            return
        self.received, self.terminates = True, not callable(handler)
        if self.terminates:
            raise Terminated
        handler(number, frame)


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[Sigterm]:
    """Let SIGTERM unwind the block by an exception. When the block ends, the process ends by that signal.

    If the user has a handler, only that one is called, at once. What it raises unwinds the block too; if it returns,
    the work continues. Nothing is changed outside the main thread, or where SIGTERM is ignored.
    """
    sigterm = Sigterm()
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) in (None, signal.SIG_IGN):
        yield sigterm
        return
    sigterm.install()
    try:
        yield sigterm
    except Terminated:
        if not sigterm.terminating:
            raise  # of a block around this one
    finally:
        sigterm.remove()
        if sigterm.terminating:
            signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Defer SIGINT and SIGTERM until the block ends, where an exception would leave something half done.

    Use it for short blocks. A second signal of the same kind is not deferred. Nothing is changed outside the main
    thread, because handlers run only there.
    """
    deferred: list[int] = []
    handlers: dict[int, Any] = {}
    pid, is_over = os.getpid(), False

    def defer(number: int, frame: FrameType | None) -> None:
        if is_over or os.getpid() != pid:  # an exception left it installed, or this is a child that was just forked
            signal.signal(number, handlers[number])
            signal.raise_signal(number)
        elif number in deferred:
            deferred.remove(number)
            handlers[number](number, frame)
        else:
            deferred.append(number)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(handler := signal.getsignal(number)):
                    handlers[number] = handler
                    signal.signal(number, defer)
        yield
    finally:
        is_over = True
        for replaced, handler in handlers.items():
            if signal.getsignal(replaced) is defer:
                signal.signal(replaced, handler)
        with contextlib.ExitStack() as stack:  # raise each signal, even if an earlier one raises an exception
            for received in deferred:
                stack.callback(signal.raise_signal, received)


def is_of_handler(error: BaseException) -> bool:
    """Return True if a handler of signals raised ``error``: then it says nothing about what was done meanwhile.

    A handler, of any kind, is a function that is given the frame that it interrupts.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(_is_given(handler, frame) for frame, handler in pairwise(frames))


def _is_given(called: FrameType, value: Any) -> bool:
    code = called.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    given = [called.f_locals.get(name) for name in code.co_varnames[:count]]
    return any(one is value or (type(one) is tuple and any(each is value for each in one)) for one in given)
