"""The builder's side of a conversion: divide the rows, collect reports, promote columns between rounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from memfeed.building.build import Build
from memfeed.building.partial import SKIPPED, WRITTEN, runs
from memfeed.convert.jobs import MapJob, StreamJob
from memfeed.convert.options import WorkerInit
from memfeed.convert.processes import WorkerDied, run_job
from memfeed.convert.write_run import WRITE_BYTES, Report, RunWriter, WritePlan, promote_column
from memfeed.errors import SchemaError
from memfeed.schema import codec
from memfeed.store import ragged
from memfeed.store.checksums import ChunkHasher
from memfeed.system.messages import warn

RANGE_SECONDS = 0.05
MOST_ROWS_A_RANGE = 4096
MOST_ROWS_OF_TABLES = 65_536
BLOCK_BYTES = 256 << 20
MOST_WORKERS = 16
OnReport = Callable[[Report], None]


def convert_map(
    build: Build,
    dataset: Any,
    plan: WritePlan,
    *,
    worker_count: int,
    seconds: float,
    on_report: OnReport,
    init: WorkerInit = None,
) -> None:
    """Write every absent row of a map-style dataset; reading one sample takes about `seconds`."""
    while len(absent := build.absent()):
        by_time = int(RANGE_SECONDS / max(seconds, 1e-7))
        size = max(1, min(by_time, MOST_ROWS_A_RANGE, -(-len(absent) // max(4 * worker_count, 1))))
        ranges = cut(absent, size)
        useful = min(worker_count, len(ranges))
        try:
            _run(MapJob(dataset, build, plan, ranges, useful, init), useful, on_report)
        except WorkerDied as death:
            if not plan.skip_errors or death.reading is None:
                raise
            for row in death.reading:
                _read_alone(build, dataset, plan, row, on_report, init)


def _read_alone(build: Build, dataset: Any, plan: WritePlan, row: int, on_report: OnReport, init: WorkerInit) -> None:
    """Read a sample that may have killed a worker again, in a worker of its own. Skip it if that dies too."""
    try:
        _run(MapJob(dataset, build, plan, [range(row, row + 1)], 1, init), 1, on_report)
    except WorkerDied as death:
        if death.reading is None:
            raise
        mark_skipped(build, [row])
        on_report(Report(skipped_count=1))
        text = f"sample {row} is left out: two worker processes died while they read it ({death.how})"
        warn(text, RuntimeWarning)


def convert_stream(
    build: Build,
    dataset: Iterable[Any],
    plan: WritePlan,
    *,
    worker_count: int,
    length: int | None,
    on_report: OnReport,
    init: WorkerInit = None,
) -> None:
    """Write every sample of an iterable (with a `length`, the first so many), in its order.

    Workers take turns of ``STREAM_BLOCK`` rows.

    After a drift that a worker found, its column is promoted and the iterable is read again. Rows that were written
    stay.
    """
    build.rewrites = True  # after a power loss, parts of a block may be written already
    while not _run(StreamJob(dataset, build, plan, worker_count, length, init), worker_count, on_report):
        pass
    mark_skipped(build, build.absent())  # the workers' shares may have different lengths


def cut(rows: np.ndarray[Any, np.dtype[np.int64]], size: int) -> list[range]:
    """Return ranges of at most ``size`` rows that together are the sorted ``rows``."""
    return [
        range(at, min(at + size, first + count))
        for first, count in runs(rows)
        for at in range(first, first + count, size)
    ]


def _run(job: MapJob | StreamJob, worker_count: int, on_report: OnReport) -> bool:
    return run_round(job.build, run_job(job, worker_count), on_report)


def run_round(build: Build, job: AbstractContextManager[Iterator[Report]], on_report: OnReport) -> bool:
    """Run a job, then promote the columns that drifted. Return True if none did, so that all its rows are written."""
    drifts: dict[int, list[tuple[int, ...]]] = {}
    with job as reports:
        for report in reports:
            for field_index, shape in report.drifts:
                drifts.setdefault(field_index, []).append(shape)
            on_report(report)
            build.sync_if_due()
    for field_index, shapes in drifts.items():
        promote_column(build, field_index, shapes)
    return not drifts


def convert_columns(build: Build, columns: Sequence[Any], plan: WritePlan, on_report: OnReport) -> None:
    """Copy whole columns, one block of rows after the other, with a thread for each column."""
    writer = build.writer()
    step = max(1, int(BLOCK_BYTES / max(plan.row_bytes, 1)))
    hashers = [ChunkHasher() for _ in columns]
    is_whole = len(build.absent()) == build.row_count

    def copy(field_index: int, first: int, last: int) -> int:
        field, written = build.schema.fields[field_index], 0
        part = max(1, WRITE_BYTES // max(field.row_bytes, 1))
        for at in range(first, last, part):
            end = min(at + part, last)
            try:
                packed = codec.pack_column(field, columns[field_index][at:end], cast=field_index in plan.casts)
            except SchemaError as error:
                raise SchemaError(f"rows {at} to {end - 1}, field {field.name}: {error}") from None
            written += writer.write_fixed(field, at, packed)
            for buffer in packed.buffers if is_whole else ():
                hashers[field_index].update(buffer)  # while it is in the processor's cache
        return written

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # a write waits for memory, not for Python
        for first, count in runs(build.absent()):
            for at in range(first, first + count, step):
                last = min(at + step, first + count)
                writer.check_generation()
                written = sum(pool.map(lambda field_index, a=at, b=last: copy(field_index, a, b), range(len(columns))))
                writer.mark(at, last - at, WRITTEN)
                on_report(Report(row_count=last - at, byte_count=written))
                build.sync_if_due()
    writer.close()
    if is_whole:
        names = (name for field in build.schema for name in ragged.column_files(field, 0))
        build.hashes = {file: hasher.hashes() for file, hasher in zip(names, hashers, strict=True)}


def convert_tables(build: Build, columns: Sequence[Any], plan: WritePlan, on_report: OnReport) -> None:
    """Write columns of which some are text, JSON values or rows of varying lengths, a run of rows at a time."""
    writer = RunWriter(build, plan, may_promote=True)
    step = max(1, min(int(WRITE_BYTES / max(plan.row_bytes, 1)), MOST_ROWS_OF_TABLES))
    for first, count in runs(build.absent()):
        for at in range(first, first + count, step):
            rows, report = slice(at, min(at + step, first + count)), Report()
            writer.write_columns(at, [column[rows] for column in columns], at, report)
            on_report(report)
            build.sync_if_due()
    writer.rows.close()


def mark_skipped(build: Build, rows: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]) -> None:
    """Mark rows as skipped."""
    writer = build.writer()
    for first, count in runs(np.sort(np.asarray(rows, np.int64))):
        writer.mark(first, count, SKIPPED)
    writer.close()


def default_workers(row_count: int, seconds: float) -> int:
    """Return 0 for a second of work or less, else one worker per core this process may use, at most 16."""
    if row_count * seconds < 1.0:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS, row_count)
