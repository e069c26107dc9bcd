"""Rows of varying length: jagged nested tensors, lists of rows, and rows that are not copied yet.

A list that is one field of a batch has tensors of different shapes. Rows that are not copied yet are what a transform
reads its pixels from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field

_LONGEST = np.iinfo(np.int64).max


class _Lengths(NamedTuple):
    """The lengths of the rows of several batches, and what a nested tensor of each batch needs of them."""

    rows: Int64Array
    sums: list[int]
    offsets: Sequence[torch.Tensor]
    extremes: list[dict[str, torch.Tensor]]


SharedOffsets = dict[int, _Lengths]
"""By ``Field.lengths_of``: fields whose lengths are equal in every row share their offsets."""


def jagged_batches(
    flat: torch.Tensor, lengths: Int64Array, batch_size: int, field: Field, shared: SharedOffsets
) -> list[torch.Tensor]:
    """Return batches of ``batch_size`` rows as nested tensors that share the memory of ``flat``.

    ``flat`` holds the batches one after the other, each as `batch_shape` says; the number of rows is a multiple of
    ``batch_size``. Fields whose lengths are equal in every row share their offsets by way of ``shared``: torch refuses
    arithmetic between jagged tensors whose offsets are not the same tensor.
    """
    group = field.lengths_of
    known = shared.get(group) if group is not None else None
    if known is None or not np.array_equal(known.rows, lengths):
        known = _batch_lengths(lengths, batch_size)
        if group is not None:
            shared[group] = known
    elements = math.prod(dim for dim in field.shape if dim is not None)
    sizes = [size * elements for size in known.sums]
    parts = torch.unsafe_split_with_sizes(flat, sizes) if len(sizes) > 1 else [flat]
    if len(field.shape) > 1:
        parts = [part.view(batch_shape(field, size)) for part, size in zip(parts, known.sums, strict=True)]
    construct, ragged_idx = _constructor(), field.ragged_dim + 1
    return [
        construct(values, offsets, extremes, ragged_idx)
        for values, offsets, extremes in zip(parts, known.offsets, known.extremes, strict=True)
    ]


def batch_shape(field: Field, size: int) -> list[int]:
    """Return the shape of a batch's rows side by side along the dim that varies, which has ``size`` in all."""
    return [size if dim is None else dim for dim in field.shape]


def _batch_lengths(lengths: Int64Array, batch_size: int) -> _Lengths:
    ends = np.zeros((len(lengths) // batch_size if batch_size else 1, batch_size + 1), np.int64)
    by_batch = lengths.reshape(len(ends), batch_size)
    np.cumsum(by_batch, axis=1, out=ends[:, 1:])
    lows, highs = by_batch.min(1, initial=_LONGEST), by_batch.max(1, initial=0)
    extremes = [_extremes(min(low, high), high) for low, high in zip(lows.tolist(), highs.tolist(), strict=True)]
    return _Lengths(lengths, ends[:, -1].tolist(), torch.from_numpy(ends).unbind(0), extremes)


def _extremes(low: int, high: int) -> dict[str, torch.Tensor]:
    """Return the shortest and the longest length of a batch in the form in which torch keeps them.

    Without them torch pads a batch to the sum of its lengths, and not to the longest.
    """
    return {"min_seqlen": torch.empty(low, 0, device="cpu"), "max_seqlen": torch.empty(high, 0, device="cpu")}


def jagged_tensor(values: torch.Tensor, offsets: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return a jagged nested tensor that shares the memory of ``values`` and ``offsets``.

    It has the lengths and the ragged dim of ``like``; without it, the lengths are along the first dim of ``values``.
    """
    if like is None:
        tensor: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
        return tensor
    made: torch.Tensor = _constructor()(values, offsets, getattr(like, "_metadata_cache", None), _ragged_idx(like))
    return made


def jagged_rows(batch: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows of a nested tensor, each contiguous; views where they are so already."""
    values = jagged_values(batch)
    if values is None:
        return [row.contiguous() for row in batch.unbind(0)]
    sizes = batch._offsets.diff().tolist()  # type: ignore[attr-defined]
    return [row.contiguous() for row in torch.unsafe_split_with_sizes(values, sizes, ragged_dim_of(batch))]


def jagged_values(batch: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a jagged tensor without an operation of torch; None if that cannot be.

    For any operation on a nested tensor torch imports torch.distributed.tensor and sympy: 2 s in each process.
    """
    is_whole = getattr(batch, "_lengths", None) is None and not batch.requires_grad
    return getattr(batch, "_values", None) if is_whole else None


def ragged_dim_of(batch: torch.Tensor) -> int:
    """Return the dim of the rows of a nested tensor that varies: its values are the rows side by side along it."""
    return _ragged_idx(batch) - 1


def _ragged_idx(batch: torch.Tensor) -> int:
    return getattr(batch, "_ragged_idx", 1)


@cache
def _constructor() -> Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor] | None, int], Any]:
    """Return torch's private constructor of nested tensors if it works as expected, else the public function.

    The public function takes 120 microseconds, the constructor 27, which is as long as copying the rows of a batch.
    """

    def private(values: Any, offsets: Any, extremes: dict[str, torch.Tensor] | None, ragged_idx: int) -> Any:
        if "_dynamo" in vars(torch):  # imported, and not being imported by another thread, as that of a commit
            return NestedTensor(values, offsets, _metadata_cache=extremes, _ragged_idx=ragged_idx)
        # given extremes, torch imports its compiler to mark them for it: 2 s in each process
        made = NestedTensor(values, offsets, _ragged_idx=ragged_idx)
        made._metadata_cache = extremes or {}
        return made

    def public(values: Any, offsets: Any, extremes: dict[str, torch.Tensor] | None, ragged_idx: int) -> Any:
        known: dict[str, Any] = {key: len(tensor) for key, tensor in (extremes or {}).items()}
        return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged_idx, **known)

    try:
        from torch.nested._internal.nested_tensor import NestedTensor

        values, offsets = torch.arange(6, device="cpu").view(2, 3), torch.tensor([0, 1, 3], device="cpu")
        extremes = _extremes(1, 2)
        probe = private(values, offsets, extremes, 2)
        works = probe.is_nested and probe._values is values and probe._offsets is offsets and _ragged_idx(probe) == 2
        works = works and probe._metadata_cache == extremes
    except Exception:
        works = False
    return private if works else public


class RaggedList(list[Any]):
    """The rows of one field of a batch. To optree it is a leaf, where a plain list is a container of fields.

    Args:
        rows: one tensor per row of the batch; None for a row without a value.
        own: returns the field as a batch has it, in memory of its own, if `rows` are views of a store's map: then
            nobody may write to them or hand them on. None if they may be kept.
    """

    def __init__(self, rows: Iterable[Any], own: Callable[[], Any] | None = None) -> None:
        super().__init__(rows)
        self.own = own

    def owned(self) -> Any:
        """Return the field as users get it: a plain list of tensors that may be kept."""
        return list(self) if self.own is None else self.own()


class RowViews:
    """A field [k, *shape] of a batch, as rows of a store's map. To optree it is a leaf, as a tensor is.

    Nobody may write to the rows or hand them on.

    Args:
        data: the column, [n, *shape].
        rows: the numbers of the rows in it, [k].
        own: returns the field in memory of its own, [k, *shape].
    """

    is_nested = requires_grad = False

    def __init__(self, data: torch.Tensor, rows: Int64Array, own: Callable[[], torch.Tensor]) -> None:
        self.data, self.rows, self.owned = data, rows, own
        self.shape, self.dtype, self.ndim = torch.Size((len(rows), *data.shape[1:])), data.dtype, data.ndim

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: slice) -> list[torch.Tensor]:
        """Return a view of each of these rows, [*shape]."""
        return [self.data[row] for row in self.rows[which].tolist()]
