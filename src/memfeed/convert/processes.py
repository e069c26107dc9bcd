"""The worker processes of a conversion: start them, receive their reports, notice a death, and end them."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch

from memfeed.building.build import Build
from memfeed.convert.inputs import Input
from memfeed.convert.jobs import RowJob, StreamJob
from memfeed.convert.options import WorkerInit
from memfeed.convert.randomness import set_worker_info
from memfeed.convert.row_worker import Request
from memfeed.convert.watchdog import ENDED, Failure, Stopped, Watchdog, describe_samples, failure_of
from memfeed.convert.write_run import Report, WritePlan
from memfeed.errors import BuildError
from memfeed.system import machine
from memfeed.system.signals import defer_signals

STOP_SECONDS = 0.5
CHECK_SECONDS = 1.0
INTERRUPTED = 128 + signal.SIGINT  # exit status of a worker that Ctrl-C has ended
Job = RowJob | StreamJob


class WorkerDied(BuildError):  # noqa: N818
    """A worker process ended. ``reading`` are the samples that it was reading, None if it was in another step."""

    def __init__(self, message: str, reading: range | None, how: str) -> None:
        super().__init__(message)
        self.reading, self.how = reading, how


class WorkerInterrupted(WorkerDied):
    """Ctrl-C ended a worker process."""


class Pool(NamedTuple):
    """Workers that do what they are sent, in that order. Each reports once for each request, and other things too.

    ``send(worker, None)`` ends a worker. ``reports``, of all workers, end once each was sent None and has done what it
    had before; they raise WorkerDied. A worker has at most ``lists_ahead`` requests that it has not read: with two it
    reads one list while its report of another is sent.
    """

    worker_count: int
    reports: Iterator[Report]
    send: Callable[[int, Request | None], None]
    lists_ahead: int = 2


class _Worker(NamedTuple):
    """A worker process, its number, and the pipe for its reports: `Report`s, then None or a `Failure`."""

    process: BaseProcess
    pipe: Connection
    number: int


@contextlib.contextmanager
def run_job(job: Job, worker_count: int) -> Iterator[Iterator[Report]]:
    """Run `job` in `worker_count` processes, or in this one if that is 0. Yield an iterator over the reports.

    The block may end in another thread than it began in.

    The iterator raises what the job raised, and WorkerDied if a worker died. No worker is left when the block ends.
    """
    workers: list[_Worker] = []
    try:
        with defer_signals():  # an interrupt during a fork would lose the child
            for index in range(worker_count):
                _start(job, index, worker_count, workers)
        with job.watchdog.watch(lambda: [worker.process.pid for worker in workers] or [os.getpid()]):
            yield _receive(job, workers) if workers else job.run(None)
    finally:
        with defer_signals():
            _end(workers, job.watchdog)


@contextlib.contextmanager
def open_processes(
    given: Input,
    build: Build,
    plan: WritePlan,
    worker_count: int,
    init: WorkerInit = None,
    known: Mapping[int, Any] | None = None,
) -> Iterator[Pool]:
    """Start processes that write the rows of a map-style dataset that they are sent; with 0 of them this one does.

    ``known`` has samples that were read before, by their rows.
    """
    worker_count = min(worker_count, max(len(build.absent()), 1))
    if worker_count and given.watched is not None:
        given.watched.close_opened()
    try:
        job = RowJob(given.dataset, build, plan, worker_count, init, known)
    except OSError as error:
        raise _not_started(error, 0, worker_count) from error
    with contextlib.closing(job), run_job(job, worker_count) as reports:
        yield Pool(max(worker_count, 1), reports, job.send)


def _start(job: Job, index: int, worker_count: int, workers: list[_Worker]) -> None:
    try:
        pipe, sender = torch.multiprocessing.Pipe(duplex=False)
        arguments = (job, index, worker_count, sender)
        process = torch.multiprocessing.Process(target=_work, args=arguments, daemon=True)
        workers.append(_Worker(process, pipe, index))
        process.start()
        sender.close()  # only the worker has it now, so the pipe ends when the worker dies
    except Exception as error:
        method = machine.start_method()
        is_told = method == "fork" or machine.imports_program()  # Python says there that a script needs a guard
        if not is_told and (not isinstance(error, OSError) or isinstance(error, ConnectionError)):
            raise _not_sent(error, method) from error
        if not isinstance(error, OSError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):  # a fork writes what they hold first
            raise BuildError(
                f"found that stdout or stderr cannot be written ({error.strerror}), which a new worker process needs; "
                "expected files on a disk with room: free some, or send the output elsewhere (2>/dev/null)"
            ) from error
        raise _not_started(error, index, worker_count) from error


def _not_sent(error: Exception, method: str) -> BuildError:
    if isinstance(error, (ConnectionError, EOFError)):  # the fork server has ended
        return BuildError(
            f"found that no worker process could be started: the program ended when {method!r} imported it again, and "
            "its own error is above. A script needs if __name__ == '__main__': before what it runs"
        )
    return BuildError(
        f"found that the dataset cannot be sent to a worker process ({type(error).__name__}: {error}); expected one "
        f"that can be pickled, as processes start with {method!r} here: use no lambdas and no classes or functions "
        'within functions, or call torch.multiprocessing.set_start_method("fork") first, or use workers=0'
    )


def _not_started(error: OSError, index: int, worker_count: int) -> BuildError:
    return BuildError(
        f"found that worker process {index} of {worker_count} could not be started ({error.strerror}); expected free "
        "processes, file descriptors and memory (ulimit -u, -n, -v): use fewer workers, or workers=0"
    )


def _work(job: Job, worker: int, worker_count: int, sender: Connection) -> None:
    """Run one worker's part of `job` and send its reports."""
    try:
        with contextlib.suppress(Stopped, BrokenPipeError):  # the builder ends, or has ended
            _run_worker(job, worker, worker_count, sender)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _run_worker(job: Job, worker: int, worker_count: int, sender: Connection) -> None:
    machine.die_with_parent()  # first, because the builder may be dead already
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the user's handler is for the builder
    prepare_like_dataloader(job.dataset, worker, worker_count)
    try:
        if job.init is not None:
            job.init(worker)
        for report in job.run(worker):
            sender.send_bytes(pickle.dumps(report))
        job.watchdog.record(worker, ENDED)
        sender.send_bytes(pickle.dumps(None))
    except Exception as error:
        job.watchdog.record(worker, ENDED)
        sender.send_bytes(pickle.dumps(failure_of(error)))


def prepare_like_dataloader(dataset: Any, worker: int, worker_count: int) -> None:
    """Set up this process as torch's DataLoader sets up its workers: one thread, seeds, and `get_worker_info`."""
    torch.set_num_threads(1)
    base_seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=torch.Generator()).item())
    seed = base_seed + worker
    random.seed(seed)
    torch.manual_seed(seed)
    entropy = [worker, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]  # DataLoader seeds numpy with the same four words
    np.random.seed(np.random.SeedSequence(entropy).generate_state(4))
    set_worker_info(worker, worker_count, seed, dataset)


def _receive(job: Job, workers: list[_Worker]) -> Iterator[Report]:
    """Yield reports as they arrive, until every worker has sent None; an empty one where a second brought none."""
    running = {worker.pipe: worker for worker in workers}
    while running:
        ready = connection.wait(list(running), CHECK_SECONDS)
        if not ready:
            yield Report()
        for pipe, worker in list(running.items()):
            if pipe in ready:
                try:
                    message = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):  # OSError: it ended within a message
                    raise _death(job, worker) from None
                if message is None:
                    del running[pipe]
                elif isinstance(message, Failure):
                    raise message.error from message.cause
                else:
                    yield message
            elif not ready and not worker.process.is_alive() and not pipe.poll():  # a fork of it holds the pipe
                raise _death(job, worker)


def _death(job: Job, worker: _Worker) -> WorkerDied:
    process = worker.process
    process.join(STOP_SECONDS)
    code = process.exitcode or 0
    how = f"killed by signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit status {code}"
    reading = job.watchdog.read_by(worker.number)
    if job.watchdog.is_starting(worker.number) and machine.start_method() != "fork":
        where = " before it began"
        advice = (
            "It imports the program again, and its own error is above. A script needs if __name__ == '__main__': "
            "before what it runs; the dataset of a notebook must be in a module, or call "
            'torch.multiprocessing.set_start_method("fork") first'
        )
    elif code == INTERRUPTED:
        where, how, advice = "", "interrupted by SIGINT", "Run this again: the rows that were written are kept"
    elif reading is None:
        where, advice = "", "If memory ran out, use fewer workers="
    else:
        where = f" while it read {describe_samples(reading)}"
        advice = (
            'If that sample cannot be read, leave it out with on_error="skip"; if memory ran out, use fewer workers='
        )
    kind = WorkerInterrupted if code == INTERRUPTED else WorkerDied
    return kind(
        f"{job.build.root}: found that a worker process died{where} (pid {process.pid}, {how}); expected it to finish. "
        f"{advice}",
        reading,
        how,
    )


def _end(workers: list[_Worker], watchdog: Watchdog) -> None:
    """End worker processes within two seconds, whatever they are doing.

    A worker ends by itself before it reads another sample. One that is still in the dataset's code after
    ``STOP_SECONDS``, where it may hold the user's locks, gets SIGTERM, and then SIGKILL if it does not react.
    """
    watchdog.stop()
    running = _join([worker.process for worker in workers])
    for force in (BaseProcess.terminate, BaseProcess.kill):
        for process in running:
            force(process)
        running = _join(running)
    for worker in workers:
        worker.pipe.close()


def _join(processes: list[BaseProcess]) -> list[BaseProcess]:
    """Wait up to ``STOP_SECONDS`` in all for processes to end. Return those that have not."""
    deadline = time.monotonic() + STOP_SECONDS
    for process in filter(BaseProcess.is_alive, processes):  # join is an error for one that was never started
        process.join(max(deadline - time.monotonic(), 0.0))
    return [process for process in processes if process.is_alive()]
