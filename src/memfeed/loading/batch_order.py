"""The batches of each epoch of a loader that puts rows of like length together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from memfeed.errors import LoaderError
from memfeed.loading.clock import EpochClock, joined_world_size
from memfeed.loading.index_samplers import RowOrder, RowSampler
from memfeed.loading.position import rows_before
from memfeed.order.buckets import WINDOW_BATCHES, LengthBatches
from memfeed.order.epoch_orders import EpochOrders
from memfeed.random import derive
from memfeed.schema.codec import Int64Array
from memfeed.store.lengths import jagged_field, row_lengths
from memfeed.store.store import Store


@dataclass(eq=False)
class BatchOrder:
    """The batches of rows of like length, for every seed and epoch.

    Args:
        store: all rows of the loader.
        rows: their order.
        field_index: the field whose lengths count.
        batch_size: rows of a batch, if ``batch_tokens`` is None.
        batch_tokens: the most tokens of a batch after padding.
        drop_last: whether a smaller last batch is left out.
    """

    store: Store
    rows: RowOrder
    field_index: int
    batch_size: int
    batch_tokens: int | None
    drop_last: bool
    _held: tuple[tuple[int, int], LengthBatches] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """What makes the batches, for people and for states."""
        cut = f"batch_size={self.batch_size}" if self.batch_tokens is None else f"batch_tokens={self.batch_tokens}"
        return f"{cut}, bucket_by={self.store.schema.fields[self.field_index].name!r}"

    @cached_property
    def _lengths(self) -> Int64Array:
        """The length of each row. Raises LoaderError if a row is longer than a batch may be."""
        lengths = row_lengths(self.store.columns[self.field_index], self.store.base_rows(np.arange(len(self.store))))
        most, budget = int(lengths.max(initial=0)), self.batch_tokens
        if budget is not None and most > budget:
            name, count = self.store.schema.fields[self.field_index].name, int((lengths > budget).sum())
            raise LoaderError(
                f"found {count:,} of {len(lengths):,} rows with more tokens in field {name} than "
                f"batch_tokens={budget} (the longest has {most:,}); expected rows that fit into a batch: pass "
                f'batch_tokens={most}, or leave them out: store.subset(store.lengths("{name}") <= {budget})'
            )
        return lengths

    def count(self, epoch: int, seed: int) -> int:
        """Return the number of batches of an epoch, of all ranks together."""
        if self.batch_tokens is None:  # windows have whole batches
            return (
                self.rows.row_count // self.batch_size if self.drop_last else -(-self.rows.row_count // self.batch_size)
            )
        return self(epoch, seed).n

    def __call__(self, epoch: int, seed: int) -> LengthBatches:
        """Return the batches of an epoch. Those of the epoch asked for last are kept."""
        held = self._held
        if held is None or held[0] != (epoch, seed):
            held = self._held = (epoch, seed), self._made(self.rows.orders(seed), epoch, seed)
        return held[1]

    def _made(self, orders: EpochOrders, epoch: int, seed: int) -> LengthBatches:
        rows = orders(epoch)(0, self.rows.row_count)
        lengths = self._lengths[rows]
        batch_size = self.batch_size
        if self.batch_tokens is not None:
            total = int(self._lengths.sum())
            batch_size = max(1, self.batch_tokens * len(self._lengths) // max(total, 1))
        return LengthBatches(
            rows,
            lengths,
            min(WINDOW_BATCHES * batch_size, max(len(rows), 1)),
            batch_size=self.batch_size,
            batch_tokens=self.batch_tokens,
            drop_last=self.drop_last,
            key=derive("buckets", seed, epoch) if self.rows.shuffle else None,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lengths"} | {"_held": None}


class LengthBatchSampler(RowSampler, Sampler[Any]):
    """The batch sampler that such a loader shows: lists of row numbers, the very batches that the loader reads."""

    def __init__(self, batches: BatchOrder, clock: EpochClock) -> None:
        self.data_source, self._rows, self._clock, self._batches = batches.store, batches.rows, clock, batches

    def __iter__(self) -> Iterator[Any]:
        epoch, position = self._begin_pass()
        batches = self._batches(epoch, self._clock.resolve_seed(1))
        for at in range(rows_before(position), batches.n):
            yield batches[at][0].tolist()

    def __len__(self) -> int:
        """Return the number of batches of the next pass, for all ranks together."""
        return self._batches.count(self._clock.next[0], self._clock.peek_seed(joined_world_size()))


def batch_order(
    store: Store, rows: RowOrder, batch_size: int | None, batch_tokens: int | None, bucket_by: Any, drop_last: bool
) -> BatchOrder:
    """Return the batches that ``batch_tokens`` and ``bucket_by`` of a loader ask for.

    Raises FieldError where they name no field of varying length.
    """
    field_index = jagged_field(store.schema, bucket_by, "bucket_by")
    return BatchOrder(store, rows, field_index, batch_size or 1, batch_tokens, bool(drop_last))
