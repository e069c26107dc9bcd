"""The worker processes of a conversion: started, heard of when one dies, and ended, whatever they are doing."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from memfeed.convert.jobs import MapJob, StreamJob
from memfeed.convert.watchdog import Readers
from memfeed.convert.write_run import Report
from memfeed.errors import BuildError
from memfeed.system import machine
from memfeed.system.signals import defer_signals

REPORTS_AHEAD = 128  # reports are small: a worker must never wait for the builder to have read them
STOP_SECONDS = 0.5


@contextlib.contextmanager
def working(job: MapJob | StreamJob, workers: int) -> Iterator[Iterator[Report]]:
    """The reports of a job, from worker processes or, with 0, from this one; none is left when the block is.

    The block raises BuildError if a worker died.
    """
    loader = DataLoader(
        job,
        batch_size=None,
        num_workers=workers,
        generator=torch.Generator(),  # else DataLoader draws from the user's own
        prefetch_factor=REPORTS_AHEAD if workers else None,
        worker_init_fn=_end_with_builder,
        in_order=False,
    )
    reports: Iterator[Report] = iter(())
    others, deaths = multiprocessing.active_children(), _Deaths()
    try:
        with defer_signals():  # it starts processes, and threads for their queues
            deaths.begin()
            reports = iter(loader)
        with job.readers.watched():
            yield deaths.heard(reports)
    except BaseException as error:
        with defer_signals():
            _end_workers(reports, job.readers, others)
        if type(error) is RuntimeError and str(error).startswith("DataLoader worker (pid"):
            raise BuildError(
                f"{job.build.root}: a worker process died ({str(error).splitlines()[0].rstrip('. ')}); "
                "expected it to live: rows that were written are kept: call cache() again to go on. "
                "If memory ran out, use fewer workers="
            ) from error
        raise
    finally:
        deaths.end()


def _end_with_builder(worker: int) -> None:
    """Before all else: a worker whose builder is dead by now would wait for its first task for ever."""
    machine.die_with_parent()


class _Deaths:
    """The deaths of workers, which torch's handler of SIGCHLD raises wherever the builder is: in a report's stead only.

    Elsewhere it would tear what is being written, or hide a Ctrl-C. In other threads than the main one no handler runs:
    there torch looks for itself, every five seconds.
    """

    def __init__(self) -> None:
        self._waiting = self._missed = self._over = False
        self._handled: BaseException | None = None  # before the wait began: another is on its way out of it
        self._before: Any = None
        self._own = os.getpid()

    def begin(self) -> None:
        """Puts its handler before torch's."""
        if threading.current_thread() is threading.main_thread():
            with contextlib.suppress(AttributeError):  # else it would be put before this one
                torch.utils.data._utils.signal_handling._set_SIGCHLD_handler()
            if callable(before := signal.getsignal(signal.SIGCHLD)):
                self._before = before
                signal.signal(signal.SIGCHLD, self._hear)

    def end(self) -> None:
        """Takes it away again."""
        self._over = True
        if self._before is not None and signal.getsignal(signal.SIGCHLD) == self._hear:
            signal.signal(signal.SIGCHLD, self._before)
            if self._missed:  # a child of the user's, perhaps
                signal.raise_signal(signal.SIGCHLD)

    def _hear(self, number: int, frame: Any) -> None:
        waiting = self._waiting and sys.exc_info()[1] is self._handled
        if waiting or self._over or os.getpid() != self._own:
            self._before(number, frame)
        else:
            self._missed = True

    def heard(self, reports: Iterator[Report]) -> Iterator[Report]:
        """The reports; raises RuntimeError in place of one if a worker died."""
        while True:
            self._handled = sys.exc_info()[1]
            self._waiting = True
            try:
                if self._missed:
                    self._missed = False
                    signal.raise_signal(signal.SIGCHLD)
                report = next(reports, None)
            finally:
                self._waiting = False
            if report is None:
                return
            yield report


def _end_workers(reports: Iterator[Report], readers: Readers, others: Sequence[Any]) -> None:
    """Ends worker processes within two seconds, whatever they are doing.

    DataLoader's own way waits five seconds for each, and for ever for a lock that a killed worker held. Whoever is in
    the dataset's code gets ``STOP_SECONDS`` to leave it: locks of the user's may be held there. If the start of one was
    cut short DataLoader has told us of none: then they are the children that are not ``others``.
    """
    iterator: Any = reports
    with contextlib.suppress(AttributeError, ValueError):  # torch must not take what follows for accidents
        torch.utils.data._utils.signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False
        iterator._shutdown = True
    children = multiprocessing.active_children()
    known = getattr(iterator, "_workers", [child for child in children if child.daemon and child not in others])
    workers = [worker for worker in known if worker.is_alive()]
    readers.stop()
    deadline = time.monotonic() + STOP_SECONDS
    while workers and not readers.idle and time.monotonic() < deadline:
        time.sleep(0.01)
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for worker in workers:
        worker.join(max(deadline - time.monotonic(), 0.01))
        if worker.exitcode is None:  # stopped, or it blocks the signal
            worker.kill()
            worker.join(STOP_SECONDS)
    for queue in getattr(iterator, "_index_queues", ()):
        _close(queue)


def _close(queue: Any) -> None:
    """Closes a queue of multiprocessing, also one whose lock was left taken by an interrupt: it would wait for ever."""
    queue.cancel_join_thread()
    lock = getattr(queue, "_notempty", None)
    if lock is None:
        queue.close()
    elif lock.acquire(timeout=STOP_SECONDS):
        lock.release()
        queue.close()
    elif (at_exit := getattr(queue, "_close", None)) is not None:
        at_exit.cancel()
