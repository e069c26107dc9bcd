"""One run of consecutive rows: samples in, bytes in files out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from memfeed.building.build import Build
from memfeed.building.rows import RowWriter
from memfeed.errors import SchemaError
from memfeed.schema import codec
from memfeed.schema.codec import ShapeMismatchError
from memfeed.schema.infer import promote
from memfeed.schema.tree import Flattener

WRITE_BYTES = 8 << 20
MOST_ROWS_A_WRITE = 1024


class WritePlan(msgspec.Struct, frozen=True):
    """What a conversion needs to know beside the build: how samples come apart, and what to do with bad ones."""

    flattener: Flattener
    casts: frozenset[int] = frozenset()  # fields that dtypes= casts
    held: frozenset[int] = frozenset()  # fields whose kind or dims were fixed by like= or fields=: never promoted
    row_bytes: float = 1.0
    skip_errors: bool = False

    @property
    def rows_a_write(self) -> int:
        """How many rows are packed before they are written."""
        return int(min(max(WRITE_BYTES // max(self.row_bytes, 1), 1), MOST_ROWS_A_WRITE))


class Report(msgspec.Struct):
    """What was done since the last report."""

    rows: int = 0
    bytes: int = 0
    skipped: int = 0
    drifts: list[tuple[int, tuple[int, ...]]] = []  # field, shape
    error: Exception | None = None
    cause: Exception | None = None


class Drifted(Exception):  # noqa: N818
    """A row whose dims the schema does not admit yet; the ``at`` rows before it were written (``bytes`` of them)."""

    def __init__(self, at: int, number: int, shape: tuple[int, ...], written: int) -> None:
        super().__init__(at, number, shape, written)
        self.at, self.number, self.shape, self.bytes = at, number, shape, written


def take_apart(plan: WritePlan, sample: Any, number: int) -> list[Any]:
    """The leaves of sample ``number``; raises SchemaError naming it."""
    try:
        return plan.flattener(sample)
    except SchemaError as error:
        raise SchemaError(f"sample {number}: {error}") from None


def write_run(rows: RowWriter, plan: WritePlan, first: int, leaves: Sequence[Sequence[Any]], number: int) -> int:
    """Packs and writes samples (already taken apart) as the rows from ``first``; returns the bytes written.

    Raises SchemaError naming the sample (``number`` is the first one's) and the field, or Drifted.
    """
    if not leaves:
        return 0
    packed = []
    columns = zip(*leaves, strict=True)
    for which, (field, column) in enumerate(zip(rows.schema.fields, columns, strict=True)):
        try:
            packed.append(codec.pack(field, column, cast=which in plan.casts))
        except ShapeMismatchError as drift:
            shape = drift.shape
            if which in plan.held:
                raise SchemaError(
                    f"sample {number + drift.position}, field {field.name}: found dims {list(shape)}; expected "
                    f"{field.describe()}, as like= or fields= fixed it: make the sample so, or leave that out"
                ) from None
            written = write_run(rows, plan, first, leaves[: drift.position], number)
            raise Drifted(drift.position, which, shape, written) from None
        except SchemaError as error:
            at = getattr(error, "position", 0)
            raise SchemaError(f"sample {number + at}, field {field.name}: {error}") from None
    return rows.write(first, len(leaves), packed)


def promote_now(build: Build, number: int, shapes: Sequence[tuple[int, ...]]) -> RowWriter:
    """Promotes a column in the builder's own process and returns a writer for the new schema."""
    build.promote(number, promote(build.schema.fields[number], shapes))
    return build.writer()
