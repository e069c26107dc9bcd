"""Convert rows in a task of Ray, on any node: read the rows that it is given, and write them into the build."""

from __future__ import annotations

import fcntl
import os
import pickle
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from memfeed.building.build import Build, BuildSettings
from memfeed.building.partial import WRITTEN
from memfeed.building.rows import RowWriter
from memfeed.convert.failure import Failure, failure_of
from memfeed.convert.processes import prepare_like_dataloader
from memfeed.convert.row_worker import RowWorker
from memfeed.convert.watchdog import Watchdog
from memfeed.convert.write_run import Report, WritePlan
from memfeed.errors import BuildError, MemfeedError, brief
from memfeed.store.format import WORK_DIRECTORY
from memfeed.system import files, machine
from memfeed.system.descriptors import FileHandles, with_descriptors

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

    def sync_file(self, path: Path) -> None:
        files.sync(self._opened(path))

    def writer(self) -> RowWriter:
        return _TaskWriter(self)


class _TaskWriter(RowWriter):
    def __init__(self, build: _TaskBuild) -> None:
        super().__init__(build.root, build.schema, build.settings.generation, build.units)
        self._marks = build.marks

    def mark(self, first: int, count: int, state: int) -> None:
        self._marks.append((first, count, state))


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
