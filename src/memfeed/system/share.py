"""Share the rows of a batch among threads: ours, which sleep when they have nothing to do, or torch's.

torch's own threads (OpenMP) wait for each other by spinning. Where a core is taken by somebody else, a team of two then
takes several times as long as one thread, at twice the CPU time. Here the caller and its helpers take parts of a batch
until none is left, so nobody waits for a thread that does not run. torch releases Python's lock while it works.

To wake a thread takes some 0.1 ms, as long as to copy a batch of small images. So torch's threads, which do not sleep,
copy rows where the caller may use them. Both kinds are used only while they are measured to be faster than one thread:
see `ThreadChoice`.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from time import perf_counter, thread_time
from typing import Any, Literal

import torch

from memfeed.system import openmp
from memfeed.system.machine import core_count
from memfeed.system.thread_choice import ThreadChoice
from memfeed.system.threads import started

PARTS = 4  # for each thread: so that one which gets less of its core does fewer of them
HEAVY_PARTS = 16  # of work that is heavy: the last part, for which the others wait, is a smaller share of it
MOST_THREADS = 8  # on 16 cores 16 threads decoded 0.6 times as much: each part waits for Python's lock twice

Kind = Literal["gather", "decode", "transform"]
RowsFunction = Callable[[int, int], Any]


class Threads:
    """How many threads the work of one owner takes, for each kind of work.

    Args:
        threads: always so many; None takes as many as are measured to be worthwhile, at most those that torch may use.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._fixed = threads
        self._choices: dict[tuple[Kind, bool], ThreadChoice] = {}
        self._most = 1 if threads is None else threads

    def allow_those_of_torch(self) -> None:
        """Take at most as many threads as torch may use in the calling thread, as there are cores, and 8."""
        if self._fixed is None:
            self._most = _most_threads()
            for choice in list(self._choices.values()):
                choice.set_most(self._most)

    def choice(self, kind: Kind, by_torch: bool = False) -> ThreadChoice:
        """Return the measurement of a kind of work, on our threads or on torch's."""
        found = self._choices.get((kind, by_torch))
        return self._choices.setdefault((kind, by_torch), ThreadChoice(self._most)) if found is None else found

    def describe(self) -> dict[str, int]:
        """Return the most threads that work may take, and what is taken for each kind of work that was measured."""
        taken: dict[str, int] = {}
        for (kind, _), choice in list(self._choices.items()):
            taken[kind] = max(choice.threads, taken.get(kind, 1))
        return {"most": self._most} | taken

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let ``share`` in the calling thread take these threads during the block."""
        before, _here.threads = getattr(_here, "threads", None), self
        try:
            yield
        finally:
            _here.threads = before


def share(
    rows: int,
    function: RowsFunction,
    *,
    least: int = 1,
    kind: Kind = "transform",
    work: float | None = None,
    by_torch: bool = False,
    is_heavy: bool = False,
) -> None:
    """Run ``function(begin, end)`` for parts of ``rows`` rows, on as many threads as are worthwhile.

    Returns when all parts are done. The first exception of a part is raised; then parts that had not begun are left
    out. Within a part torch uses one thread, and the inference mode and gradient mode are the caller's; a part shares
    nothing further. Call it for pieces of work that are alike: how fast they are decides about the next.

    Args:
        rows: number of rows.
        function: does the rows from ``begin`` to before ``end``. It must not depend on how the rows are cut.
        least: a part has at least so many rows, if there are as many: each costs some 10 microseconds.
        kind: of the work. Each kind has its own number of threads, in the ``Threads`` that are in use.
        work: its amount in a unit that suits all work of this kind; None counts rows.
        by_torch: the function is one operation that torch's own threads share.
        is_heavy: the work takes milliseconds, far longer than to wake the threads. Then all threads take small parts of
            it, and nothing is measured: a comparison would run it with one thread, and other programs that take a core
            meanwhile could let one thread win.
    """
    if getattr(_here, "in_part", False) or rows < 2 * least or not openmp.can_limit():
        function(0, rows)
        return
    threads: Threads | None = getattr(_here, "threads", None)
    if threads is None:
        threads = _by_hand()
    if is_heavy or threads._fixed is not None or threads._most == 1:
        _run(rows, function, least, threads._most, by_torch, HEAVY_PARTS if is_heavy else PARTS)
        return
    by_torch = by_torch and torch.get_num_threads() > 1
    choice = threads.choice(kind, by_torch)
    count = choice.next()
    began, cpu_began = perf_counter(), thread_time()
    _run(rows, function, least, count, by_torch)
    choice.note(count, rows if work is None else work, perf_counter() - began, thread_time() - cpu_began)


class _Job:
    """The parts of one piece of work, taken by whichever thread comes next."""

    def __init__(self, parts: deque[tuple[int, int]], function: RowsFunction) -> None:
        self._parts, self._function = parts, function
        self._left, self._lock = len(parts), threading.Lock()
        self._ended = threading.Lock()
        self._ended.acquire()
        self._modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self.error: BaseException | None = None

    def help(self) -> None:
        """Do parts until none is left, in a thread whose modes may differ."""
        inference, grad = self._modes
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            self.work()

    def work(self) -> None:
        """Do parts until none is left."""
        while True:
            try:
                begin, end = self._parts.popleft()
            except IndexError:
                return
            try:
                self._function(begin, end)
            except BaseException as error:
                self.error = self.error or error
                self._count(1 + self._drop())
                return
            self._count(1)

    def _drop(self) -> int:
        """Take out the parts that nobody has begun. Return how many."""
        dropped = 0
        with suppress(IndexError):
            while True:
                self._parts.popleft()
                dropped += 1
        return dropped

    def _count(self, done: int) -> None:
        with self._lock:
            self._left -= done
            if not self._left:
                self._ended.release()

    def wait(self) -> None:
        """Wait until all parts are done. A helper that comes later finds nothing, and keeps nothing alive."""
        self._ended.acquire()
        self._function = _nothing


def _nothing(begin: int, end: int) -> None:
    pass


class _Helpers:
    """The threads that help. They start when they are first needed, and then stay."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all threads, as in a forked child."""
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._count, self._lock = 0, threading.Lock()

    def ask(self, job: _Job, count: int) -> None:
        """Let up to ``count`` threads help with a job."""
        if self._count < count:
            with self._lock:
                while self._count < count:
                    thread = threading.Thread(target=_help, args=(self._jobs,), name="memfeed helper", daemon=True)
                    if not started(thread):
                        break
                    self._count += 1
        for _ in range(min(count, self._count)):
            self._jobs.put(job)


def _help(jobs: queue.SimpleQueue[_Job]) -> None:
    openmp.use_one_thread()
    _here.in_part = True
    while True:
        jobs.get().help()


def _run(rows: int, function: RowsFunction, least: int, threads: int, by_torch: bool, parts: int = PARTS) -> None:
    """Run ``function`` for all rows, on so many threads: torch's if they can, and the caller may use as many."""
    by_torch = by_torch and torch.get_num_threads() >= threads
    count = min(threads * parts, rows // least)
    _here.in_part = True
    try:
        with openmp.at_most(threads if by_torch else 1):
            if by_torch or threads == 1 or count < 2:
                function(0, rows)
                return
            edges = [rows * part // count for part in range(count + 1)]
            job = _Job(deque(pairwise(edges)), function)
            _helpers.ask(job, min(threads, count) - 1)
            job.work()
            job.wait()
            if job.error is not None:
                raise job.error
    finally:
        _here.in_part = False


def _most_threads() -> int:
    if not openmp.can_limit() or openmp.is_child():
        return 1
    return max(1, min(torch.get_num_threads(), core_count(), MOST_THREADS))


def _by_hand() -> Threads:
    """Return the threads of work outside of a loader: a measurement for each thread that calls."""
    if not hasattr(_here, "by_hand"):
        _here.by_hand = Threads()
    threads: Threads = _here.by_hand
    threads.allow_those_of_torch()
    return threads


_here = threading.local()
_helpers = _Helpers()


def _after_fork() -> None:
    _helpers.begin_anew()
    _here.in_part = False


os.register_at_fork(after_in_child=_after_fork)
