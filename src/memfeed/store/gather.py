"""Gather the rows of one or more batches into one buffer per column.

`Column.read_row` is the slow, obviously right way; property tests compare them.

Samples that were read together share the memory of one batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from memfeed.schema.codec import Int64Array
from memfeed.schema.jagged import RowViews, SharedOffsets
from memfeed.schema.samples import Canvases
from memfeed.schema.tensordicts import is_tensordict
from memfeed.store.columns import Column, FixedColumn
from memfeed.store.copied_ranges import copy_run, select_rows
from memfeed.store.ragged import Located
from memfeed.store.ragged_columns import RaggedRows
from memfeed.store.ragged_gather import gather_jagged, gather_list, gather_padded, view_rows
from memfeed.system.buffers import Allocator, Fresh
from memfeed.system.share import Threads

# Several batches come from one gather up to these sizes. Larger gains nothing, and a batch that is kept keeps them all.
SMALL_BYTES = 6 << 20  # copied at almost twice the speed of single batches of small images
SMALL_RAGGED_BYTES = 4 << 20  # Python makes a nested tensor slower than it is filled; several at once take less
MOST_AT_ONCE = 64
NARROW_BYTES = 16 * 1024  # columns whose part of a batch is this small are gathered for all batches of a task
RUN_BYTES = 64 * 1024  # below this size, finding out that rows are consecutive takes longer than it saves


NO_WINDOWS: Mapping[int, Int64Array] = MappingProxyType({})
_Other = tuple[int, Column]  # computed rows, or values, and the field index


class _Fixed(NamedTuple):
    """A fixed column and the values that its gathers need, looked up once."""

    field_index: int
    column: FixedColumn
    allocator: Allocator
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    row_bytes: int


class Gather:
    """Plans once for some columns; a call returns one leaf per column for the rows given.

    A fixed column gives a tensor [k, *shape], a jagged one a jagged nested tensor, any other a list of k. The memory of
    the tensors comes from ``allocators``, one per column. Columns whose field index is in ``on_device`` are gathered by
    the device instead: their leaf is None, though their bytes count. Columns in ``as_views`` give views of the map,
    which nobody may write to or keep: ragged ones a RaggedList, fixed ones RowViews.

    Jagged columns in ``pad``, by field index, give a tensor [k, longest, ...] filled up with their value. Then there
    are more leaves, and more allocators, than columns: the mask of each of them, bool [k, longest], in their order.

    Large columns are copied by ``threads``; without them as the calling thread has it.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        allocators: Sequence[Allocator],
        on_device: Collection[int] = (),
        pad: Mapping[int, Any] | None = None,
        as_views: Collection[int] = (),
        threads: Threads | None = None,
    ) -> None:
        self._in_use: Callable[[], AbstractContextManager[None]] = nullcontext if threads is None else threads.in_use
        self._as_views = as_views
        self._columns, self._allocators = list(columns), list(allocators)
        self._pad = dict(pad or {})
        self._mask_of = {index: len(columns) + at for at, index in enumerate(self._pad)}
        fields = [columns[index].field for index in on_device]
        self._bytes_on_device = sum(field.row_bytes for field in fields if field.kind == "fixed")
        self._fixed: list[_Fixed] = []
        self._viewed: list[_Fixed] = []
        self._others: list[_Other] = []
        self._ragged: list[tuple[int, RaggedRows]] = []
        for index, (column, allocator) in enumerate(zip(columns, allocators, strict=False)):
            field = column.field
            if index in on_device:
                continue
            if isinstance(column, FixedColumn):
                found = self._viewed if index in as_views else self._fixed
                found.append(_Fixed(index, column, allocator, field.torch_dtype, field.row_shape, field.row_bytes))
            elif isinstance(column, RaggedRows):
                self._ragged.append((index, column))
            else:
                self._others.append((index, column))
        self._jagged = {index for index, column in self._ragged if column.field.kind == "jagged"}
        self._row_bytes = sum(column.row_bytes for column in (*self._fixed, *self._viewed))
        self.bytes = 0  # gathered so far

    def with_columns(self, columns: Sequence[Column]) -> Gather:
        """Return a gather into the same memory from ``columns``, of which only computed ones may differ."""
        other = copy.copy(self)
        other._columns = list(columns)
        other._others = [(index, columns[index]) for index, _ in self._others]
        return other

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all columns, on average; 0 for columns whose average is not known."""
        slow = sum(column.mean_row_bytes for _, column in (*self._ragged, *self._others))
        return self._row_bytes + slow + self._bytes_on_device

    @property
    def has_ragged(self) -> bool:
        """True if rows of some column may differ in size."""
        return bool(self._ragged)

    def batches_at_once(self, batch_size: int) -> int:
        """Return for how many batches one gather is fastest: several if they are small."""
        if self._as_views:
            return 1  # views take no time
        slow = self._ragged or any(column.offsets is None for _, column in self._others)
        most = SMALL_RAGGED_BYTES if slow else SMALL_BYTES
        return max(1, min(MOST_AT_ONCE, most // max(self.row_bytes * batch_size, 1)))

    def split(self, rows: Int64Array, batch_size: int) -> Iterator[Sequence[Any]]:
        """Return the leaves of several full batches, from one gather.

        They share memory, which is used again when the last of them is freed.
        """
        leaves = self._gather(rows, self._locate(rows), batch_size, self._fixed, self._others)
        return split(leaves, batch_size, len(rows) // batch_size, self._jagged | set(self._mask_of.values()))

    def several(self, rows: Int64Array, batch_size: int) -> Iterator[list[Any]]:
        """Yield the leaves of several batches, each gathered when it is asked for.

        Leaves of narrow columns (labels, say) share memory, as those of ``split`` do.
        """
        located = self._locate(rows)
        k = len(rows)
        sizes = [batch_size] * (k // batch_size) + [k % batch_size] * (k % batch_size > 0)
        most = NARROW_BYTES // batch_size if len(sizes) > 1 else -1
        narrow = [column for column in self._fixed if column.row_bytes <= most]
        wide = [column for column in self._fixed if column.row_bytes > most]
        computed = [(i, c) for i, c in self._others if c.layout == "dense" and c.field.row_bytes <= most]
        others = [one for one in self._others if one not in computed]
        windows = {i: found for i, c in others if (found := c.base_rows(rows)) is not rows}
        with self._in_use():
            indices = [column.field_index for column in narrow]
            gathered = [*zip(indices, self._gather_fixed(narrow, rows), strict=True)]
            gathered += self._gather_others(computed, rows)
        split_leaves = [(index, torch.unsafe_split_with_sizes(leaf, sizes)) for index, leaf in gathered]
        del gathered
        for batch_index, start in enumerate(range(0, max(k, 1), batch_size)):
            part = slice(start, start + batch_size)
            of_batch = {index: found[part] for index, found in windows.items()}
            leaves = self._gather(rows[part], [where.part(part) for where in located], None, wide, others, of_batch)
            for index, parts in split_leaves:
                leaves[index] = parts[batch_index]
            yield leaves
            del leaves  # keep no memory that the caller may have freed

    def __call__(self, rows: Int64Array) -> list[Any]:
        """Return the leaves of one batch; ``rows`` (int64 or int32 [k], of the columns) must be in range."""
        return self._gather(rows, self._locate(rows), None, self._fixed, self._others)

    def _locate(self, rows: Int64Array) -> list[Located]:
        return [column.locate(rows) for _, column in self._ragged]

    def _gather_fixed(self, columns: Sequence[_Fixed], rows: Int64Array) -> list[torch.Tensor]:
        k = len(rows)
        size = k * sum(column.row_bytes for column in columns)
        self.bytes += size
        targets = [(c.column.data, c.allocator.allocate((k, *c.row_shape), c.dtype)) for c in columns]
        # consecutive rows are copied as one piece, almost twice as fast
        if size >= RUN_BYTES and rows[-1] - rows[0] == k - 1 and (rows[1:] - rows[:-1] == 1).all():
            run = slice(int(rows[0]), int(rows[-1]) + 1)
            return [copy_run(data[run], out) for data, out in targets]
        index = torch.from_numpy(rows)
        return [select_rows(data, index, out) for data, out in targets]

    def _copy_viewed(self, column: _Fixed, rows: Int64Array) -> torch.Tensor:
        self.bytes -= len(rows) * column.row_bytes  # the gather counts them again
        with self._in_use():
            return self._gather_fixed([column], rows)[0]

    def _gather_others(
        self, others: Sequence[_Other], rows: Int64Array, windows: Mapping[int, Int64Array] = NO_WINDOWS
    ) -> Iterator[tuple[int, Any]]:
        """Yield the field indices of ``others`` and their leaves; see ``_gather`` for ``windows``."""
        for index, other in others:
            leaf = other.leaf(rows, self._allocators[index], windows.get(index))
            self.bytes += leaf.nbytes if isinstance(leaf, torch.Tensor) else 0
            yield index, leaf

    def _gather(
        self,
        rows: Int64Array,
        located: Sequence[Located],
        batch_size: int | None,
        fixed: Sequence[_Fixed],
        others: Sequence[_Other],
        windows: Mapping[int, Int64Array] = NO_WINDOWS,
    ) -> list[Any]:
        """Return the leaves of ``rows``; of fixed, computed and JSON columns only of those in ``fixed`` and ``others``.

        ``windows`` has the rows of columns of windows that were computed already, by field index: int64 [k, steps].
        A jagged leaf is one nested tensor, or with ``batch_size`` a list of nested tensors of so many rows each.
        """
        with self._in_use():
            leaves: list[Any] = [None] * (len(self._columns) + len(self._pad))
            self.bytes += len(rows) * self._bytes_on_device
            for column, gathered in zip(fixed, self._gather_fixed(fixed, rows), strict=True):
                leaves[column.field_index] = gathered
            for column in self._viewed:
                self.bytes += len(rows) * column.row_bytes
                leaves[column.field_index] = RowViews(
                    column.column.data, rows, partial(self._copy_viewed, column, rows)
                )
            for index, leaf in self._gather_others(others, rows, windows):
                leaves[index] = leaf
            shared: SharedOffsets = {}
            for (index, ragged), where in zip(self._ragged, located, strict=True):
                self.bytes += where.nbytes
                self._gather_ragged(leaves, index, ragged, where, batch_size, shared)
            return leaves

    def _gather_ragged(
        self,
        leaves: list[Any],
        index: int,
        column: RaggedRows,
        located: Located,
        batch_size: int | None,
        shared: SharedOffsets,
    ) -> None:
        """Set the leaf of a ragged column, and that of its mask; see ``_gather``."""
        size, memory = batch_size or len(located.starts), self._allocators[index]
        if index in self._pad:
            mask = self._mask_of[index]
            found = gather_padded(column, located, size, self._pad[index], memory, self._allocators[mask])
            leaves[index], leaves[mask] = found if batch_size else (found[0][0], found[1][0])
            return
        if index not in self._jagged:
            own = partial(gather_list, column, located, memory)
            leaves[index] = view_rows(column, located, own) if index in self._as_views else own()
            return
        batches = gather_jagged(column, located, size, memory, shared)
        leaves[index] = batches if batch_size else batches[0]


def split(
    leaves: Sequence[Any], batch_size: int, batch_count: int, already_split: Collection[int] = ()
) -> Iterator[Sequence[Any]]:
    """Split the leaves of several full batches into the leaves of each.

    Leaves whose field index is in ``already_split`` are lists with one leaf per batch.
    """
    sizes = [batch_size] * batch_count
    # plain split would connect the batches for autograd: changing one would forbid the others' backward; with sizes it
    # takes two thirds of the time
    return zip(
        *(
            torch.unsafe_split_with_sizes(leaf, sizes)
            if isinstance(leaf, torch.Tensor)
            else leaf
            if index in already_split
            else [leaf[start : start + batch_size] for start in range(0, batch_count * batch_size, batch_size)]
            for index, leaf in enumerate(leaves)
        ),
        strict=True,
    )


def all_rows(column: Column) -> Any:
    """Return a column's leaf of the batch of all rows: without a copy for a fixed column, else in new memory."""
    # a gather reads and does not map: a process may have 65,530 maps, and a stack more files
    whole = column.whole
    return Gather([column], [Fresh()])(np.arange(column.row_count or 0))[0] if whole is None else whole


class ReadSamples(list[Any]):
    """A list of samples, with the batch that ``Collate`` returns.

    Methods of a TensorDict or tensorclass (``samples.to(device)``) are those of the batch, as tensordict's own
    ``__getitems__`` allows.

    Args:
        samples: one for each row.
        batch: the same rows as a batch.
        rows: their numbers in the store that was indexed, int64 [k].
        ids: their numbers in the base store, int64 [k].
        store: the store that was indexed.
        canvases: the leaves that samples have and the batch has not.
    """

    def __init__(
        self,
        samples: Iterable[Any],
        batch: Any,
        rows: Int64Array,
        ids: Int64Array,
        store: Any,
        canvases: Canvases,
    ) -> None:
        super().__init__(samples)
        self.batch, self.rows, self.ids, self.store, self.canvases = batch, rows, ids, store, canvases

    def __getattr__(self, name: str) -> Any:
        batch = self.__dict__.get("batch")
        if name.startswith("__") or not is_tensordict(batch):
            raise AttributeError(f"found no attribute {name!r} of a list of samples")
        return getattr(batch, name)
