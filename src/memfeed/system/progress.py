"""A progress bar: rows per second, bytes, time left. What happens to stderr never decides what happens to the work."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm
from tqdm.std import TqdmDefaultWriteLock

from memfeed.system.units import format_bytes, printable

SLOW_SECONDS = 2.0  # copies that take longer show a bar


class _Bar(tqdm):
    monitor_interval = 0  # tqdm's monitor is a thread, and a thread makes forking workers unsafe
    _time = property(lambda self: time.monotonic, lambda self, clock: None)  # tqdm's own clock may be set meanwhile

    def refresh(self, nolock: bool = False, lock_args: Any = None) -> Any:
        """Draw the bar. tqdm's own method would hold the lock for ever if stderr fails, and stop all other threads."""
        with self.get_lock():
            return super().refresh(nolock=True)

    def clear(self, nolock: bool = False) -> None:
        """Take the bar away, as ``refresh`` draws it."""
        with self.get_lock():
            super().clear(nolock=True)


# tqdm's lock is shared with forked processes: one that is killed while it draws would stop the others for ever
_Bar.set_lock(TqdmDefaultWriteLock.th_lock)
os.register_at_fork(after_in_child=lambda: _Bar.set_lock(threading.RLock()))  # a thread of the parent may hold it


class Progress:
    """A context manager around a progress bar on stderr, which appears after ``delay_seconds``, if ``shown``.

    ``done`` units of ``total`` were done before. Nothing is shown where stderr is absent, closed or full.
    """

    def __init__(
        self, title: str, total: int | None, *, unit: str, shown: bool, done: int = 0, delay_seconds: float = 0
    ) -> None:
        desc = printable(title)
        self._options = {"desc": desc, "total": total, "unit": unit, "initial": done, "delay": delay_seconds}
        self._shown, self._done = shown, done
        self._bar: tqdm[object] | None = None
        self.bytes = 0

    def __enter__(self) -> Progress:
        if self._shown:
            options = {**self._options, "unit_scale": True, "dynamic_ncols": True, "file": sys.stderr}
            self._bar = _unless_stderr_fails(_Bar, **options)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            _unless_stderr_fails(self._bar.close)

    def advance(self, count: int, more_bytes: int = 0) -> None:
        """Add ``count`` units done and ``more_bytes`` bytes written."""
        self.bytes += more_bytes
        self._done += count
        if self._bar is not None:
            if more_bytes:
                self._bar.set_postfix_str(format_bytes(self.bytes), refresh=False)
            _unless_stderr_fails(self._bar.update, count)

    def advance_to(self, done: int, total: int) -> None:
        """Set the units done, as a callback that gets (units done, units in total)."""
        self.advance(done - self._done)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._shown:
            write_line(text)


def write_line(text: str) -> None:
    """Print a line on stderr, above a bar if there is one. Do nothing where stderr is absent, closed or full."""
    _unless_stderr_fails(_Bar.write, printable(text), file=sys.stderr)


def _unless_stderr_fails(draw: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return what ``draw`` returns; None where stderr is absent, closed or full."""
    if sys.stderr is None:  # in a process without a terminal, such as pythonw or a daemon
        return None
    try:
        return draw(*arguments, **options)
    except (OSError, ValueError):  # ValueError: it is closed
        return None
