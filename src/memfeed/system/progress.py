"""A progress bar: rows per second, bytes, time left."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm.auto import tqdm

from memfeed.system.units import format_bytes


class _Bar(tqdm):
    monitor_interval = 0  # tqdm's monitor is a thread, and a thread makes forking workers unsafe


class Progress:
    """A context manager around a progress bar on stderr, which appears after ``delay_seconds``, if ``shown``.

    ``done`` units of ``total`` were done before.
    """

    def __init__(
        self, title: str, total: int | None, *, unit: str, shown: bool, done: int = 0, delay_seconds: float = 0
    ) -> None:
        self._options = {"desc": title, "total": total, "unit": unit, "initial": done, "delay": delay_seconds}
        self._shown, self._done = shown, done
        self._bar: tqdm[object] | None = None
        self.bytes = 0

    def __enter__(self) -> Progress:
        if self._shown:
            self._bar = _Bar(**self._options, unit_scale=True, dynamic_ncols=True, file=sys.stderr)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, count: int, more_bytes: int = 0) -> None:
        """Add ``count`` units done and ``more_bytes`` bytes written."""
        self.bytes += more_bytes
        if self._bar is not None:
            if more_bytes:
                self._bar.set_postfix_str(format_bytes(self.bytes), refresh=False)
            self._bar.update(count)
        self._done += count

    def advance_to(self, done: int, total: int) -> None:
        """Set the units done, as a callback that gets (units done, units in total)."""
        self.advance(done - self._done)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._shown:
            _Bar.write(text, file=sys.stderr)
