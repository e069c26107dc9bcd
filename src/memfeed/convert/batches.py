"""Batches that a user writes: divide them into columns, or into samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from memfeed.errors import SchemaError, brief, listed
from memfeed.schema import codec, values
from memfeed.schema.codec import Packed
from memfeed.schema.fields import Field, Node, Schema
from memfeed.schema.tree import open_container
from memfeed.store.in_memory import take_row


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
