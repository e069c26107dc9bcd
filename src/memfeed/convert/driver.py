"""The builder's side of a conversion: hands out tasks, collects reports, promotes columns between rounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from memfeed.building.build import Build, runs
from memfeed.building.rows import SKIPPED, WRITTEN
from memfeed.convert.jobs import MapJob, RowRange, StreamJob
from memfeed.convert.processes import working
from memfeed.convert.write_run import WRITE_BYTES, Report, WritePlan, promote_now
from memfeed.errors import SchemaError
from memfeed.schema import codec
from memfeed.store.checksums import ChunkHasher

TASK_SECONDS = 0.05
MOST_ROWS_A_TASK = 4096
BLOCK_BYTES = 256 << 20
MOST_WORKERS = 16
OnReport = Callable[[Report], None]


def _run(job: MapJob | StreamJob, workers: int, on_report: OnReport) -> bool:
    """Runs all tasks of a job and promotes the columns that drifted; True when there was none and all is written.

    Raises what a task raised, and BuildError if a worker died.
    """
    drifts: dict[int, list[tuple[int, ...]]] = {}
    with working(job, workers) as reports:
        for report in reports:
            if report.error is not None:
                raise report.error from report.cause
            for number, shape in report.drifts:
                drifts.setdefault(number, []).append(shape)
            on_report(report)
            job.build.sync_if_due()
    for number, shapes in drifts.items():
        promote_now(job.build, number, shapes)
    return not drifts


def convert_map(
    build: Build, dataset: Any, plan: WritePlan, *, workers: int, seconds: float, on_report: OnReport
) -> None:
    """Writes every absent row of a map-style dataset; ``seconds`` is what one sample takes."""
    while len(absent := build.absent()):
        by_time = int(TASK_SECONDS / max(seconds, 1e-7))
        size = max(1, min(by_time, MOST_ROWS_A_TASK, -(-len(absent) // max(4 * workers, 1))))
        tasks = [
            RowRange(at, min(size, first + count - at))
            for first, count in runs(absent)
            for at in range(first, first + count, size)
        ]
        count = min(workers, len(tasks))
        _run(MapJob(dataset, build, plan, tasks, count), count, on_report)


def convert_stream(build: Build, dataset: Iterable[Any], plan: WritePlan, *, workers: int, on_report: OnReport) -> None:
    """Writes every sample of an iterable, in the order it comes (with workers: in turns of ``STREAM_BLOCK``).

    A drift that a worker meets promotes the column and iterates once more; rows that are present stay.
    """
    build.rewrites = True  # a block of which a power loss left parts
    while not _run(StreamJob(dataset, build, plan, workers), workers, on_report):
        pass
    note_skips(build, build.absent())  # the shares of the workers need not end together


def convert_columns(build: Build, columns: Sequence[Any], plan: WritePlan, on_report: OnReport) -> None:
    """Copies whole columns, a block of rows at a time and a column to each thread; no sample is ever made."""
    rows = build.writer()
    step = max(1, int(BLOCK_BYTES / max(plan.row_bytes, 1)))
    hashers = [ChunkHasher() for _ in columns]
    whole = len(build.absent()) == build.row_count

    def copy(number: int, first: int, last: int) -> int:
        field, done = build.schema.fields[number], 0
        part = max(1, WRITE_BYTES // max(field.row_bytes, 1))
        for at in range(first, last, part):
            end = min(at + part, last)
            try:
                packed = codec.pack_column(field, columns[number][at:end], cast=number in plan.casts)
            except SchemaError as error:
                raise SchemaError(f"rows {at} to {end - 1}, field {field.name}: {error}") from None
            done += rows.write_fixed(field, at, packed)
            for buffer in packed.buffers if whole else ():
                hashers[number].update(buffer)  # while it is in the cache
        return done

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # a write waits for memory, not for Python
        metadata = pool.submit(build.write_metadata)
        for first, count in runs(build.absent()):
            for at in range(first, first + count, step):
                last = min(at + step, first + count)
                rows.check_generation()
                written = sum(pool.map(lambda number, a=at, b=last: copy(number, a, b), range(len(columns))))
                rows.mark(at, last - at, WRITTEN)
                on_report(Report(rows=last - at, bytes=written))
                build.sync_if_due()
        metadata.result()
    rows.close()
    if whole:
        names = (f"{field.stem}.memmap" for field in build.schema)
        build.hashes = {file: hasher.hashes() for file, hasher in zip(names, hashers, strict=True)}


def note_skips(build: Build, numbers: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]) -> None:
    """Marks rows as left out."""
    rows = build.writer()
    for first, count in runs(np.sort(np.asarray(numbers, np.int64))):
        rows.mark(first, count, SKIPPED)
    rows.close()


def default_workers(rows: int, seconds: float) -> int:
    """None for a second of work or less, else one worker for each core this process may use, at most 16."""
    if rows * seconds < 1.0:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS, rows)
