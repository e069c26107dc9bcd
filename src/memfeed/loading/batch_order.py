"""The batches of each epoch of a loader that puts rows of like length together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from memfeed.errors import LoaderError
from memfeed.loading.index_samplers import RowOrder, RowSampler
from memfeed.loading.position import EpochClock, rows_before
from memfeed.order.buckets import WINDOW_BATCHES, LengthBatches, enough_batches
from memfeed.random import derive
from memfeed.schema.codec import Int64Array
from memfeed.store.lengths import jagged_field, row_lengths
from memfeed.store.store import Store


@dataclass(frozen=True)
class Tokens:
    """Cut batches by their tokens: `Loader(bucket_by=Tokens(4096))`, in place of a ``batch_size``.

    Args:
        per_batch: rows times the longest row of a batch is at most this, so that a padded batch never has more.
        field: the field of varying length whose lengths count; None for the only one.
    """

    per_batch: int
    field: Any = None

    def __repr__(self) -> str:
        return f"Tokens({self.per_batch!r})" if self.field is None else f"Tokens({self.per_batch!r}, {self.field!r})"


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

    @property
    def name(self) -> str:
        """The settings that make the batches, as text for messages and states."""
        name = self.store.schema.fields[self.field_index].name
        if self.batch_tokens is None:
            return f"batch_size={self.batch_size}, bucket_by={name!r}"
        return f"bucket_by={Tokens(self.batch_tokens, name)}"

    @cached_property
    def _lengths(self) -> Int64Array:
        """The length of each row. Raises LoaderError if a row is longer than a batch may be."""
        lengths = row_lengths(
            self.store._view.columns[self.field_index], self.store._view.base_rows(np.arange(len(self.store)))
        )
        most, budget = int(lengths.max(initial=0)), self.batch_tokens
        if budget is not None and most > budget:
            name, count = self.store.schema.fields[self.field_index].name, int((lengths > budget).sum())
            raise LoaderError(
                f"found {count:,} of {len(lengths):,} rows with more tokens in field {name} than "
                f"Tokens({budget}) (the longest has {most:,}); expected rows that fit into a batch: pass "
                f'bucket_by=Tokens({most}), or leave them out: store.subset(store.lengths("{name}") <= {budget})'
            )
        return lengths

    @cached_property
    def _window(self) -> int:
        """The rows that are sorted by length together: about 128 batches of them."""
        batch_size = self.batch_size
        if self.batch_tokens is not None:
            total = int(self._lengths.sum())
            batch_size = max(1, self.batch_tokens * len(self._lengths) // max(total, 1))
        return min(WINDOW_BATCHES * batch_size, max(self.rows.row_count, 1))

    @cached_property
    def count(self) -> int:
        """The number of batches of an epoch, of all ranks together: the same for every seed and epoch."""
        n = self.rows.row_count
        if self.batch_tokens is None:
            return n // self.batch_size if self.drop_last else -(-n // self.batch_size)
        found = self._made(0, 0, None).n
        return enough_batches(found, n, self._window) if self.rows.shuffle else found

    def __call__(self, epoch: int, seed: int) -> LengthBatches:
        """Return the batches of an epoch."""
        return self._made(epoch, seed, None if self.batch_tokens is None else self.count)

    def _made(self, epoch: int, seed: int, count: int | None) -> LengthBatches:
        rows = self.rows.orders(seed)(epoch)(0, self.rows.row_count)
        return LengthBatches(
            rows,
            self._lengths[rows],
            self._window,
            batch_size=self.batch_size,
            batch_tokens=self.batch_tokens,
            drop_last=self.drop_last,
            count=count,
            key=derive(seed, epoch) if self.rows.shuffle else None,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lengths"}


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
        """Return the number of batches of an epoch, for all ranks together."""
        return self._batches.count


def batch_order(store: Store, rows: RowOrder, batch_size: int | None, bucket_by: Any, *, drop_last: bool) -> BatchOrder:
    """Return the batches that ``bucket_by`` of a loader asks for: a field, or `Tokens`.

    Raises FieldError where it names no field of varying length.
    """
    if isinstance(bucket_by, type) or (isinstance(bucket_by, int) and bucket_by >= len(store.schema)):
        raise LoaderError(
            f"found bucket_by={bucket_by!r}; expected the name of a field, or memfeed.Tokens(8192) for batches of so "
            "many tokens"
        )
    if not isinstance(bucket_by, Tokens):
        field_index = jagged_field(store.schema, bucket_by, "bucket_by")
        return BatchOrder(store, rows, field_index, batch_size or 1, None, drop_last)
    field_index = jagged_field(store.schema, bucket_by.field, "Tokens.field")
    return BatchOrder(store, rows, field_index, 1, int(bucket_by.per_batch), drop_last)
