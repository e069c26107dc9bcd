"""The entries of a TensorDict, on disk or in memory, and how the pieces of a lazy stack are merged.

`memfeed.store.tensordict_dir` finds them in a directory, `memfeed.store.tensordict_memory` in memory, and
`memfeed.store.tensordict_columns` makes columns of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from memfeed.errors import StoreError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import NodeKind, display
from memfeed.schema.fields import Path as FieldPath


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
