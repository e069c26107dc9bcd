"""Failures in the processes of a conversion: exceptions, which are sent to another process, and no progress."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple

from memfeed.errors import MemfeedError
from memfeed.system.machine import process_state
from memfeed.system.progress import write_line
from memfeed.system.threads import started

STALL_SECONDS = 60.0
STARTING, READING, WRITING, WAITING, ENDED = range(5)
_STEPS = (
    "been starting",
    "been reading {samples}",
    "been writing {samples}, or what it read before",
    "waited for its next rows",
    "ended",
)


class Stopped(BaseException):
    """Raised instead of a read that the builder does not want any more."""


class Watchdog:
    """Records what each process does, and with which samples, in memory that worker processes share.

    With ``worker_count`` 0 only this process reads, as worker 0.
    """

    def __init__(self, worker_count: int) -> None:
        self.worker_count = worker_count
        count = max(worker_count, 1)
        self._step = RawArray("b", [STARTING if worker_count else WAITING] * count)
        self._first, self._count = RawArray("q", count), RawArray("q", count)
        self._changes = RawArray("q", count)
        self._stop = RawArray("b", 1)
        self._reader_pid = 0

    def begin_read(self, worker: int, first: int, count: int = 1) -> None:
        """Record that `worker` asks the dataset for `count` samples from `first`. Raise Stopped after ``stop``."""
        self.require_going_on()
        self._reader_pid = os.getpid()
        self._first[worker], self._count[worker] = first, count
        self.record(worker, READING)

    def require_going_on(self) -> None:
        """Raise Stopped after ``stop``."""
        if self._stop[0]:
            raise Stopped

    def end_read(self, worker: int) -> None:
        """Record that the dataset has returned them, or has raised. End a process that the dataset has forked."""
        if os.getpid() != self._reader_pid:
            text = (
                f"memfeed: process {os.getpid()}, which the dataset forked, returned from it: expected os._exit there\n"
            )
            os.write(2, text.encode())
            os._exit(1)  # what comes next, and every clean-up, belongs to its parent
        self.record(worker, WRITING)

    def record(self, worker: int, step: int) -> None:
        """Record that `worker` begins another step."""
        self._step[worker] = step
        self._changes[worker] += 1

    def read_by(self, worker: int) -> range | None:
        """Return the samples that `worker` is reading, None if it is in another step."""
        first = self._first[worker]
        return range(first, first + self._count[worker]) if self._step[worker] == READING else None

    def is_starting(self, worker: int) -> bool:
        """Return True if `worker` has not begun its work."""
        return bool(self._step[worker] == STARTING)

    def stop(self) -> None:
        """Let all processes raise Stopped before they read another sample."""
        self._stop[0] = 1

    @contextlib.contextmanager
    def watch(self, pids: Callable[[], list[int | None]] = lambda: [os.getpid()]) -> Iterator[None]:
        """Report processes that make no progress on stderr during the block, at most once in ``STALL_SECONDS``.

        A thread does that. Start worker processes before: forking is unsafe while threads run. `pids` returns the
        process of each worker.
        """
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(done, pids()), name="memfeed-watchdog", daemon=True)
        try:
            started(thread)
            yield
        finally:
            done.set()
            if thread.is_alive():
                thread.join()

    def _watch(self, done: threading.Event, pids: list[int | None]) -> None:
        since = [(-1, 0.0)] * len(pids)  # of each worker: its number of changes, and when that was seen first
        reported = -STALL_SECONDS
        while not done.wait(min(STALL_SECONDS / 4, 1.0)):
            now = time.monotonic()
            since = [old if n == old[0] else (n, now) for n, old in zip(self._changes, since, strict=True)]
            stalled = [
                self._describe(worker, pids[worker], now - start)
                for worker, (_, start) in enumerate(since)
                if self._is_busy(worker) and now - start >= STALL_SECONDS
            ]
            if stalled and now - reported >= STALL_SECONDS:
                reported = now
                write_line(
                    f"memfeed: {'; '.join(stalled)}; still waiting: check what the dataset or the disk does there, or "
                    "stop it with Ctrl-C"
                )

    def _is_busy(self, worker: int) -> bool:
        """Return True if the process has something to do. Without workers the builder also does other things."""
        return self._step[worker] not in ((ENDED,) if self.worker_count else (WAITING, ENDED))

    def _describe(self, worker: int, pid: int | None, seconds: float) -> str:
        first, count, step = self._first[worker], self._count[worker], _STEPS[self._step[worker]]
        if count:
            step = step.format(samples=describe_samples(range(first, first + count)))
        name = f"worker {worker} (pid {pid}, {process_state(pid)})" if self.worker_count else f"process {os.getpid()}"
        return f"{name} has {step} for {seconds:.0f} s"


def describe_samples(samples: range) -> str:
    """Return "sample 3", or "samples 3 to 5"."""
    return f"sample {samples[0]}" if len(samples) == 1 else f"samples {samples[0]} to {samples[-1]}"


class Failure(NamedTuple):
    """An exception that a worker sends, and its cause. Where it arrives, the cause has its traceback as its own."""

    error: Exception
    cause: Exception | None

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle keeps no traceback, which names the line of the user's code
        cause = self.cause
        there = None if cause is None or cause.__traceback__ is None else _traceback_of(cause)
        return _received, (self.error, cause, there)


def _received(error: Exception, cause: Exception | None, traceback_there: RuntimeError | None) -> Failure:
    if cause is not None:
        cause.__cause__ = traceback_there
    return Failure(error, cause)


def failure_of(error: Exception) -> Failure:
    """Return `error` in a form that can be sent. A MemfeedError keeps its cause; others get their traceback as one."""
    cause = error.__cause__ if isinstance(error, MemfeedError) else _traceback_of(error)
    return Failure(_picklable(error), None if cause is None else _picklable(cause))


def _picklable(error: BaseException) -> Exception:
    """Return `error` itself if it survives pickling, else a RuntimeError with its traceback."""
    try:
        if isinstance(error, Exception) and type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # any class can break pickling in its own way
        pass
    return _traceback_of(error)


def _traceback_of(error: BaseException) -> RuntimeError:
    return RuntimeError("".join(traceback.format_exception(error)))
