"""A dataset that blocks is waited for, but not in silence: which sample it is, and who reads it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.sharedctypes import RawArray

from tqdm.std import tqdm

STALL_SECONDS = 60.0
_IDLE = -1


class Readers:
    """Which sample each reader is at, in memory that worker processes share; reader 0 alone is this process itself."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._first = RawArray("q", [_IDLE] * max(workers, 1))
        self._count = RawArray("q", max(workers, 1))
        self._stop = RawArray("b", 1)

    def begin(self, reader: int, first: int, count: int = 1) -> None:
        """Reader number ``reader`` asks the dataset for ``count`` samples from ``first``."""
        self._count[reader] = count
        self._first[reader] = first

    def end(self, reader: int) -> None:
        """It has them."""
        self._first[reader] = _IDLE

    @property
    def idle(self) -> bool:
        """Whether nobody is in the dataset's code."""
        return all(first == _IDLE for first in self._first)

    @property
    def stopped(self) -> bool:
        """Whether readers shall read no more."""
        return bool(self._stop[0])

    def stop(self) -> None:
        """Asks readers to read no more."""
        self._stop[0] = 1

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Meanwhile a thread says on stderr, at most once in ``STALL_SECONDS``, who has been at one sample that long.

        To be entered when worker processes have been started: a thread makes forking unsafe.
        """
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(done,), name="memfeed-stall", daemon=True)
        try:
            thread.start()
            yield
        finally:
            done.set()
            if thread.is_alive():
                thread.join()

    def _watch(self, done: threading.Event) -> None:
        since = [(_IDLE, time.monotonic())] * len(self._first)
        told = -STALL_SECONDS
        while not done.wait(min(STALL_SECONDS / 4, 1.0)):
            now = time.monotonic()
            since = [old if first == old[0] else (first, now) for first, old in zip(self._first, since, strict=True)]
            stalled = [
                (reader, first, now - begun)
                for reader, (first, begun) in enumerate(since)
                if first != _IDLE and now - begun >= STALL_SECONDS
            ]
            if stalled and now - told >= STALL_SECONDS:
                told = now
                _say("; ".join(self._describe(*one) for one in stalled))

    def _describe(self, reader: int, first: int, seconds: float) -> str:
        count = self._count[reader]
        what = f"sample {first}" if count == 1 else f"samples {first} to {first + count - 1}"
        who = f"worker {reader}" if self.workers else f"process {os.getpid()}"
        return f"{who} has been reading {what} for {seconds:.0f} s"


def _say(stalled: str) -> None:
    text = f"memfeed: {stalled}; still waiting: see what the dataset does there, or end it with Ctrl-C"
    tqdm.write(text, file=sys.stderr)  # above a progress bar, where there is one
