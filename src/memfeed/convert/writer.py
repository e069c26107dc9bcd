"""`memfeed.Writer`: write a store row by row, from a simulator, a script, an array that is filled slowly."""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Literal

import numpy as np

from memfeed.building import build as building
from memfeed.building.build import Build
from memfeed.building.commit import claim_recovered
from memfeed.building.partial import ABSENT, runs
from memfeed.building.rows import RowWriter
from memfeed.convert.forms import codecs_of, coded_schema, common_shapes
from memfeed.convert.options import check_metadata
from memfeed.convert.probe import SAMPLES
from memfeed.convert.write_run import (
    Report,
    RunWriter,
    WritePlan,
    column_lengths,
    columns_of,
    first_samples,
    flatten_sample,
    pack_columns,
    rows_of,
    zeros,
)
from memfeed.errors import BuildError, RowError, StoreError
from memfeed.schema import values
from memfeed.schema.containers import map_leaves
from memfeed.schema.infer import infer
from memfeed.schema.tree import Flattener, as_types
from memfeed.store import format, in_memory
from memfeed.store.dataset_attributes import Kept
from memfeed.system import files
from memfeed.system.signals import Sigterm, sigterm_unwinds

ZERO_ROWS = 4096  # written at a time


class Writer:
    """Writes a store row by row or batch by batch. It appears at ``path`` when the with-block ends without an error.

    Without ``like`` the schema is inferred from the first samples, as `memfeed.cache` does. With ``like``, a sample (or
    a TensorDict of them, as `datum.expand(n)`, whose first dim then is the ``length``), dtypes and dims are fixed. With
    a ``length``, space is reserved at once and rows may be written in any order: ``w[i] = sample``,
    ``w[i:j] = batch``. A row may be written again; if the process dies meanwhile, that row is absent. Values are cast
    only if that changes none of them.

    After an error, Ctrl-C or SIGTERM the rows stay in ``NAME.build``, synced. The same Writer resumes from there, with
    ``len(w)`` rows written. Threads may share a Writer. A forked child may not: it can neither write nor commit.

    Args:
        path: the store's directory; nothing may exist there yet.
        like: a sample with the structure, dtypes and dims of all others, or columns with one row per sample.
        length: the number of rows.
        missing: "error" raises BuildError for rows that were never written, "zero" fills them with zeros.
        forms: as for `memfeed.recode`: the codecs of fields, ``{"image": "jpeg:95"}``, or one for all that it suits.
        types: as for `memfeed.cache`: a class that no sample has replaces the outermost container of the samples.
        metadata: a dict of JSON values of yours, at most 1 MiB, which ``store.metadata`` returns.

    Raises:
        SchemaError: a sample that does not fit (its index, the field). BuildError: rows are missing at the end.
        RowError: a row out of range. StoreError: something is at ``path``. SpaceError: the disk has too little space.

    Example::

        with memfeed.Writer("steps.mf") as w:
            for step in range(1000):
                w.append({"obs": torch.rand(4), "reward": float(step)})
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        like: Any = None,
        length: int | None = None,
        missing: Literal["error", "zero"] = "error",
        forms: Any = None,
        types: type[Any] | Iterable[type[Any]] = (),
        metadata: dict[str, Any] | None = None,
    ) -> None:
        if missing not in ("error", "zero"):
            raise ValueError(f'found missing={missing!r}; expected "error" or "zero"')
        columns = in_memory.as_columns(like) if getattr(like, "batch_dims", 0) else None
        sample = like
        if columns is not None and (length is None or length == len(columns)):
            length, sample = len(columns), columns[0]
        if length is not None and length < 1:
            raise ValueError(f"found length={length}; expected at least 1 row")
        self.path, self.length, self.missing = format.resolve(path, to_write=True), length, missing
        self._sample, self._types, self._forms = sample, as_types(types), codecs_of(forms)
        self._kept = Kept(metadata=check_metadata(metadata or {}))
        self._stack = contextlib.ExitStack()
        self._pending: list[Any] = []  # samples that wait for the schema
        self._build: Build | None = None
        self._writer: RunWriter | None = None  # from the moment the schema is known
        self._next_row = 0
        self._is_open = self._has_assigned = self._has_failed = False
        self._flushed = time.monotonic()
        self._sigterm = Sigterm()
        self._lock, self._pid = threading.Lock(), os.getpid()

    def __enter__(self) -> Writer:
        if self.path.exists():
            raise StoreError(
                f"{self.path}: found something there; expected a new path, because a Writer replaces nothing: "
                "remove it first"
            )
        files.make_directory(self.path.parent)
        self._sigterm = self._stack.enter_context(sigterm_unwinds())
        try:
            root = self._stack.enter_context(claim_recovered(self.path))
            if self.path.exists():
                raise StoreError(
                    f"{self.path}: found a whole store there: the commit of an earlier Writer was cut short and has "
                    "been finished now, or another process finished it; expected none: open it with memfeed.open"
                )
            self._build = Build.resume(root)
            if self._build is not None:
                if self._build.row_count != self.length or self._build.settings.fingerprint is not None:
                    raise BuildError(
                        f"{root}: found an unfinished build of {self._build.row_count} rows; expected one of this "
                        f"Writer ({self.length}): remove that directory to start over"
                    )
                presence = self._build.presence() != ABSENT
                self._next_row = int(presence.argmin()) if not presence.all() else len(presence)
                if self.length is None:  # rows are written in order: none counts after one that is lost
                    self._build.units.drop(np.arange(self._next_row, len(presence)))
                    presence = presence[: self._next_row]
                self._has_assigned = bool(presence[self._next_row :].any())
            if self._sample is not None:
                self._begin([self._sample])
        except BaseException:
            self._stack.close()
            raise
        self._is_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if os.getpid() != self._pid:
            return  # a forked child left the block of its parent
        self._is_open = False
        with self._stack:
            if kind is None and not self._sigterm.terminating:
                try:
                    self._finish()
                except BaseException:
                    self._sync()
                    raise
            else:
                with contextlib.suppress(Exception):  # the first error is the one to raise
                    self._flush()
                self._sync()

    def _finish(self) -> None:
        if self._has_failed:
            raise _failed()
        self._flush()
        if self._build is None:
            raise BuildError(f"{self.path}: found no row written; expected at least one")
        rows = self._build.writer() if self._writer is None else self._writer.rows  # None: a build with all its rows
        if self.missing == "zero":
            _fill_zeros(self._build, rows)
        rows.close()
        self._build.commit(self.path, kept=self._kept)

    def __len__(self) -> int:
        """Return the number of rows written so far."""
        written = 0 if self._build is None else int((self._build.presence() != ABSENT).sum())
        return written + len(self._pending)

    @property
    def absent(self) -> list[tuple[int, int]]:
        """Return the ranges of rows still to be written, as (first, last + 1); only with a length."""
        return [] if self._build is None else [(a, a + k) for a, k in runs(self._build.absent())]

    # --- writing

    def append(self, sample: Any) -> None:
        """Write the next row. The sample is copied: its memory may be used again at once."""
        with self._lock:
            self._check_open(in_turn=True)
            if self.length is not None and self._next_row + len(self._pending) >= self.length:
                raise RowError(f"found one row more than length={self.length}; expected at most that many")
            self._pending.append(map_leaves(values.copy_value, sample))
            is_due = time.monotonic() - self._flushed > building.SYNC_SECONDS  # samples that a killed process loses
            if is_due or len(self._pending) >= (SAMPLES if self._writer is None else self._writer.plan.rows_per_write):
                self._flush()

    def extend(self, batch: Any) -> None:
        """Write the next rows, from a batch: the structure of a sample with a leading dim (or a list) at every leaf."""
        with self._lock:
            self._check_open(in_turn=True)
            self._flush()
            self._next_row += self._write_batch(self._next_row, None, batch)

    def __setitem__(self, where: int | slice, batch: Any) -> None:
        with self._lock:
            if self.length is None:
                raise RowError(
                    "found an assignment to rows; expected length= (or like= with rows) for that: use append"
                )
            self._check_open(in_turn=False)
            self._flush()
            self._has_assigned = True
            if isinstance(where, slice):
                first, last, step = where.indices(self.length)
                if step != 1:
                    raise RowError(f"found a slice with step {step}; expected one run of rows")
                self._write_batch(first, last - first, batch)
                return
            try:
                where = operator.index(where)
            except TypeError:
                raise RowError(f"found {type(where).__name__} as a row; expected an int or a slice") from None
            row = where + self.length if where < 0 else where
            if not 0 <= row < self.length:
                raise RowError(f"found row {where}; expected {-self.length} to {self.length - 1}")
            self._write(row, [batch], self._writer or self._begin([batch]))

    # --- internal

    def _begin(self, samples: Sequence[Any]) -> RunWriter:
        """Fix the schema. Create the files, unless an interrupted build is resumed."""
        schema, structure, _, _ = infer(samples, types=self._types)
        rows = [Flattener(structure)(sample) for sample in samples] if self._forms.has_codecs else []
        schema = coded_schema(schema, self._forms, common_shapes(schema, rows))
        row_bytes = sum(field.row_bytes for field in schema)
        if self._build is None:
            if self.length is not None:
                fixed_bytes = sum(field.row_bytes for field in schema if field.kind == "fixed")
                what, advice = f"{self.length:,} rows of {fixed_bytes} bytes", "free some space, or choose another path"
                files.check_room(self.path, fixed_bytes * self.length, what, advice)
            self._build = Build.begin(format.build_path(self.path), schema, self.length, None)
        elif [field.path for field in self._build.schema] != [field.path for field in schema]:
            raise BuildError(
                f"{self._build.root}: found a build with the fields {self._build.schema.names()}; expected "
                f"{schema.names()}: remove that directory to start over"
            )
        self._build.rewrites = self.length is not None
        every = frozenset(range(len(schema)))
        fixed = every if self._sample is not None else frozenset[int]()
        plan = WritePlan(Flattener(structure), every, fixed, max(row_bytes, 1))
        self._writer = RunWriter(self._build, plan, may_promote=True)
        return self._writer

    def _check_open(self, *, in_turn: bool) -> None:
        if not self._is_open:
            raise BuildError("found a Writer that is not open; expected it in a with-block")
        if os.getpid() != self._pid:
            raise BuildError(
                "found a Writer in a process that was forked from its own; expected it there only: send samples to "
                "that process, or write a store in each process"
            )
        self._sigterm.check()
        if self._has_failed:
            raise _failed()
        if in_turn and self._has_assigned:
            raise RowError(
                "found append or extend after rows were assigned by number; expected one or the other, because there "
                "is no next row then: use w[i] or w[i:j] (w.absent has the rows still to be written)"
            )

    def _flush(self) -> None:
        samples, self._pending, self._flushed = self._pending, [], time.monotonic()
        if not samples:
            return
        self._has_failed = True  # until all are written: an error loses the samples after it
        self._write(self._next_row, samples, self._writer or self._begin(samples))
        self._next_row += len(samples)
        self._has_failed = False

    def _write(self, row: int, samples: Sequence[Any], writer: RunWriter) -> None:
        leaves = [flatten_sample(writer.plan, sample, row + i) for i, sample in enumerate(samples)]
        writer.write(row, leaves, row, Report())
        self._sync_if_due(writer.build)

    def _write_batch(self, row: int, row_count: int | None, batch: Any) -> int:
        """Write the rows of `batch` from `row` on, and return how many: `row_count`, unless that is None."""
        writer = self._writer or self._begin(first_samples(batch, SAMPLES))
        schema = writer.build.schema
        columns = columns_of(writer.plan.flattener.structure, batch)
        count = column_lengths(schema, columns, row_count)
        if self.length is not None and row + count > self.length:
            raise RowError(f"found rows {row} to {row + count - 1}; expected at most row {self.length - 1}")
        packed = pack_columns(schema, columns)
        if packed is None:
            writer.write(row, rows_of(columns), row, Report())
        else:
            writer.rows.write(row, count, packed)
        self._sync_if_due(writer.build)
        return count

    def _sync(self) -> None:
        with contextlib.suppress(Exception):  # another error is being raised already
            if self._build is not None:
                self._build.sync()

    def _sync_if_due(self, build: Build) -> None:
        try:
            if self._sigterm.ignored():
                build.sync()
            else:
                build.sync_if_due()
        except BaseException:
            self._has_failed = True  # rows that were written long before may be absent now
            raise


def _fill_zeros(build: Build, rows: RowWriter) -> None:
    for first, count in runs(build.absent()):
        for row in range(first, first + count, ZERO_ROWS):
            part = min(ZERO_ROWS, first + count - row)
            rows.write(row, part, [zeros(field, part) for field in build.schema])


def _failed() -> BuildError:
    return BuildError(
        "found a Writer after a write or a sync that failed, which lost rows that it was given before; expected "
        "that error to end its with-block: go on with another Writer for this path. Its len() says from which row to "
        "continue; if rows were assigned by number, its absent says which to write again"
    )
