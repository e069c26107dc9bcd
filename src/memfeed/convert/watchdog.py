"""Name the sample that a dataset has been reading for too long, and the process that reads it."""

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


class Stopped(BaseException):
    """Raised instead of a read that the builder does not want any more."""


class Watchdog:
    """Records which sample each process is reading, in memory that worker processes share.

    With ``worker_count`` 0 only this process reads, as worker 0.
    """

    def __init__(self, worker_count: int) -> None:
        self.worker_count = worker_count
        self._first = RawArray("q", [_IDLE] * max(worker_count, 1))
        self._count = RawArray("q", max(worker_count, 1))
        self._stop = RawArray("b", 1)

    def begin_read(self, worker: int, first: int, count: int = 1) -> None:
        """Record that `worker` asks the dataset for `count` samples from `first`. Raise Stopped after ``stop``."""
        if self._stop[0]:
            raise Stopped
        self._count[worker] = count
        self._first[worker] = first

    def end_read(self, worker: int) -> None:
        """Record that the dataset has returned them, or has raised."""
        self._first[worker] = _IDLE

    def stop(self) -> None:
        """Let all processes raise Stopped before they read another sample."""
        self._stop[0] = 1

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Report stalled reads on stderr during the block, at most once in ``STALL_SECONDS``.

        A thread does that. Start worker processes before: forking is unsafe while threads run.
        """
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(done,), name="memfeed-watchdog", daemon=True)
        try:
            thread.start()
            yield
        finally:
            done.set()
            if thread.is_alive():
                thread.join()

    def _watch(self, done: threading.Event) -> None:
        reads = [(_IDLE, time.monotonic())] * len(self._first)  # of each worker: the sample, and since when
        reported = -STALL_SECONDS
        while not done.wait(min(STALL_SECONDS / 4, 1.0)):
            now = time.monotonic()
            reads = [old if first == old[0] else (first, now) for first, old in zip(self._first, reads, strict=True)]
            stalled = [
                (worker, first, now - since)
                for worker, (first, since) in enumerate(reads)
                if first != _IDLE and now - since >= STALL_SECONDS
            ]
            if stalled and now - reported >= STALL_SECONDS:
                reported = now
                shown = "; ".join(self._describe(*read) for read in stalled)
                text = f"memfeed: {shown}; still waiting: check what the dataset does there, or stop it with Ctrl-C"
                tqdm.write(text, file=sys.stderr)  # above a progress bar, if there is one

    def _describe(self, worker: int, first: int, seconds: float) -> str:
        count = self._count[worker]
        samples = f"sample {first}" if count == 1 else f"samples {first} to {first + count - 1}"
        process = f"worker {worker}" if self.worker_count else f"process {os.getpid()}"
        return f"{process} has been reading {samples} for {seconds:.0f} s"
