"""The entries of a TensorDict, the pieces of a lazy stack merged, and the fields and columns of a store made of them.

`memfeed.store.tensordict_dir` finds entries in a directory, `memfeed.store.tensordict_memory` in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch

from memfeed.errors import StoreError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field, Kind, Node, NodeKind, Schema, display
from memfeed.schema.fields import Path as FieldPath
from memfeed.store.columns import Column, FixedColumn, InMemoryColumn, JsonColumn
from memfeed.store.ragged_columns import NestedColumn, SeparateRowsColumn


class Tensor(NamedTuple):
    """A dense tensor: the file that begins with it, or memory."""

    data: Path | torch.Tensor
    dtype: str
    shape: tuple[int, ...]


class Nested(NamedTuple):
    """A nested tensor: its rows one after another, in a file or as one flat tensor; ``dims`` int64 [n, rank]."""

    data: Path | torch.Tensor
    dtype: str
    dims: Int64Array


class TensorStack(NamedTuple):
    """One tensor per row, each from one element of a lazy stack."""

    tensors: list[Tensor]


class Shared(NamedTuple):
    """A value that is not a tensor, the same for every row."""

    value: Any


class Unbatched(NamedTuple):
    """An UnbatchedTensor: it belongs to the whole TensorDict, and not to its rows."""

    value: Any


class LeftOut(NamedTuple):
    """An entry that is not read; ``why`` says what it is."""

    why: str


class PerRow(NamedTuple):
    """Values that are not tensors, one per row."""

    values: list[Any]


class Group(NamedTuple):
    """A TensorDict or tensorclass. A dim of ``batch`` is None if the elements of a lazy stack differ in it."""

    kind: NodeKind
    name: str
    batch: tuple[int | None, ...]
    children: dict[str, Entry]
    dim_names: tuple[str | None, ...] = ()


LeafEntry: TypeAlias = Tensor | Nested | TensorStack | PerRow
Entry: TypeAlias = LeafEntry | Shared | Unbatched | Group | LeftOut


DESCRIPTIONS: dict[type, str] = {
    Tensor: "a tensor",
    Nested: "a nested tensor",
    TensorStack: "a lazy stack",
    Shared: "a value that is no tensor (NonTensorData)",
    PerRow: "values that are no tensors (NonTensorStack)",
    Group: "a TensorDict or tensorclass",
    Unbatched: "an UnbatchedTensor",
    LeftOut: "an entry that cannot be read",
}


def check_batch(entry: Entry, batch: tuple[int, ...], where: str) -> None:
    """Raise StoreError unless an entry's shape begins with the batch_size of the TensorDict that contains it."""
    shape: tuple[int | None, ...] = batch
    if isinstance(entry, Tensor):
        shape = entry.shape
    elif isinstance(entry, Group):
        shape = entry.batch
    elif isinstance(entry, PerRow) and batch:
        shape = (len(entry.values), *batch[1:])
    elif isinstance(entry, Nested) and batch:
        same = entry.dims.shape[1] >= len(batch) - 1 and (entry.dims[:, : len(batch) - 1] == batch[1:]).all()
        shape = (len(entry.dims), *(batch[1:] if same else ()))
    if shape[: len(batch)] != batch:
        raise StoreError(
            f"{where}: found {DESCRIPTIONS[type(entry)]} of shape {list(shape)}; expected it to begin with the "
            f"batch_size {list(batch)} of the TensorDict around it: save it with its own batch_size in order"
        )


def merge(elements: Sequence[Entry], where: str, at: FieldPath = ()) -> Entry:
    """Merge the elements of a lazy stack into one entry with one row per element. ``at`` is their path in the stack."""
    first = elements[0]
    odd = next((element for element in elements if isinstance(element, LeftOut)), None)
    if odd is not None:
        return odd
    for row, element in enumerate(elements):
        difference = _difference(first, element)
        if difference:
            raise StoreError(
                f"{where}/{row}: found {difference}, at {display(at) if at else 'its top'}; "
                "expected the same keys, dtypes and numbers of dims as in piece 0 of the lazy stack"
            )
    if isinstance(first, Shared):
        return PerRow([element.value for element in elements])  # type: ignore[union-attr]
    if isinstance(first, PerRow):
        return PerRow([element.values for element in elements])  # type: ignore[union-attr]
    if isinstance(first, Tensor):
        return TensorStack(list(elements))  # type: ignore[arg-type]
    if isinstance(first, Group):
        batches = zip(*(element.batch for element in elements), strict=True)  # type: ignore[union-attr]
        common = tuple(dims[0] if len(set(dims)) == 1 else None for dims in batches)
        children = {
            key: merge([element.children[key] for element in elements], where, (*at, key))  # type: ignore[union-attr]
            for key in first.children
        }
        names = (None, *first.dim_names) if first.dim_names else ()
        return first._replace(batch=(len(elements), *common), children=children, dim_names=names)
    raise StoreError(
        f"{where}: found {DESCRIPTIONS[type(first)]} at {display(at)} inside a lazy stack; expected tensors in its "
        "pieces: call .contiguous() (or .densify() where shapes differ) on the inner one and save that"
    )


def _difference(first: Entry, other: Entry) -> str:
    """Return a phrase that says how an element differs from the first, or an empty string."""
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        same = first.dtype == other.dtype and len(first.shape) == len(other.shape)
        return "" if same else f"{other.dtype} {list(other.shape)}, not {first.dtype} {list(first.shape)}"
    if isinstance(first, Group) and isinstance(other, Group):
        odd = sorted(first.children.keys() ^ other.children.keys())
        if odd:
            return f"the key {odd[0]!r} {'more' if odd[0] in other.children else 'missing'}"
        same = first[:2] == other[:2] and len(first.batch) == len(other.batch)
        return "" if same else f"a {other.name or other.kind} of batch_size {list(other.batch)}"
    return "" if type(first) is type(other) else f"{DESCRIPTIONS[type(other)]}, not {DESCRIPTIONS[type(first)]}"


class Contents(NamedTuple):
    """The schema and columns of a TensorDict. ``row_count`` is None for batch_size [].

    ``left_out`` says for each entry that is not read where it is and why.
    """

    schema: Schema
    row_count: int | None
    columns: tuple[Column, ...]
    left_out: tuple[str, ...]


def contents_of(top: Group) -> Contents:
    """Return the fields and columns of a TensorDict. Raises StoreError if there is no column in it."""
    row_count = top.batch[0] if top.batch else None
    planner = _Planner(row_count)
    structure = planner.node(top, ())
    if not planner.columns:
        left_out = f" besides what cannot be read ({', '.join(planner.left_out)})" if planner.left_out else ""
        raise StoreError(f"found no tensor in it{left_out}; expected at least one field")
    schema = Schema(fields=tuple(column.field for column in planner.columns), structure=structure)
    return Contents(schema, row_count, tuple(planner.columns), tuple(planner.left_out))


class _Planner:
    """Builds the structure of a sample, and the columns in the order of its leaves."""

    def __init__(self, row_count: int | None) -> None:
        self._row_count = row_count
        self._lengths: dict[bytes, int] = {}
        self.columns: list[Column] = []
        self.left_out: list[str] = []

    def node(self, entry: Entry, path: FieldPath) -> Node:
        if isinstance(entry, Shared | Unbatched):
            return Node(kind="shared", value=entry.value)
        if isinstance(entry, Group):
            children = {}
            for key, child in entry.children.items():
                if isinstance(child, LeftOut):
                    self.left_out.append(f"{display((*path, key))}: {child.why}")
                else:
                    children[key] = self.node(child, (*path, key))
            return Node(
                kind=entry.kind,
                name=entry.name,
                keys=tuple(children),
                children=tuple(children.values()),
                batch_dims=len(entry.batch) - 1,  # of one sample; -1 if the whole directory has no batch dim
                dim_names=entry.dim_names if any(entry.dim_names) else (),
            )
        assert not isinstance(entry, LeftOut)
        self.columns.append(self._column(entry, path))
        return Node(kind="leaf")

    def _column(self, entry: LeafEntry, path: FieldPath) -> Column:
        def field(kind: Kind, dtype: str, shape: tuple[int | None, ...] = ()) -> Field:
            stem = f"c{len(self.columns)}"
            return Field(path=path, name=display(path), stem=stem, kind=kind, dtype=dtype, shape=shape)

        if isinstance(entry, PerRow):
            kind: Kind = "str" if all(isinstance(value, str) for value in entry.values) else "json"
            return JsonColumn(field(kind, "uint8"), entry.values)
        if isinstance(entry, Tensor):
            shape = entry.shape if self._row_count is None else entry.shape[1:]
            fixed = field("fixed", entry.dtype, shape)
            if isinstance(entry.data, torch.Tensor):
                return InMemoryColumn(fixed, entry.data)
            return FixedColumn(fixed, entry.data, self._row_count)
        if isinstance(entry, Nested):
            return NestedColumn(self._ragged(field, entry.dtype, entry.dims, True), entry.data, entry.dims)
        shapes = [tensor.shape for tensor in entry.tensors]
        dims = np.array(shapes, np.int64).reshape(len(shapes), len(shapes[0]))
        ragged = self._ragged(field, entry.tensors[0].dtype, dims, False)
        return SeparateRowsColumn(ragged, [tensor.data for tensor in entry.tensors], shapes)

    def _ragged(self, field: Callable[..., Field], dtype: str, dims: Int64Array, nested: bool) -> Field:
        """Choose the kind as for a dataset's leaf: fixed, jagged if one dim varies, a list if several do."""
        first = dims[0].tolist() if len(dims) else [0] * dims.shape[1]
        varying = [axis for axis, size in enumerate(first) if (dims[:, axis] != size).any()]
        if not varying and not nested:
            return field("fixed", dtype, tuple(first))
        if len(varying) > 1:
            return field("list", dtype, (None,) * len(first))
        ragged_dim = varying[0] if varying else 0
        group = self._lengths.setdefault(dims[:, ragged_dim].tobytes(), len(self.columns))
        shape = tuple(None if axis == ragged_dim else size for axis, size in enumerate(first))
        return msgspec.structs.replace(field("jagged", dtype, shape), lengths_of=group)
