"""Copying the rows of one batch out of the columns into one buffer per column.

``reference`` is the slow, obviously right way; ``Gather`` is the fast one, and a property test compares them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from memfeed.schema import codec
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import HEAP_OF_BYTES
from memfeed.schema.jagged import SharedOffsets, jagged_batches
from memfeed.store.columns import Column, FixedColumn, JoinedFixed, Ragged, RaggedColumn, Values
from memfeed.system.buffers import Lender

# several batches come from one gather up to these sizes; more gains nothing, and one batch that is kept keeps them all
SMALL_BYTES = 256 * 1024
SMALL_RAGGED_BYTES = 4 << 20  # a nested tensor takes Python longer to make than to fill; several in a row do better
MOST_AT_ONCE = 64
NARROW_BYTES = 16 * 1024  # columns whose part of a batch is this small are gathered for all batches of a task
RUN_BYTES = 64 * 1024  # below this, to find out that rows lie together takes longer than it saves


class _Fixed(NamedTuple):
    """A fixed column and what its gathers need, looked up once."""

    number: int
    column: FixedColumn
    lender: Lender
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    row_bytes: int


def read_row(column: Column, row: int) -> Any:
    """One row of a column as the sample had it, in memory of its own."""
    field = column.field
    if isinstance(column, FixedColumn):
        return codec.unpack(field, column.data[row].clone())
    if isinstance(column, Values):
        return column.values[row]
    if isinstance(column, JoinedFixed):
        ((part, _, rows),) = column.by_part(np.array([row]))
        return read_row(part, int(rows[0]))
    starts, lengths, dims = column.extents(np.array([row]))
    if lengths[0] < 0:
        return None
    raw = column.view(int(starts[0]), int(lengths[0]))
    if field.kind in HEAP_OF_BYTES:
        return codec.decode_bytes(field, raw.numpy().tobytes())
    shape = dims[0, : len(field.shape)].tolist()
    return codec.unpack(field, raw.clone().view(field.torch_dtype).view(shape))


def reference(columns: Sequence[Column], ids: Sequence[int]) -> list[list[Any]]:
    """Each column's rows, read one by one: what every batch must equal before it is stacked."""
    return [[read_row(column, row) for row in ids] for column in columns]


class Gather:
    """Plans once for some columns; a call returns one leaf per column for the rows ``ids``.

    A fixed column gives a tensor [k, *shape], a jagged one a jagged nested tensor, any other a list of k. Tensors
    live in memory leased from ``lenders``, one per column. The columns with the numbers ``elsewhere`` are not gathered
    here: their leaf is None, though their bytes count.
    """

    def __init__(self, columns: Sequence[Column], lenders: Sequence[Lender], elsewhere: Collection[int] = ()) -> None:
        self._columns, self._lenders = list(columns), list(lenders)
        self._elsewhere = sum(columns[number].field.row_bytes for number in elsewhere)
        self._fixed = [
            _Fixed(number, column, lender, column.field.torch_dtype, column.field.row_shape, column.field.row_bytes)
            for number, (column, lender) in enumerate(zip(columns, lenders, strict=True))
            if isinstance(column, FixedColumn) and number not in elsewhere
        ]
        self._others = [
            (number, c)
            for number, c in enumerate(columns)
            if isinstance(c, Values | JoinedFixed) and number not in elsewhere
        ]
        known = {number for number, *_ in (*self._fixed, *self._others)} | set(elsewhere)
        self._ragged: list[tuple[int, Ragged]] = [
            (number, c)  # type: ignore[misc]
            for number, c in enumerate(columns)
            if number not in known
        ]
        self._jagged = {number for number, column in self._ragged if column.field.kind == "jagged"}
        self._row_bytes = sum(column.row_bytes for column in self._fixed)
        self.bytes = 0  # gathered so far

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all columns, on average where they differ, as far as that is known."""
        heaps = sum(c.heap_bytes // max(c.rows, 1) for _, c in self._ragged if isinstance(c, RaggedColumn))
        others = sum(c.field.row_bytes for _, c in self._others if not isinstance(c, Values))
        return self._row_bytes + heaps + others + self._elsewhere

    @property
    def ragged(self) -> bool:
        """Whether rows of some column differ in size."""
        return bool(self._ragged)

    def batches_at_once(self, batch_size: int) -> int:
        """How many batches one gather is best made for: several, where they are small."""
        most = SMALL_RAGGED_BYTES if self._ragged or self._others else SMALL_BYTES
        return max(1, min(MOST_AT_ONCE, most // max(self.row_bytes * batch_size, 1)))

    def split(self, ids: Int64Array, batch_size: int) -> Iterator[Sequence[Any]]:
        """The leaves of several whole batches, from one gather.

        They share memory, which is used again when the last of them has died.
        """
        leaves = self._gather(ids, [column.extents(ids) for _, column in self._ragged], batch_size, self._fixed)
        return split(leaves, batch_size, len(ids) // batch_size, self._jagged)

    def several(self, ids: Int64Array, batch_size: int) -> Iterator[list[Any]]:
        """The leaves of several batches, each gathered when it is asked for; those of narrow columns, as labels, share
        memory, like those of ``split``."""
        extents = [column.extents(ids) for _, column in self._ragged]
        k = len(ids)
        sizes = [batch_size] * (k // batch_size) + [k % batch_size] * (k % batch_size > 0)
        most = NARROW_BYTES // batch_size if len(sizes) > 1 else -1
        narrow = [column for column in self._fixed if column.row_bytes <= most]
        wide = [column for column in self._fixed if column.row_bytes > most]
        split = [
            (column.number, torch.unsafe_split_with_sizes(leaf, sizes))
            for column, leaf in zip(narrow, self._select(narrow, ids), strict=True)
        ]
        for number, start in enumerate(range(0, max(k, 1), batch_size)):
            part = slice(start, start + batch_size)
            leaves = self._gather(ids[part], [(a[part], b[part], c[part]) for a, b, c in extents], None, wide)
            for place, parts in split:
                leaves[place] = parts[number]
            yield leaves
            del leaves  # hold nothing that the caller may have let go

    def __call__(self, ids: Int64Array) -> list[Any]:
        """The leaves of one batch; ``ids`` (int64 or int32 [k], rows of the columns) must be in range."""
        return self._gather(ids, [column.extents(ids) for _, column in self._ragged], None, self._fixed)

    def _select(self, columns: Sequence[_Fixed], ids: Int64Array) -> list[torch.Tensor]:
        """The rows of these fixed columns."""
        k = len(ids)
        size = k * sum(column.row_bytes for column in columns)
        self.bytes += size
        leases = [(c.column.data, c.lender.lease((k, *c.row_shape), c.dtype)) for c in columns]
        # rows that lie together are copied as one piece, almost twice as fast
        if size >= RUN_BYTES and ids[-1] - ids[0] == k - 1 and (ids[1:] - ids[:-1] == 1).all():
            run = slice(int(ids[0]), int(ids[-1]) + 1)
            return [out.copy_(data[run]) for data, out in leases]
        index = torch.from_numpy(ids)
        return [torch.index_select(data, 0, index, out=out) for data, out in leases]

    def _gather(
        self,
        ids: Int64Array,
        extents: Sequence[tuple[Int64Array, Int64Array, Int64Array]],
        each: int | None,
        fixed: Sequence[_Fixed],
    ) -> list[Any]:
        """The leaves of these rows, of fixed columns only those given; jagged ones as one nested tensor, or a list of
        those for ``each`` so many rows."""
        leaves: list[Any] = [None] * len(self._columns)
        self.bytes += len(ids) * self._elsewhere
        for column, selected in zip(fixed, self._select(fixed, ids), strict=True):
            leaves[column.number] = selected
        for number, other in self._others:
            if isinstance(other, Values):
                leaves[number] = [other.values[row] for row in ids]
            else:
                shape = (len(ids), *other.field.row_shape)
                leaves[number] = other.select(ids, self._lenders[number].lease(shape, other.field.torch_dtype))
                self.bytes += leaves[number].nbytes
        if extents:
            shared: SharedOffsets = {}
            for (number, ragged), (starts, lengths, dims) in zip(self._ragged, extents, strict=True):
                leaf = self._rows(ragged, starts, lengths, dims, self._lenders[number])
                if number in self._jagged:
                    leaf = jagged_batches(leaf, dims[:, 0], len(ids) if each is None else each, ragged.field, shared)
                    leaf = leaf[0] if each is None else leaf
                leaves[number] = leaf
        return leaves

    def _rows(self, column: Ragged, starts: Int64Array, lengths: Int64Array, dims: Int64Array, lender: Lender) -> Any:
        """The rows at these places of a ragged column: a list, or for a jagged one all of them in one flat tensor."""
        field = column.field
        if field.kind in HEAP_OF_BYTES:
            texts = [
                None if n < 0 else column.view(at, n).numpy().tobytes()
                for at, n in zip(starts.tolist(), lengths.tolist(), strict=True)
            ]
            self.bytes += int(lengths.clip(0).sum())
            return [None if text is None else codec.decode_bytes(field, text) for text in texts]
        if field.optional:
            present = lengths >= 0
            starts, sizes = starts[present], lengths[present]
        else:
            present, sizes = None, lengths
        total = int(sizes.sum())
        self.bytes += total
        flat = lender.lease((total // field.itemsize,), field.torch_dtype)
        if total:
            column.copy(starts, sizes, flat.view(torch.uint8).numpy())
        if field.kind == "fixed":  # rows of one shape, in pieces
            return flat.view(len(lengths), *field.row_shape)
        if field.kind == "list":
            parts = iter(torch.split(flat, (sizes // field.itemsize).tolist()))
            shapes = dims[:, : len(field.shape)].tolist()
            here = [True] * len(shapes) if present is None else present.tolist()
            return [next(parts).view(shape) if there else None for shape, there in zip(shapes, here, strict=True)]
        return flat


def split(leaves: Sequence[Any], batch_size: int, batches: int, ready: Collection[int] = ()) -> Iterator[Sequence[Any]]:
    """The leaves of several whole batches of those of all together; jagged ones, whose numbers are ``ready``, are a
    list of the batches' own already."""
    sizes = [batch_size] * batches
    # plain split would tie the batches together for autograd: changing one would forbid the others' backward; with
    # sizes it takes two thirds of the time
    return zip(
        *(
            torch.unsafe_split_with_sizes(leaf, sizes)
            if isinstance(leaf, torch.Tensor)
            else leaf
            if number in ready
            else [leaf[start : start + batch_size] for start in range(0, batches * batch_size, batch_size)]
            for number, leaf in enumerate(leaves)
        ),
        strict=True,
    )
