"""Modules of loops that numba compiles, where it is installed: ``pip install 'memfeed[numba]'``.

To compile takes seconds the first time, and half a second when numba finds what it compiled before. So it is done in a
thread of its own, once there was enough work for it to pay. Until then, and where it cannot be done, the caller takes
its other way, which must give the same values.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from memfeed.system.messages import warn
from memfeed.system.threads import started

F = TypeVar("F", bound=Callable[..., Any])

_FORK_WAIT_S = 120
_all: weakref.WeakSet[Loops] = weakref.WeakSet()
_starting = threading.Lock()


class Loops:
    """A module of loops, which is imported when it is worth it. Any thread may call it.

    Args:
        module: its full name. It imports numba, and its functions are decorated with ``loop``.
        after: how much work is done without it, in the unit of ``get``.
    """

    def __init__(self, module: str, after: int = 0) -> None:
        self._module, self._left = module, after
        self._loaded: Any = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        _all.add(self)

    def get(self, work: int = 0) -> Any:
        """Return the module; None while it is not compiled. Count `work` that is about to be done.

        Warns:
            RuntimeWarning: once, if numba is installed and the module cannot be compiled.
        """
        if self._loaded is None:
            self._left -= work
            if self._left <= 0 and self._thread is None:
                self._begin()
            error, self._error = self._error, None
            if error is not None:
                warn(
                    f"numba could not compile {self._module} ({type(error).__name__}: {str(error)[:200]}); expected a "
                    "numba that fits this NumPy; memfeed works without it, slower: pip install -U numba",
                    RuntimeWarning,
                )
        return self._loaded

    def wait(self) -> Any:
        """Return the module, compiled now; None where that cannot be done."""
        self._begin()
        self.join()
        return self.get()

    def join(self, seconds: float | None = None) -> None:
        """Wait until it is compiled, if that has begun."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(seconds)

    def _begin(self) -> None:
        with _starting:
            if self._thread is None:
                # not a daemon: the interpreter must not end while LLVM compiles
                self._thread = threading.Thread(target=self._load, name="memfeed compiles", daemon=False)
                if find_spec("numba") is not None and not started(self._thread):
                    self._thread = None

    def _load(self) -> None:
        try:
            import numba

            if not numba.config.DISABLE_JIT:
                self._loaded = import_module(self._module)
        except Exception as error:
            self._error = error


def loop(*signatures: str) -> Callable[[F], F]:
    """Compile a function with numba, without Python's lock, for arguments of these types alone: ``"void(int64[::1])"``.

    It is compiled when its module is imported. numba keeps it on disk beside the module, in ``NUMBA_CACHE_DIR`` or in
    the user's cache, and finds it there by the module's time of change and the kind of processor. So a loop may call
    only loops of its own module. Where nothing can be written, each process compiles it.
    """
    import numba

    def compile_(function: F) -> F:
        try:
            compiled: F = numba.njit([*signatures], nogil=True, cache=True)(function)
        except (RuntimeError, OSError):  # no place for it, or none left
            compiled = numba.njit([*signatures], nogil=True)(function)
        return compiled

    return compile_


def _before_fork() -> None:
    """Let no import be in the middle: the child would have its locks, and no thread that releases them."""
    _starting.acquire()
    for loops in [*_all]:
        loops.join(_FORK_WAIT_S)


os.register_at_fork(before=_before_fork, after_in_parent=_starting.release, after_in_child=_starting.release)
