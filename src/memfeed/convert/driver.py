"""The ways to write the rows of a build: of a map-style dataset, an iterable, columns, and tables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from memfeed.building.build import Build
from memfeed.building.partial import WRITTEN, runs
from memfeed.convert.jobs import StreamJob
from memfeed.convert.options import WorkerInit
from memfeed.convert.processes import Pool, run_job
from memfeed.convert.row_engine import LIST_SECONDS, MOST_IDLE_ROWS, RowEngine
from memfeed.convert.write_run import WRITE_BYTES, Drifts, Report, RunWriter, WritePlan, mark_skipped
from memfeed.errors import SchemaError
from memfeed.schema import codec
from memfeed.store import ragged
from memfeed.store.checksums import ChunkHasher
from memfeed.system import machine
from memfeed.system.progress import write_line

MOST_ROWS_OF_TABLES = 65_536
BLOCK_BYTES = 256 << 20
MOST_WORKERS = 16
OnReport = Callable[[Report], None]


def convert_map(
    build: Build,
    plan: WritePlan,
    open_pool: Callable[[], AbstractContextManager[Pool]],
    on_report: OnReport,
    *,
    seconds: float,
    list_seconds: float = LIST_SECONDS,
    most_rows: int = MOST_IDLE_ROWS,
) -> None:
    """Write every absent row of a map-style dataset, as `RowEngine` does. Raise what a sample raised."""
    if not len(build.absent()):
        return
    engine = RowEngine(build, plan, open_pool, seconds, list_seconds, most_rows)
    with contextlib.closing(engine):
        for report in engine.reports():
            on_report(report)
            for _, failure in sorted(report.failed)[:1]:
                raise failure.error from failure.cause
            build.sync_if_due()
            if engine.is_idle:
                engine.stop()


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
    is_whole, drifts = False, Drifts()
    while not is_whole:
        with run_job(StreamJob(dataset, build, plan, worker_count, length, init), worker_count) as reports:
            for report in reports:
                drifts.note(report)
                on_report(report)
                build.sync_if_due()
        is_whole = not drifts.promote(build)
    mark_skipped(build, build.absent())  # the workers' shares may have different lengths


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


def default_workers(row_count: int, seconds: float, says: bool) -> int:
    """Return 0 for a second of work or less, else one worker per core this process may use, at most 16.

    None is started where it would import the program again: a script may have no guard, and a notebook's classes
    cannot be sent.
    """
    if row_count * seconds < 1.0:
        return 0
    count, method = min(machine.core_count(), MOST_WORKERS, row_count), machine.start_method()
    if method == "fork":
        return count
    if says:
        write_line(
            f"memfeed: workers=0 is used, because processes start with {method!r} here and import the program again; "
            f"for more speed pass workers={count}, in a script below if __name__ == '__main__':"
        )
    return 0
