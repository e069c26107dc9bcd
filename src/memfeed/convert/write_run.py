"""Write runs of rows: samples in, bytes in files out. Batches of a user's are divided into columns, or into samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from memfeed.building.build import Build
from memfeed.building.partial import SKIPPED, runs
from memfeed.building.rows import RowWriter
from memfeed.convert.watchdog import Failure
from memfeed.errors import NoSampleError, SchemaError, brief, listed
from memfeed.schema import codec, values
from memfeed.schema.codec import Packed, ShapeMismatchError
from memfeed.schema.fields import Field, Node, Schema, shown_dims
from memfeed.schema.infer import promote
from memfeed.schema.tree import Flattener, open_container
from memfeed.store.in_memory import take_row

WRITE_BYTES = 8 << 20
MOST_ROWS_A_WRITE = 4096


class WritePlan(msgspec.Struct, frozen=True):
    """How the samples of a conversion become rows.

    ``is_read`` says that the store is read, and that other processes may fill it, while its rows are written: each row
    is locked, no writer promotes a column, and a row that fails ends only what needs it.
    """

    flattener: Flattener
    casts: frozenset[int] = frozenset()  # indices of the fields that forms= casts
    fixed: frozenset[int] = frozenset()  # indices of the fields that like= or fields= fixes: never promoted
    row_bytes: float = 1.0
    skip_errors: bool = False
    refuse_random: bool = False
    is_read: bool = False
    can_be_decoded: bool = False  # a loader that makes no store of the dataset reads it by a DataLoader
    pictures: dict[int, values.Picture] = {}  # by field index: what the PIL images had when they were probed

    @property
    def rows_per_write(self) -> int:
        """Return how many rows are packed before they are written."""
        return int(min(max(WRITE_BYTES // max(self.row_bytes, 1), 1), MOST_ROWS_A_WRITE))


class Report(msgspec.Struct):
    """Counts of what was written since the last report; the drifts that were found, (field index, shape).

    ``worker`` has finished what it was asked for first of all that is left, in ``seconds``; -1 for none. ``failed`` has
    the rows that could not be read or written, with their errors. ``reader`` has read a list, and will write it in its
    turn; -1 for none.
    """

    row_count: int = 0
    byte_count: int = 0
    skipped_count: int = 0
    drifts: list[tuple[int, tuple[int, ...]]] = []
    worker: int = -1
    reader: int = -1
    failed: list[tuple[int, Failure]] = []
    seconds: float = 0.0


def flatten_sample(plan: WritePlan, sample: Any, index: int) -> list[Any]:
    """Return the leaves of sample `index`. Raise SchemaError with that index if its structure differs.

    Raises SampleError for None where others are samples: some datasets return it in place of a broken one.
    """
    try:
        return plan.flattener(sample)
    except SchemaError as error:
        if sample is None:
            raise no_sample(index) from None
        raise SchemaError(f"sample {index}: {error}") from None


def no_sample(index: int) -> NoSampleError:
    """Return the error for a dataset that returns None in place of sample `index`."""
    return NoSampleError(
        f"sample {index}: found None; expected a sample as the others, because a store has a row for each. Leave such "
        'samples out with store = memfeed.cache(dataset, path, on_error="skip"), and make the Loader of that store; of '
        "an iterable, yield none"
    )


class PackedRows(NamedTuple):
    """The first ``row_count`` of some rows, packed, and what is wrong with the row after them.

    That is a shape that its column does not admit yet (field index, shape), or an error.
    """

    row_count: int
    columns: list[Packed]
    drift: tuple[int, tuple[int, ...]] | None = None
    error: SchemaError | None = None


def pack_rows(schema: Schema, plan: WritePlan, columns: Sequence[Any], indices: Sequence[int]) -> PackedRows:
    """Pack rows, given as one sequence of values per field, up to the first that cannot be packed."""
    count, packed = len(indices), list[Packed]()
    for field_index, (field, column) in enumerate(zip(schema.fields, columns, strict=False)):
        try:
            packed.append(_pack(plan, field_index, field, column, indices))
        except ShapeMismatchError as mismatch:
            at, drift, error = mismatch.position, (field_index, mismatch.shape), None
        except SchemaError as raised:
            at, drift, error = getattr(raised, "position", 0), None, raised
        else:
            continue
        before = pack_rows(schema, plan, [part[:at] for part in columns], indices[:at])
        is_first = before.drift is None and before.error is None
        return before._replace(drift=drift, error=error) if is_first else before
    return PackedRows(count, packed)


def _pack(plan: WritePlan, field_index: int, field: Field, column: Any, indices: Sequence[int]) -> Packed:
    """Pack a column. An array [rows, ...] is packed whole.

    Raises SchemaError with the sample's index and the field, or ShapeMismatchError for a column that can be promoted.
    """
    pack = codec.pack_column if isinstance(column, np.ndarray | torch.Tensor) else codec.pack
    try:
        if field_index in plan.pictures:
            _require_pictures(column, plan.pictures[field_index])
        return pack(field, column, cast=field_index in plan.casts)
    except SchemaError as error:
        at, text = getattr(error, "position", 0), str(error)
        if isinstance(error, ShapeMismatchError):
            if field_index not in plan.fixed:
                raise
            text = (
                f"found {shown_dims(error.shape)}; expected {field.describe()}, as like= or fields= (or the store that "
                "gets the rows) fixed it: change the sample, or leave that argument out"
            )
        named: Any = SchemaError(f"sample {indices[at]}, field {field.name}: {text}")
        named.position = at
        raise named from None


def picture_fields(schema: Schema, makers: Mapping[Any, Any], *, makes_all: bool) -> dict[int, values.Picture]:
    """Return by field index the PIL images that ``makers``, by path, make of their rows.

    Without ``makes_all`` only those of `PLAIN_MODES`: nothing makes others of the rows of a store alone.
    """
    found = dict[int, values.Picture]()
    for at, field in enumerate(schema):
        made = getattr(makers.get(field.path), "keywords", {})
        if "palette" in made and made["kind"].name.startswith("PIL "):
            found[at] = values.Picture(made["kind"].name[4:], bytes(made["palette"].numpy()))
    return {at: one for at, one in found.items() if makes_all or one.mode in values.PLAIN_MODES}


def _require_pictures(column: Sequence[Any], like: values.Picture) -> None:
    """Raise SchemaError for a value that is no PIL image which is made again as ``like``, and not None."""
    for at, value in enumerate(column):
        if value is None or (values.is_pil(value) and values.picture_of(value) == like):
            continue
        found = f"a PIL image of the mode {value.mode}" if values.is_pil(value) else brief(value)
        named: Any = SchemaError(
            f"found {found}; expected a PIL image of {like}, as in the samples that were read first: convert it in the "
            'dataset, as image.convert("RGB"), or return np.array(image)'
        )
        named.position = at
        raise named


class RunWriter:
    """Writes runs of rows. With `may_promote`, which only the builder's process may set, columns are promoted."""

    def __init__(self, build: Build, plan: WritePlan, *, may_promote: bool) -> None:
        self.build, self.plan, self.may_promote = build, plan, may_promote
        self.rows: RowWriter = build.writer()

    def write(self, row: int, samples: Sequence[Sequence[Any]], index: int, report: Report) -> bool:
        """Write samples, given as their leaves, and add to `report`. Return False if the rest needs a promotion."""
        return not samples or self.write_columns(row, list(zip(*samples, strict=True)), index, report)

    def write_columns(self, row: int, columns: Sequence[Any], index: int, report: Report) -> bool:
        """Write rows as `write` does, given as one sequence of values per field."""
        count = len(columns[0])
        return self.write_rows(range(row, row + count), columns, range(index, index + count), report)

    def write_rows(self, rows: Sequence[int], columns: Sequence[Any], indices: Sequence[int], report: Report) -> bool:
        """Write rows that ascend, but need not follow one another, as `write_columns` does.

        ``indices`` are those of the samples in the dataset. Raises SchemaError with the sample's index and the field.
        """
        while rows:
            packed = pack_rows(self.rows.schema, self.plan, columns, indices)
            if packed.error is not None:
                raise packed.error
            done = packed.row_count
            if done:
                where = [(rows[0], done)] if isinstance(rows, range) else runs(rows[:done])
                report.byte_count += self.rows.write_runs(where, packed.columns)
                report.row_count += done
            if packed.drift is not None:
                if not self.may_promote:
                    report.drifts.append(packed.drift)
                    return False
                promote_column(self.build, packed.drift[0], [packed.drift[1]])
                self.rows = self.build.writer()
            rows, columns, indices = rows[done:], [column[done:] for column in columns], indices[done:]
        return True


def promote_column(build: Build, field_index: int, shapes: Sequence[tuple[int, ...]]) -> None:
    """Promote a column so that it admits `shapes`. No writer that was made before may be used afterwards."""
    field = build.schema.fields[field_index]
    promoted = promote(field.decoded, shapes)
    if field.coding is not None:
        promoted = promoted.coded(field.coding.codec, field.coding.parameters)
    build.promote(field_index, promoted)


class Drifts:
    """The shapes that workers found and that their columns do not admit."""

    def __init__(self) -> None:
        self._shapes: dict[int, list[tuple[int, ...]]] = {}  # by field index

    def __bool__(self) -> bool:
        return bool(self._shapes)

    def note(self, report: Report) -> None:
        """Add those of a report."""
        for field_index, shape in report.drifts:
            self._shapes.setdefault(field_index, []).append(shape)

    def promote(self, build: Build) -> bool:
        """Promote the columns so that they admit all shapes, and forget those. Return True if there were any."""
        found, self._shapes = self._shapes, {}
        for field_index, shapes in found.items():
            promote_column(build, field_index, shapes)
        return bool(found)


def mark_skipped(build: Build, rows: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]) -> None:
    """Mark rows as skipped."""
    writer = build.writer()
    for first, count in runs(np.sort(np.asarray(rows, np.int64))):
        writer.mark(first, count, SKIPPED)
    writer.close()


def columns_of(node: Node, batch: Any) -> list[Any]:
    """Return the leaves of `batch`, which has the structure `node` of a sample with a leading dim at every leaf.

    A tuple may be given as a list, a record as a dict. Raises SchemaError for another structure.
    """
    if node.kind == "leaf":
        return [batch]
    if not node.children:
        return []
    if node.kind == "tv_tensor":
        raise SchemaError(
            f"found a batch of {node.name}, which has no canvas_size for each row; expected samples: append them one "
            "by one"
        )
    if node.kind == "tensor":
        raise SchemaError(f"found a batch of {node.name}; expected samples: append them one by one")
    opened = open_container(batch)
    if opened is None:
        raise SchemaError(
            f"found {type(batch).__name__} in a batch; expected a {node.kind} of {len(node.children)} parts"
        )
    keys = opened[0].keys or tuple(range(len(opened[1])))
    expected = node.keys or tuple(range(len(node.children)))
    parts = dict(zip(keys, opened[1], strict=True))
    if set(parts) != set(expected):
        raise SchemaError(
            f"found a batch with the parts {brief(list(parts), 120)}; expected {brief(list(expected), 120)}"
        )
    return [leaf for key, child in zip(expected, node.children, strict=True) for leaf in columns_of(child, parts[key])]


def column_lengths(schema: Schema, columns: Sequence[Any], row_count: int | None) -> int:
    """Return the length of all columns. Raise SchemaError if they differ, or are not `row_count`."""
    lengths = {_length(column) for column in columns}
    if len(lengths) != 1 or (row_count is not None and lengths != {row_count}):
        found = listed([f"{field.name}: {len(column)}" for field, column in zip(schema, columns, strict=True)])
        expected = "the same number" if row_count is None else row_count
        raise SchemaError(f"found a batch with rows {found}; expected {expected} in every column")
    return lengths.pop()


def pack_columns(schema: Schema, columns: Sequence[Any]) -> list[Packed] | None:
    """Return whole columns packed, or None if a field is not fixed, or a column has rows of another shape."""
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


def rows_of(columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the leaves of each row."""
    leaves = (list(column.unbind(0)) if isinstance(column, torch.Tensor) else column for column in columns)
    return list(zip(*leaves, strict=True))


def first_samples(batch: Any, most: int) -> list[Any]:
    """Return up to `most` rows of a batch as samples. Raise SchemaError for a batch without rows."""
    if isinstance(batch, list):
        batch = tuple(batch)  # default_collate returns batches of tuples as lists
    count = _count_rows(batch)
    if not count:
        raise SchemaError("found a batch without rows; expected at least one")
    return [take_row(batch, i) for i in range(min(count, most))]


def _count_rows(value: Any) -> int | None:
    """Return the rows of the first leaf of a batch; None if it has no leaf."""
    if value is None:
        return None
    is_leaf = isinstance(value, list) or hasattr(value, "batch_dims")  # of the batch, or with a batch dim of its own
    opened = None if is_leaf else open_container(value)
    if opened is None:
        return _length(value)
    counts = (_count_rows(part) for part in opened[1])
    return next((count for count in counts if count is not None), None)


def _length(leaf: Any) -> int:
    """Return the rows of a leaf of a batch. Raise SchemaError for a leaf without a leading dim."""
    try:
        return len(leaf)
    except TypeError:
        raise SchemaError(
            f"found {brief(leaf)} ({type(leaf).__name__}) in a batch; expected a tensor, an array or a list with one "
            "value for each row: append writes a single sample"
        ) from None


def zeros(field: Field, row_count: int) -> Packed:
    """Return rows of zeros, or of the emptiest value that a field can hold."""
    if field.kind == "fixed":
        return Packed([np.zeros(row_count * field.row_bytes, np.uint8)], None)
    if field.optional:
        return Packed([], np.full((row_count, max(field.rank, 1)), -1, np.int64))
    if field.coding is not None:
        row = torch.zeros([dim or 0 for dim in field.coding.shape], dtype=field.decoded.torch_dtype, device="cpu")
        return codec.pack(field, [row] * row_count)
    if field.kind == "json":
        null = np.frombuffer(b"null" * row_count, np.uint8)
        return Packed([null], np.full((row_count, 1), 4, np.int64))
    dims = np.array([dim or 0 for dim in field.shape] or [0], np.int64)
    return Packed([], np.tile(dims, (row_count, 1)))
