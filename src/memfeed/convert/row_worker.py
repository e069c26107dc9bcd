"""Read rows of a map-style dataset and write them: in a worker process, in the process itself, or in a task of Ray."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from memfeed.building.build import Build
from memfeed.building.claim import refusal_at
from memfeed.building.partial import runs
from memfeed.convert.fingerprint import require_reread
from memfeed.convert.inputs import read_sample
from memfeed.convert.randomness import Draws, share_memory
from memfeed.convert.watchdog import WAITING, WRITING, Watchdog, failure_of
from memfeed.convert.write_run import Report, RunWriter, WritePlan, flatten_sample, pack_rows
from memfeed.errors import RandomDataError, SampleError, SchemaError, SplitError, UnfitRowError
from memfeed.schema import values
from memfeed.schema.codec import Packed
from memfeed.schema.fields import shown_dims
from memfeed.system import files
from memfeed.system.signals import is_of_handler

REREAD = "reread"
"""Requested in place of rows: compare some rows with the dataset once more, before the commit."""
Request = Sequence[int] | str
"""Rows, or ``REREAD``."""


class ReadList(NamedTuple):
    """Rows that were read and packed, and are not written yet. They ascend."""

    number: int
    rows: list[int]
    columns: list[Packed]
    byte_count: int
    report: Report


class RowWorker:
    """Reads and writes lists of rows, and reports each.

    Args:
        number: of the worker; None for the builder itself, the only process that may promote a column.
        known: samples that were read before, by their rows.
    """

    def __init__(
        self,
        dataset: Any,
        build: Build,
        plan: WritePlan,
        watchdog: Watchdog,
        number: int | None = None,
        known: Mapping[int, Any] | None = None,
    ) -> None:
        self._dataset, self._build, self._plan, self._known = dataset, build, plan, known or {}
        self._watchdog, self._number = watchdog, number or 0
        self._writer = RunWriter(build, plan, may_promote=number is None)
        self.extents = self._writer.rows.extents  # says where a list that was read is placed
        self._draws = Draws(dataset, plan)
        self._reads_singly = plan.skip_errors  # True also once __getitems__ has returned samples in the same memory

    def close(self) -> None:
        """Close its files."""
        self._writer.rows.close()

    def do(self, request: Request) -> Report:
        """Write rows; or raise what `require_reread` raises."""
        if not isinstance(request, str):
            return self.write(request)
        if self._plan.refuse_random:
            require_reread(self._build, self._dataset, self._plan)
        return Report(worker=self._number)

    def write(self, rows: Sequence[int]) -> Report:
        """Read and write ``rows``. Where others do so too, only those that are absent and that no other process has.

        Unless the store is being read, nothing is read after the first row that fails or that needs a promotion.
        """
        report, started = Report(worker=self._number), time.monotonic()
        if self._plan.is_read:
            with self._build.units.hold(rows) as held:
                self._write_parts(sorted(held), report)
        else:
            self._write_parts(rows, report)
        self._watchdog.record(self._number, WAITING)
        report.seconds = time.monotonic() - started
        return report

    def read(self, number: int, rows: Sequence[int], between: Callable[[], object]) -> ReadList:
        """Read list ``number``, and ask for its heap space. ``between`` is called before each sample.

        Nothing is read after the first row that fails. No list is placed after one with a row that failed, or that
        needs a promotion: the rows that are missing then are written before those that follow.
        """
        report, started = Report(worker=self._number), time.monotonic()
        self._watchdog.record(self._number, WAITING)
        self._draws.begin()
        read = self._read(rows, report, between)
        self._check_draws(read)
        order = sorted(read)
        columns = list(zip(*(read[row] for row in order), strict=True))
        packed = pack_rows(self._build.schema, self._plan, columns, order)
        if packed.error is not None:
            report.failed.insert(0, (order[packed.row_count], failure_of(packed.error)))
        elif packed.drift is not None:
            report.drifts.append(packed.drift)
        byte_count = sum(len(buffer) for column in packed.columns for buffer in column.buffers)
        one = ReadList(number, order[: packed.row_count], packed.columns, byte_count, report)
        is_last = bool(report.failed or report.drifts)
        self._writer.rows.ask(number, runs(one.rows), one.columns, is_last=is_last)
        report.seconds = time.monotonic() - started
        return one

    def write_list(self, one: ReadList) -> Report:
        """Write a list that was read. If it is not placed, it is written out of order."""
        report, started = one.report, time.monotonic()
        self._watchdog.record(self._number, WRITING)
        if one.rows:
            report.byte_count += self._writer.rows.write_runs(runs(one.rows), one.columns, one.number)
            report.row_count += len(one.rows)
        self._watchdog.record(self._number, WAITING)
        report.seconds += time.monotonic() - started
        return report

    def _write_parts(self, rows: Sequence[int], report: Report) -> None:
        step = self._plan.rows_per_write
        for first in range(0, len(rows), step):
            self._draws.begin()
            read = self._read(rows[first : first + step], report)
            self._check_draws(read)
            if not self._write(sorted(read), read, report) or (report.failed and not self._plan.is_read):
                break

    def _read(self, rows: Sequence[int], report: Report, between: Callable[[], object] = int) -> dict[int, list[Any]]:
        """Return a copy of the leaves of the sample of each row that can be read, and report the others."""
        read: dict[int, list[Any]] = {}
        unknown = [row for row in rows if row not in self._known]
        samples = dict(zip(unknown, self._read_together(unknown), strict=False)) | dict(self._known)
        for row in rows:
            between()
            try:
                if row in samples:
                    sample = samples[row]
                else:
                    sample = read_sample(self._dataset, row, self._watchdog, self._number)
                # a dataset may fill one buffer for every sample: the next one would change this one
                read[row] = [values.copy_value(leaf) for leaf in flatten_sample(self._plan, sample, row)]
            except SplitError as error:
                raise self._refused(error) from None
            except (SampleError, SchemaError) as error:
                if self._plan.skip_errors and isinstance(error, SampleError):
                    self._writer.rows.skip(row)
                    report.skipped_count += 1
                    continue
                report.failed.append((row, failure_of(error)))
                if not self._plan.is_read:
                    break
        return read

    def _read_together(self, rows: Sequence[int]) -> list[Any]:
        """Return the samples as ``__getitems__`` does; [] without it, or if they must be read one by one."""
        get_many = getattr(self._dataset, "__getitems__", None)
        if not callable(get_many) or self._reads_singly or not len(rows):
            return []
        self._watchdog.begin_read(self._number, rows[0], rows[-1] + 1 - rows[0])
        try:
            samples = list(get_many(list(rows)))
        except (Exception, SystemExit) as error:  # they are read one by one then, so that the error names the sample
            if not self._watchdog.worker_count and is_of_handler(error):
                raise
            samples = []
        finally:
            self._watchdog.end_read(self._number)
        self._reads_singly = share_memory(samples)
        return [] if self._reads_singly or len(samples) != len(rows) else samples

    def _check_draws(self, read: Mapping[int, list[Any]]) -> None:
        try:
            self._draws.check({row: leaves for row, leaves in read.items() if row not in self._known}, self._read_again)
        except RandomDataError as error:
            raise self._refused(error) from None

    def _refused(self, error: RandomDataError | SplitError) -> Exception:
        """Return the error to raise; where the next run can read the dataset by a DataLoader, let it do so."""
        if not self._plan.can_be_decoded:
            return error
        with contextlib.suppress(OSError):
            files.write_file(refusal_at(self._build.root), f"{type(error).__name__}: {error}".encode())
        return type(error)(
            f"{error}. Or run the program again: beside this cache= it reads the dataset as a DataLoader does, and "
            "keeps the files that are decoded"
        )

    def _read_again(self, row: int) -> list[Any]:
        return flatten_sample(self._plan, read_sample(self._dataset, row, self._watchdog, self._number), row)

    def _write(self, rows: Sequence[int], read: Mapping[int, list[Any]], report: Report) -> bool:
        """Write rows, which ascend, and report those that fit no column. Return False if one needs a promotion."""
        problem: SchemaError
        while rows:
            before = report.row_count
            try:
                columns = list(zip(*(read[row] for row in rows), strict=True))
                if self._writer.write_rows(rows, columns, rows, report):
                    return True
                if not self._plan.is_read:
                    return False
                done = report.row_count - before
                problem = self._drift(rows[done], *report.drifts.pop())
            except SchemaError as error:
                if len(rows) > 1:  # find the row
                    return all(self._write([row], read, report) for row in rows)
                done, problem = 0, error
            report.failed.append((rows[done], failure_of(problem)))
            if not self._plan.is_read:
                return False
            rows = rows[done + 1 :]
        return True

    def _drift(self, row: int, field_index: int, shape: tuple[int, ...]) -> UnfitRowError:
        field, store = self._build.schema.fields[field_index].decoded, self._build.root.with_suffix("")
        return UnfitRowError(
            f"sample {row}, field {field.name}: found {shown_dims(shape)}; expected {field.describe()}, as the samples "
            "had that were read first",
            "A store that is read while it is filled changes a column only for a Loader with a collate_fn and no "
            "transform: pass one that takes such samples, or write the store before it is read, once: "
            f"memfeed.cache(dataset, {str(store)!r}), with the same split= and forms=, keeps the rows that are "
            "written, and changes this column",
            field_index,
            shape,
        )
