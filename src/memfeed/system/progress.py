"""A progress bar: rows per second, bytes, time left. What happens to stderr never decides what happens to the work.

Every argument ``progress=`` has the meaning of `is_shown`: None shows a bar where stderr is a terminal or a notebook,
True shows it always, False never. In a file or a pipe it is a line for each tenth that is done. Lines that say what is
done, beside the bar, are printed unless it is False.
"""

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

from memfeed.errors import brief
from memfeed.system.messages import format_bytes, printable

SLOW_SECONDS = 2.0  # copies that take longer show a bar
LINE_SECONDS = 30.0  # between two lines of a bar whose total is not known


def is_shown(progress: bool | None) -> bool:
    """Return whether an argument ``progress=`` asks for a bar. Raise ValueError for a value that has no meaning."""
    if progress is None:
        return _is_seen()
    if isinstance(progress, bool):
        return progress
    raise ValueError(
        f"found progress={brief(progress)}; expected True (show a bar), False (show none), or None (show one if stderr "
        "is a terminal)"
    )


def _is_seen() -> bool:
    """Return True if a person sees stderr while the program runs: it is a terminal, or in a notebook."""
    try:
        if sys.stderr is not None and sys.stderr.isatty():
            return True
    except (AttributeError, OSError, ValueError):  # ValueError: it is closed
        return False
    python = sys.modules.get("IPython")
    shell = getattr(python, "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


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


class _Lines:
    """A bar for a file or a pipe: a line for each tenth; without a known total one for each `LINE_SECONDS`."""

    _FORM = "{desc}: PERCENT% {n_fmt}/{total_fmt}{unit} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
    _FORM_WITHOUT_TOTAL = "{desc}: {n_fmt}{unit} [{elapsed}, {rate_fmt}{postfix}]"

    def __init__(self, *, desc: str, total: int | None, unit: str, initial: int, **of_bars: Any) -> None:
        self._title, self.total, self._unit, self._initial, self._done = desc, total, unit, initial, initial
        self._began = self._line_at = time.monotonic()
        self._postfix, self._tenth, self._printed = "", self._tenths(), -1

    def _tenths(self) -> int:
        return 10 * self._done // self.total if self.total else 0

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """Set what the next line ends with, as tqdm's method does."""
        self._postfix = text

    def update(self, count: int) -> None:
        self._done += count
        due = not self.total and time.monotonic() >= self._line_at + LINE_SECONDS
        if due or self._tenths() > self._tenth:
            self._print()

    def close(self) -> None:
        """Say how many units are done, unless the last line does."""
        if self._printed != self._done:
            self._print()

    def _print(self) -> None:
        self._tenth, self._line_at, self._printed = self._tenths(), time.monotonic(), self._done
        form = self._FORM_WITHOUT_TOTAL
        if self.total:  # tqdm would round up to 100 %
            form = self._FORM.replace("PERCENT", f"{100 * self._done // self.total:3d}")
        line = tqdm.format_meter(
            self._done,
            self.total,
            self._line_at - self._began,
            prefix=self._title,
            unit=self._unit,
            unit_scale=True,
            initial=self._initial,
            postfix=self._postfix,
            bar_format=form,
        )
        _Bar.write(line, file=sys.stderr)


# tqdm's lock is shared with forked processes: one that is killed while it draws would stop the others for ever
_Bar.set_lock(TqdmDefaultWriteLock.th_lock)
os.register_at_fork(after_in_child=lambda: _Bar.set_lock(threading.RLock()))  # a thread of the parent may hold it


class Progress:
    """A context manager around a progress bar on stderr, if ``progress`` asks for one; see `is_shown`.

    ``done`` units of ``total`` were done before. With ``progress=None`` the bar appears after ``delay_seconds``.
    Nothing is shown where stderr is absent, closed or full.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        *,
        unit: str,
        progress: bool | None,
        done: int = 0,
        delay_seconds: float = 0,
    ) -> None:
        delay = 0 if progress else delay_seconds
        self._options = {"desc": printable(title), "total": total, "unit": unit, "initial": done, "delay": delay}
        self._shown, self._says, self._done = is_shown(progress), progress is not False, done
        self._bar: tqdm[object] | _Lines | None = None
        self.bytes = 0

    def __enter__(self) -> Progress:
        if self._shown:
            options = {**self._options, "unit_scale": True, "dynamic_ncols": True, "file": sys.stderr}
            self._bar = _unless_stderr_fails(_Bar if _is_seen() else _Lines, **options)
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
        if self._bar is not None:
            self._bar.total = total
        self.advance(done - self._done)

    def say(self, text: str) -> None:
        """Print a line above the bar, or alone where no bar is shown, unless ``progress`` is False."""
        if self._says:
            write_line(text)


def write_line(text: str) -> None:
    """Print a line on stderr, above a bar if there is one. Do nothing where stderr is absent, closed or full."""
    _unless_stderr_fails(_Bar.write, printable(text), file=sys.stderr)


def _unless_stderr_fails(draw: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call ``draw`` and return its result; None where stderr is absent, closed or full."""
    if sys.stderr is None:  # in a process without a terminal, such as pythonw or a daemon
        return None
    try:
        return draw(*arguments, **options)
    except (OSError, ValueError):  # ValueError: it is closed
        return None
