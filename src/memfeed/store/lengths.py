"""The lengths of ragged rows, read from a column's dims: no value is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from memfeed.errors import FieldError, brief, listed
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field, Schema
from memfeed.schema.fields import Path as FieldPath
from memfeed.store.columns import Column

ROWS_AT_ONCE = 1 << 20

Fill: TypeAlias = float | Mapping[Any, float] | None
"""A number that fills up all fields of varying length, or one for each field by its name; see `fill_values`."""


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
    names = ", ".join(schema.fields[index].name for index in jagged[:5]) or "none"
    if which is None:
        groups = {-1 - i if (group := schema.fields[i].lengths_of) is None else group for i in jagged}
        if len(groups) != 1:
            raise FieldError(
                f"found {len(groups)} fields of varying length ({names}); expected one: name the field whose lengths "
                f'count: {option}="{schema.fields[jagged[0]].name if jagged else "input_ids"}"'
            )
        return jagged[0]
    index = schema.field_index(which)
    if index not in jagged:
        field = schema.fields[index]
        raise FieldError(
            f"found {option}={which!r}, which is {field.describe()}; expected a field of varying length (this store "
            f"has: {names})"
        )
    return index


def fill_values(given: Any, schema: Schema, indices: Sequence[int], option: str) -> dict[int, Any]:
    """Return the value of each field that ``given`` fills up, by the field's index, in the order of the schema.

    Every argument that fills up rows follows this rule. A number is the value of all fields at ``indices``, those that
    can be filled up. A mapping gives the number of each field that it names, see `memfeed.schema.names`. None fills up
    no field. ``option`` is the name of the argument. Raises FieldError for everything else: a name that no field has or
    that is not one of ``indices``, or a number that the field's dtype does not hold exactly.
    """
    if given is None:
        return {}
    names = listed([schema.fields[index].name for index in indices])
    if not isinstance(given, int | float | Mapping) or given == {}:
        example = schema.fields[indices[0]].name if indices else "input_ids"
        raise FieldError(
            f"found {option}={brief(given)}; expected a number for all fields of varying length ({names or 'none'}), "
            f'or one for each field: {option}={{"{example}": 0}}'
        )
    if not isinstance(given, Mapping):
        if not indices:
            raise FieldError(f"found {option}={given}; expected a field of varying length: leave {option}= out")
        return {index: _number(schema.fields[index], given, option) for index in indices}
    found: dict[int, Any] = {}
    for name, value in given.items():
        index = schema.field_index(name)
        field = schema.fields[index]
        if index not in indices:
            raise FieldError(
                f"found {option}= for field {field.name}, which is {field.describe()}; expected one of the fields of "
                f"varying length that are filled up ({names or 'none'}): leave {field.name} out of {option}="
            )
        if index in found:
            raise FieldError(
                f"found two values for field {field.name} in {option}={brief(given)}; expected one: leave one out"
            )
        found[index] = _number(field, value, option)
    return dict(sorted(found.items()))


def _number(field: Field, value: Any, option: str) -> Any:
    """Return ``value``. Raise FieldError unless it is a number that the field's dtype holds exactly."""
    is_number = isinstance(value, int | float) and (not isinstance(value, bool) or field.dtype == "bool")
    is_nan = is_number and value != value
    try:
        fits = is_number and (is_nan or torch.tensor(value, dtype=field.torch_dtype, device="cpu").item() == value)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        fits = False
    if not fits or (is_nan and not field.torch_dtype.is_floating_point):
        raise FieldError(
            f"found {option}={brief(value)} for field {field.name}, which is {field.describe()}; expected a number "
            f"that {field.dtype} holds exactly: {option}=0"
        )
    return value


def same_lengths(columns: Sequence[Column], rows: Int64Array) -> Int64Array:
    """Return the lengths that ``rows``, those of a view, have in all of ``columns``.

    Raises FieldError where they differ, which names the row by its number in the view.
    """
    first, *others = (row_lengths(column, rows) for column in columns)
    for column, lengths in zip(columns[1:], others, strict=True):
        if not np.array_equal(first, lengths):
            row = int((first != lengths).argmax())
            raise FieldError(
                f"found row {row} of {int(first[row])} elements in field {columns[0].field.name}, and of "
                f"{int(lengths[row])} in {column.field.name}; expected the same lengths in every row: pack one of them"
            )
    return first
