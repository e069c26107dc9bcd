"""Data that comes from no dataset: a simulator, a script, an array that is filled slowly."""

from __future__ import annotations

import contextlib
import operator
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch

from memfeed.building import build as building
from memfeed.building.build import Build, runs
from memfeed.building.recovery import claim_recovered
from memfeed.building.rows import ABSENT
from memfeed.convert.probe import SAMPLES
from memfeed.convert.write_run import PromotionNeeded, WritePlan, promote_column, flatten_sample, write_run
from memfeed.errors import BuildError, RowError, SchemaError, StoreError
from memfeed.schema import codec, values
from memfeed.schema.codec import Packed
from memfeed.schema.containers import map_leaves
from memfeed.schema.fields import Field, Node, Schema
from memfeed.schema.infer import infer
from memfeed.schema.tree import Flattener, open_container
from memfeed.store import format, in_memory
from memfeed.system import files
from memfeed.system.signals import Sigterm, sigterm_unwinds


class Writer:
    """Writes a store row by row or run by run; it appears at ``path``, whole, when the with-block ends cleanly.

    Without ``like`` the schema is inferred from the first samples, as `memfeed.cache` does. With ``like``, a sample (or
    a TensorDict of them, as `datum.expand(n)`, whose first dim then is the ``length``), dtypes and dims are fixed. With
    a ``length``, space is reserved at once and rows may be written in any order: ``w[i] = sample``,
    ``w[i:j] = batch``; a row may be written again, and is absent while it is. Values are cast only where that changes
    none of them.

    After an error, Ctrl-C or SIGTERM the rows stay in ``NAME.build``, synced; the same Writer goes on from there, with
    ``len(w)`` rows written.

    Args:
        path: where the store will be; nothing may be there yet.
        like: a sample that all others are like, or columns with a row for each.
        length: how many rows there will be.
        missing: what becomes of rows never written: "error" names them, "zero" fills them with zeros.

    Raises:
        SchemaError: a sample that does not fit (its number, the field). BuildError: rows are missing at the end.
        RowError: a row out of range. StoreError: something is at ``path``. SpaceError: it will not fit on the disk.

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
    ) -> None:
        if missing not in ("error", "zero"):
            raise ValueError(f'found missing={missing!r}; expected "error" or "zero"')
        columns = in_memory.as_columns(like) if getattr(like, "batch_dims", 0) else None
        sample = like
        if columns is not None and (length is None or length == len(columns)):
            length, sample = len(columns), columns[0]
        if length is not None and length < 1:
            raise ValueError(f"found length={length}; expected at least 1 row")
        self.path, self.length, self.missing = Path(path).resolve(), length, missing
        self._sample = sample
        self._stack = contextlib.ExitStack()
        self._pending: list[Any] = []  # samples that wait for the schema
        self._build: Build | None = None
        self._rows: Any = None
        self._plan: WritePlan | None = None
        self._at = 0
        self._open = self._numbered = self._failed = False
        self._flushed = time.monotonic()
        self._sigterm = Sigterm()

    def __enter__(self) -> Writer:
        if self.path.exists():
            raise StoreError(
                f"{self.path}: found something there; expected a new path: a Writer replaces nothing; remove it first"
            )
        files.make_directory(self.path.parent)
        self._sigterm = self._stack.enter_context(sigterm_unwinds())
        try:
            root = self._stack.enter_context(claim_recovered(self.path))
            if self.path.exists():
                raise StoreError(
                    f"{self.path}: found a whole store there: the commit of an earlier Writer was cut short and has "
                    "been finished now, or another process finished it; open it with memfeed.open"
                )
            self._build = Build.resume(root)
            if self._build is not None:
                if self._build.row_count != self.length or self._build.settings.fingerprint is not None:
                    raise BuildError(
                        f"{root}: found an unfinished build of {self._build.row_count} rows; expected one of this "
                        f"Writer ({self.length}): remove that directory to start over"
                    )
                if self.length is None:
                    self._build.keep_until_absent()
                presence = self._build.presence() != ABSENT
                self._at = int(presence.argmin()) if not presence.all() else len(presence)
                self._numbered = bool(presence[self._at :].any())
            if self._sample is not None:
                self._begin([self._sample])
        except BaseException:
            self._stack.close()
            raise
        self._open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open = False
        with self._stack:
            if kind is None and not self._sigterm.terminating:
                try:
                    self._finish()
                except BaseException:
                    self._sync()
                    raise
            else:
                with contextlib.suppress(Exception):  # the first error is the one to be told
                    self._flush()
                self._sync()

    def _finish(self) -> None:
        if self._failed:
            raise _failed()
        self._flush()
        if self._build is None:
            raise BuildError(f"{self.path}: found no row written; expected at least one")
        if self._rows is None:  # an earlier build had all its rows
            self._rows = self._build.writer()
        if self.missing == "zero":
            self._fill_zeros()
        self._rows.close()
        self._build.commit(self.path)

    def __len__(self) -> int:
        """Rows written so far."""
        written = 0 if self._build is None else int((self._build.presence() != ABSENT).sum())
        return written + len(self._pending)

    @property
    def absent(self) -> list[tuple[int, int]]:
        """The ranges of rows still to be written, as (first, last + 1); only with a length."""
        return [] if self._build is None else [(a, a + k) for a, k in runs(self._build.absent())]

    # --- writing

    def append(self, sample: Any) -> None:
        """The next row. What ``sample`` holds is copied: its memory may be used again at once."""
        self._check_open(in_turn=True)
        if self.length is not None and self._at + len(self._pending) >= self.length:
            raise RowError(f"found one row more than length={self.length}; expected at most that many")
        self._pending.append(map_leaves(values.copy_value, sample))
        due = time.monotonic() - self._flushed > building.SYNC_SECONDS  # what a death can cost
        if due or len(self._pending) >= (SAMPLES if self._plan is None else self._plan.rows_per_write):
            self._flush()

    def extend(self, batch: Any) -> None:
        """The next rows, from a batch: the structure of a sample with a leading dim (or a list) at every leaf."""
        self._check_open(in_turn=True)
        self._flush()
        self._write_batch(self._at, None, batch)

    def __setitem__(self, where: int | slice, batch: Any) -> None:
        if self.length is None:
            raise RowError("found an assignment to rows; expected length= (or like= with rows) for that: use append")
        self._check_open(in_turn=False)
        self._flush()
        self._numbered = True
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
        if self._plan is None:
            self._begin([batch])
        self._write(row, [flatten_sample(self._started()[1], batch, row)])

    # --- inside

    def _begin(self, samples: Sequence[Any]) -> None:
        """Fixes the schema and, unless an earlier build is gone on with, makes the files."""
        schema, structure, _, _ = infer(samples)
        held = frozenset(range(len(schema))) if self._sample is not None else frozenset()
        if self._build is None:
            row_bytes = sum(field.row_bytes for field in schema if field.kind == "fixed")
            if self.length is not None:
                files.check_room(self.path, row_bytes * self.length, f"{self.length:,} rows of {row_bytes} bytes")
            self._build = Build.begin(format.build_path(self.path), schema, self.length, None)
        elif [f.path for f in self._build.schema] != [f.path for f in schema]:
            raise BuildError(
                f"{self._build.root}: found a build with the fields {self._build.schema.names()}; expected "
                f"{schema.names()}: remove that directory to start over"
            )
        self._build.rewrites = self.length is not None
        every = frozenset(range(len(schema)))
        self._plan = WritePlan(Flattener(structure), every, held, max(sum(field.row_bytes for field in schema), 1))
        self._rows = self._build.writer()

    def _started(self) -> tuple[Build, WritePlan]:
        if self._build is None or self._plan is None:
            raise BuildError("found a Writer that is not open; expected it in a with-block")
        return self._build, self._plan

    def _check_open(self, *, in_turn: bool) -> None:
        if not self._open:
            raise BuildError("found a Writer that is not open; expected it in a with-block")
        self._sigterm.check()
        if self._failed:
            raise _failed()
        if in_turn and self._numbered:
            raise RowError(
                "found append or extend after rows were assigned by number; expected one or the other, because there "
                "is no next row then: use w[i] or w[i:j] (w.absent has the rows still to be written)"
            )

    def _flush(self) -> None:
        samples, self._pending, self._flushed = self._pending, [], time.monotonic()
        if not samples:
            return
        self._failed = True  # unless all goes well: the rows behind the error are gone
        if self._plan is None:
            self._begin(samples)
        plan = self._started()[1]
        self._write(self._at, [flatten_sample(plan, s, self._at + i) for i, s in enumerate(samples)])
        self._at += len(samples)
        self._failed = False

    def _write(self, first: int, leaves: Sequence[Sequence[Any]]) -> None:
        build, plan = self._started()
        done = 0
        while done < len(leaves):
            try:
                write_run(self._rows, plan, first + done, leaves[done:], first + done)
                break
            except PromotionNeeded as needed:
                done += needed.row_count
                self._rows = promote_column(build, needed.field_index, [needed.shape])
        self._sync_if_due()

    def _sync(self) -> None:
        with contextlib.suppress(Exception):  # there is an error to be told already
            if self._build is not None:
                self._build.sync()

    def _sync_if_due(self) -> None:
        build, _ = self._started()
        if self._sigterm.ignored():
            build.sync()
        else:
            build.sync_if_due()

    def _write_batch(self, first: int, count: int | None, batch: Any) -> None:
        if self._plan is None:
            self._begin(_first_samples(batch))
        build, _ = self._started()
        schema = build.schema
        columns = _columns(schema.structure, batch)
        lengths = {len(column) for column in columns}
        k = lengths.pop()
        if lengths or (count is not None and k != count):
            found = ", ".join(f"{f.name}: {len(c)}" for f, c in zip(schema, columns, strict=True))
            raise SchemaError(
                f"found a batch with rows {found}; expected {'one number' if count is None else count} in all"
            )
        if self.length is not None and first + k > self.length:
            raise RowError(f"found rows {first} to {first + k - 1}; expected at most row {self.length - 1}")
        packed = self._packed(schema, columns)
        if packed is not None:
            self._rows.write(first, k, packed)
            self._sync_if_due()
        else:
            self._write(first, list(zip(*(_values(column) for column in columns), strict=True)))
        if count is None:
            self._at += k

    def _packed(self, schema: Schema, columns: Sequence[Any]) -> list[Packed] | None:
        """Whole columns at once where every field is fixed and its rows fit; None to go row by row."""
        packed = []
        for field, column in zip(schema, columns, strict=True):
            if field.kind != "fixed" or isinstance(column, list):
                return None
            tensor = values.as_tensor(column)
            if tensor is None or tuple(tensor.shape[1:]) != field.row_shape:
                return None
            try:
                packed.append(codec.pack_column(field, tensor, cast=True))
            except SchemaError as error:
                raise SchemaError(f"field {field.name}: {error}") from None
        return packed

    def _fill_zeros(self) -> None:
        build, _ = self._started()
        for first, count in runs(build.absent()):
            for at in range(first, first + count, 4096):
                here = min(4096, first + count - at)
                self._rows.write(at, here, [_zeros(field, here) for field in build.schema])


def _failed() -> BuildError:
    return BuildError(
        "found a Writer after a write that failed: the samples that waited with it were not written; expected its "
        "with-block to be left by that error: len() of the next Writer for this path says from where to go on"
    )


def _columns(node: Node, batch: Any) -> list[Any]:
    """The leaves of a batch by the structure of a sample; a tuple's may come as a list, a record's as a dict."""
    if node.kind == "leaf":
        return [batch]
    if not node.children:
        return []
    opened = open_container(batch)
    if opened is None:
        raise SchemaError(
            f"found {type(batch).__name__} in a batch; expected a {node.kind} of {len(node.children)} parts"
        )
    keys = opened[0].keys or tuple(range(len(opened[1])))
    wanted = node.keys or tuple(range(len(node.children)))
    held = dict(zip(keys, opened[1], strict=True))
    if set(held) != set(wanted):
        raise SchemaError(f"found a batch with the parts {list(held)}; expected {list(wanted)}")
    return [leaf for key, child in zip(wanted, node.children, strict=True) for leaf in _columns(child, held[key])]


def _values(column: Any) -> Sequence[Any]:
    return list(column.unbind(0)) if isinstance(column, torch.Tensor) else column


def _first_samples(batch: Any) -> list[Any]:
    """A few rows of a batch as samples."""

    def row(value: Any, i: int) -> Any:
        opened = None if isinstance(value, list) else open_container(value)
        if opened is None or hasattr(value, "batch_dims"):
            return value[i]
        parts = [row(part, i) for part in opened[1]]
        if opened[0].kind == "dict":
            return dict(zip(opened[0].keys, parts, strict=True))
        return type(value)(*parts) if opened[0].kind != "tuple" else tuple(parts)

    def rows(value: Any) -> int:
        opened = None if isinstance(value, list) else open_container(value)
        return len(value) if opened is None or hasattr(value, "batch_dims") else rows(opened[1][0])

    if isinstance(batch, list):
        batch = tuple(batch)  # as default_collate gives the batches of tuples
    k = rows(batch)
    if k == 0:
        raise SchemaError("found a batch without rows; expected at least one")
    return [row(batch, i) for i in range(min(k, SAMPLES))]


def _zeros(field: Field, count: int) -> Packed:
    if field.kind == "fixed":
        return Packed([np.zeros(count * field.row_bytes, np.uint8)], None)
    if field.optional:
        return Packed([], np.full((count, max(field.rank, 1)), -1, np.int64))
    if field.kind == "json":
        null = np.frombuffer(b"null" * count, np.uint8)
        return Packed([null], np.full((count, 1), 4, np.int64))
    dims = np.array([dim or 0 for dim in field.shape] or [0], np.int64)
    return Packed([], np.tile(dims, (count, 1)))
