"""The lengths of ragged rows, read from a column's dims: no value is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from memfeed.errors import FieldError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field, Schema
from memfeed.schema.fields import Path as FieldPath
from memfeed.store.column import Column

ROWS_AT_ONCE = 1 << 20


def row_lengths(column: Column, rows: Int64Array) -> Int64Array:
    """Return the size of each of ``rows`` of a jagged column along the dim that varies, int64 [k].

    Raises FieldError for any other column, CorruptStoreError for a row outside of its file.
    """
    if not is_jagged(column.field):
        raise FieldError(
            f"found field {column.field.name}, which is {column.field.describe()}; expected one whose rows are tensors "
            "of which one dim varies"
        )
    lengths = np.empty(len(rows), np.int64)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        lengths[part] = column.locate(rows[part]).dims[:, column.field.ragged_dim]
    return lengths


def is_jagged(field: Field) -> bool:
    """Return True if the rows of a field are tensors, never None, of which one dim varies."""
    return field.kind == "jagged" and not field.optional


def jagged_field(schema: Schema, which: str | int | FieldPath | None, option: str) -> int:
    """Return the index of the field that ``which`` names; None stands for the only jagged one.

    Several jagged fields of the same lengths count as one. ``option`` is the argument that names the field. Raises
    FieldError if there is no such field, or more than one.
    """
    jagged = [index for index, field in enumerate(schema) if is_jagged(field)]
    if which is None:
        groups = {schema.fields[index].lengths_of if _has_group(schema, index) else -1 - index for index in jagged}
        if len(groups) != 1:
            names = ", ".join(schema.fields[index].name for index in jagged[:5]) or "none"
            raise FieldError(
                f"found {len(groups)} fields of varying length ({names}); expected one: name the field whose lengths "
                f'count: {option}="{schema.fields[jagged[0]].name if jagged else "input_ids"}"'
            )
        return jagged[0]
    index = schema.field_index(which)
    if index not in jagged:
        names = ", ".join(schema.fields[at].name for at in jagged[:5]) or "none"
        field = schema.fields[index]
        raise FieldError(
            f"found {option}={which!r}, which is {field.describe()}; expected a field of varying length (this store "
            f"has: {names})"
        )
    return index


def _has_group(schema: Schema, index: int) -> bool:
    return schema.fields[index].lengths_of is not None


def fill_value(field: Field, value: Any, option: str) -> Any:
    """Return the value of ``option`` for a field: ``value`` itself, or its entry for the field in a mapping.

    Raises FieldError for a value that the field's dtype cannot hold.
    """
    found = value.get(field.name) if isinstance(value, Mapping) else value
    try:
        fits = isinstance(found, int | float) and (
            found != found or torch.tensor(found, dtype=field.torch_dtype, device="cpu").item() == found
        )
    except (RuntimeError, TypeError, ValueError, OverflowError):
        fits = False
    if not fits or (found != found and not field.torch_dtype.is_floating_point):
        raise FieldError(
            f"found {option}={value!r} for field {field.name}, which is {field.describe()}; expected a number that "
            f"{field.dtype} holds exactly: {option}=0"
        )
    return found


def same_lengths(columns: Sequence[Column], rows: Int64Array) -> Int64Array:
    """Return the lengths that ``rows`` have in all of ``columns``. Raises FieldError where they differ."""
    first, *others = (row_lengths(column, rows) for column in columns)
    for column, lengths in zip(columns[1:], others, strict=True):
        if not np.array_equal(first, lengths):
            row = int((first != lengths).argmax())
            raise FieldError(
                f"found row {row} of {int(first[row])} elements in field {columns[0].field.name}, and of "
                f"{int(lengths[row])} in {column.field.name}; expected the same lengths in every row: pack one of them"
            )
    return first
