"""A conversion on Ray. The head sends ranges of rows to tasks, marks what they wrote, and runs dead ones again.

A task, on any node, reads the rows that it is given, and writes them into the build.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import signal
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from memfeed.building.build import Build, BuildSettings
from memfeed.building.partial import DURABLE, WRITTEN
from memfeed.building.rows import RowWriter
from memfeed.convert import watchdog
from memfeed.convert.options import WorkerInit
from memfeed.convert.processes import CHECK_SECONDS, Pool, WorkerDied, prepare_like_dataloader
from memfeed.convert.row_worker import Request, RowWorker
from memfeed.convert.watchdog import Failure, Watchdog, describe_samples, failure_of
from memfeed.convert.write_run import Report, WritePlan, mark_skipped
from memfeed.errors import BuildError, MemfeedError, brief
from memfeed.store.format import WORK_DIRECTORY
from memfeed.system import files, machine
from memfeed.system.descriptors import FileHandles, with_descriptors
from memfeed.system.messages import warn
from memfeed.system.progress import write_line

VISIBLE_SECONDS = 40.0  # NFS keeps what it knows of a directory for 30 s

Mark = tuple[int, int, int]
"""The first of some rows, their number, and their state."""


class TaskSpec(NamedTuple):
    """The arguments that all tasks of one round share. ``pickled`` has the dataset and its ``worker_init_fn``."""

    root: Path
    settings: BuildSettings
    plan: WritePlan
    pickled: bytes
    worker_count: int


class TaskResult(NamedTuple):
    """The result of a task: the rows whose bytes are on the disk, its report, and what ended it but a sample."""

    marks: list[Mark]
    report: Report
    failure: Failure | None


class _TaskBuild(Build):
    """A build as a task sees it: the rows to mark are collected, because the head alone writes the presence map."""

    def __init__(self, root: Path, settings: BuildSettings) -> None:
        super().__init__(root, settings)
        self.marks: list[Mark] = []
        # a descriptor is told of a failed sync, also of another task's, only if it was opened before
        paths = self.row_files()
        self._opened = FileHandles(write=False, most=len(paths))
        for path in paths:
            with_descriptors(partial(self._opened, path))

    def sync_columns(self) -> None:
        for path in self.row_files():
            files.sync(self._opened(path))

    def writer(self) -> RowWriter:
        writer = super().writer()
        writer.mark = lambda first, count, state: self.marks.append((first, count, state))
        return writer


class _RayWorker:
    """One process of Ray. It keeps the dataset, and its heap space, from one task of a round to the next."""

    def __init__(self, spec: TaskSpec, number: int) -> None:
        require_same_build(spec.root, spec.settings)
        dataset, init = _unpickle(spec.pickled)
        self._build = _TaskBuild(spec.root, spec.settings)
        prepare_like_dataloader(dataset, number, spec.worker_count)
        if init is not None:
            init(number)
        self._watchdog = Watchdog(0)
        self._rows = RowWorker(dataset, self._build, spec.plan, self._watchdog, 0)

    def compute(self, rows: range) -> TaskResult:
        report, failure, marks = Report(), None, self._build.marks
        marks.clear()
        try:
            with self._watchdog.watch():
                report = self._rows.write(rows)
        except Exception as error:
            failure = failure_of(error)
        self._rows.close()  # other machines see what was written once it is closed
        if any(state == WRITTEN for _, _, state in marks):
            self._build.sync_columns()  # this machine may die before the head syncs
        return TaskResult(list(marks), report, failure)


_workers: dict[str, _RayWorker] = {}  # of this process, by the round: at most one


def compute(spec: list[Any], round_id: str, number: int, rows: range) -> TaskResult:
    """Read and write some rows of a build, as task ``number`` of those that run at once. Return what was done.

    ``spec`` has the reference of a `TaskSpec`, in a list so that Ray does not fetch it for every task.
    """
    import ray

    try:
        if round_id not in _workers:
            _workers.clear()
            _workers[round_id] = _RayWorker(ray.get(spec[0]), number)
        return _workers[round_id].compute(rows)
    except Exception as error:
        return TaskResult([], Report(), failure_of(error))


def _unpickle(pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled)
    except Exception as error:
        raise BuildError(
            f"found that the dataset cannot be unpickled on {machine.host_name()} ({type(error).__name__}: "
            f"{brief(str(error), 120)}); expected its modules on every node: install them there, or send them along: "
            'ray.init(runtime_env={"working_dir": "."})'
        ) from error


def require_same_build(root: Path, settings: BuildSettings) -> None:
    """Raise BuildError unless this machine sees the head's build at ``root``, and the lock that the head holds."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while (problem := _problem(root, settings)) and time.monotonic() < deadline:
        time.sleep(0.5)
    if problem:
        raise BuildError(
            f"{root}: found on {machine.host_name()} {problem}; expected the directory of the process that called "
            'cache(workers="ray"), because every node writes its rows there: choose a path on a file system that all '
            "nodes share"
        )
    with open(root / WORK_DIRECTORY / "lock", "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
    raise BuildError(
        f"{root}: found on {machine.host_name()} that its lock is free, although {settings.host} holds it; expected "
        "locks that all nodes share: mount that file system with them (Lustre: -o flock; NFS: without local_lock and "
        "nolock), or choose another one"
    )


def _problem(root: Path, settings: BuildSettings) -> str:
    """Return a phrase for the things at ``root`` in place of the build with these settings; "" if it is there."""
    if not os.path.isdir(root):
        return "no such directory"
    if not Build.is_begun(root):
        return "another directory there"
    try:
        found = Build.join(root).settings
    except MemfeedError as error:
        return f"a build that cannot be used ({brief(str(error), 120)})"
    return "" if found == settings else f"another build there, or that of generation {found.generation}"


TASK_SECONDS = 1.0  # what is computed twice if a node dies; far more than it costs to start a task and to sync
RETRIES = 3
PARTS = 16  # into which the rows of a task are cut that died every time
CANCEL_SECONDS = 2.0
DEATHS = ("WorkerCrashedError", "NodeDiedError", "OutOfMemoryError", "ObjectLostError")  # of ray.exceptions


def import_ray() -> Any:
    """Return the module. Raise ImportError with the line that installs it."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise ImportError(
            f"found workers=\"ray\" without Ray ({error}); expected it to be installed: pip install 'memfeed[ray]'"
        ) from error


def pickle_dataset(dataset: Any, init: WorkerInit) -> bytes:
    """Return a dataset as the bytes that tasks get. Raise BuildError if it cannot be pickled."""
    import_ray()
    try:
        return bytes(import_module("ray.cloudpickle").dumps((dataset, init)))
    except Exception as error:  # any class can break pickling in its own way
        raise BuildError(
            f"found a {type(dataset).__name__} that cannot be pickled ({type(error).__name__}: "
            f"{brief(str(error), 160)}); expected one that Ray can send to other machines: open files, locks and "
            "connections when the first sample is read, or convert on this machine: cache(dataset, path)"
        ) from error


@contextlib.contextmanager
def connected() -> Iterator[Any]:
    """Yield the module ``ray``, connected. A connection that the user made is used, and left open.

    Else ``ray.init`` finds the cluster (RAY_ADDRESS, or one that runs on this machine), or starts Ray on this machine
    for the block. Our handler of SIGTERM stays.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a Ray of ours reports nothing to its makers
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(include_dashboard=False, logging_level="WARNING")
    try:
        if is_main:
            signal.signal(signal.SIGTERM, handler)
        yield ray
    finally:
        ray.shutdown()


def cpu_count(ray: Any) -> int:
    """Return how many CPUs the cluster has now, at least 1."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


@contextlib.contextmanager
def open_ray_tasks(ray: Any, build: Build, pickled: bytes, plan: WritePlan, worker_count: int) -> Iterator[Pool]:
    """Let tasks be workers. After the block none writes any more, not even one on a machine that is out of reach."""
    # a failed sync is told to a task, and not to this process, which would call its own rows durable later
    build.sync()
    tasks = _Tasks(ray, build, pickled, plan, worker_count)
    try:
        yield Pool(worker_count, tasks.reports(), tasks.send, lists_ahead=1)
    except BaseException:
        with contextlib.suppress(MemfeedError, OSError):  # the first error is the one to raise
            tasks.stop()
        raise
    tasks.stop()


class _Tasks:
    """Tasks that take the place of worker processes: worker i is the one task with this number that runs at a time."""

    def __init__(self, ray: Any, build: Build, pickled: bytes, plan: WritePlan, worker_count: int) -> None:
        self._ray, self._build, self._plan = ray, build, plan
        spec = TaskSpec(build.root, build.settings, plan, pickled, worker_count)
        self._spec, self._round_id = [ray.put(spec)], uuid.uuid4().hex
        self._left = [deque[tuple[Sequence[int], int]]() for _ in range(worker_count)]  # parts of what each was sent
        self._open = worker_count  # workers that may be sent more
        self._running: dict[Any, tuple[Sequence[int], int]] = {}  # the result -> its rows, and its number
        self._compute = ray.remote(compute)
        self._writer = build.writer()

    def send(self, worker: int, rows: Request | None) -> None:
        """Submit a task, see `Pool`."""
        if rows is None:
            self._open -= 1
        elif not isinstance(rows, str):
            self._left[worker].append((rows, RETRIES))
            self._submit(worker)

    def reports(self) -> Iterator[Report]:
        """Yield a report for each task that ended; an empty one where a second brought none."""
        last = time.monotonic()
        while self._running or self._open > 0:
            ended, _ = self._ray.wait(list(self._running), timeout=CHECK_SECONDS)
            if not ended:
                if time.monotonic() - last >= watchdog.STALL_SECONDS:
                    self._tell_stall(time.monotonic() - last)
                    last = time.monotonic()
                yield Report()
            for task in ended:
                last = time.monotonic()
                rows, number = self._running.pop(task)
                try:
                    result = self._ray.get(task)
                except self._ray.exceptions.RayError as error:
                    report = self._divide(rows, number, error)
                else:
                    report = self._mark(result)
                if self._left[number]:
                    self._submit(number)
                    report.worker = -1
                else:
                    report.worker = number
                yield report

    def stop(self) -> None:
        """Cancel what runs, and let no task of this round write any more."""
        running = list(self._running)
        with contextlib.suppress(self._ray.exceptions.RayError):
            for task in running:
                self._ray.cancel(task, force=True)
            if running:
                self._ray.wait(running, num_returns=len(running), timeout=CANCEL_SECONDS)
        self._writer.close()
        self._build.bar_writers()

    def _submit(self, number: int) -> None:
        rows, retries = self._left[number].popleft()
        task = self._compute.options(num_cpus=1, max_retries=retries, name=f"memfeed {len(rows)} rows from {rows[0]}")
        self._running[task.remote(self._spec, self._round_id, number, rows)] = rows, number

    def _mark(self, result: TaskResult) -> Report:
        """Mark the rows of a task that ended; raise what ended it."""
        for first, count, state in result.marks:
            self._writer.mark(first, count, DURABLE if state == WRITTEN else state)
        if result.failure is not None:
            raise result.failure.error from result.failure.cause
        return result.report

    def _divide(self, rows: Sequence[int], number: int, error: Exception) -> Report:
        """Run the rows of a task that died every time in smaller tasks. Skip a sample that is found so, or raise."""
        if type(error).__name__ not in DEATHS:
            raise BuildError(
                f"{self._build.root}: found that Ray could not run a task ({type(error).__name__}: "
                f"{brief(str(error).strip()[-200:], 200)}); expected memfeed in the same version on every node: "
                "install it there"
            ) from error
        if len(rows) > 1:
            size = -(-len(rows) // PARTS)
            parts = [rows[at : at + size] for at in range(0, len(rows), size)]
            self._left[number].extend((part, 1) for part in parts)
            return Report()
        how, sample = type(error).__name__, f"sample {rows[0]}"
        if not self._plan.skip_errors:
            raise WorkerDied(
                f"{self._build.root}: found that each Ray task died that read {sample} ({how}: "
                f"{brief(str(error), 100)}); expected it to return. Leave that sample out with "
                'on_error="skip"; if memory ran out, use fewer workers=',
                range(rows[0], rows[0] + 1),
                how,
            ) from error
        mark_skipped(self._build, rows)
        warn(f"{sample} is left out: each Ray task died that read it ({how})", RuntimeWarning)
        return Report(skipped_count=1)

    def _tell_stall(self, seconds: float) -> None:
        rows = min((rows for rows, _ in self._running.values()), key=lambda rows: rows[0])
        samples = describe_samples(range(rows[0], rows[-1] + 1))
        free = self._ray.available_resources().get("CPU", 0)
        write_line(
            f"memfeed: no Ray task has ended for {seconds:.0f} s; {len(self._running)} run or wait for a CPU, the "
            f"first has {samples}; {free:g} of {cpu_count(self._ray)} CPUs are free: see `ray status`, "
            "and what the tasks print"
        )
