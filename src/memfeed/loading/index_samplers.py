"""The order of a loader's rows, and of its batches where rows of like length are together, and the samplers it shows.

The samplers are torch's classes, with the very order that the loader reads. They know no rank. A framework that shards
them does all the sharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from memfeed.errors import LoaderError
from memfeed.loading.position import EpochClock, Position, rows_before
from memfeed.loading.ranks import joined_world_size
from memfeed.loading.samplers import parts_of
from memfeed.order.buckets import WINDOW_BATCHES, LengthBatches, enough_batches
from memfeed.order.choice import Blocks, Shuffle, mixed_orders, orders_of
from memfeed.order.orders import EpochOrders
from memfeed.order.pieces import RankCut
from memfeed.random import derive
from memfeed.schema.codec import Int64Array
from memfeed.store.lengths import jagged_field, row_lengths
from memfeed.store.store import Store

CHUNK_ROWS = 4096  # rows that a sampler takes from the order at once
FIXED = ("data_source", "replacement", "_num_samples")  # attributes of torch's samplers that say what they draw


@dataclass
class Cuts:
    """The cut of the current epoch into pieces, one for each rank, with ``placement="sharded"``.

    It stays the same until the end, also if other ranks continue the epoch.

    Args:
        batch_size: rows of a batch of one rank, for epochs that begin.
    """

    batch_size: int
    _held: tuple[int, RankCut] | None = field(default=None, repr=False)

    def begin(self, epoch: int, row: int, world_size: int) -> RankCut:
        """Return the cut of an epoch that begins at ``row``: the one it was begun with, else one for these ranks."""
        if self._held is None or self._held[0] != epoch or not row:
            self._held = epoch, RankCut(world_size, self.batch_size)
        return self._held[1]

    def of(self, epoch: int, world_size: int) -> RankCut:
        """Return the cut of an epoch that was begun."""
        return self.begin(epoch, 1, world_size)

    def state(self, epoch: int, row: int) -> str:
        """Return the cut as a saved state keeps it; empty where an epoch is not begun."""
        if not row or self._held is None or self._held[0] != epoch:
            return ""
        return f"{self._held[1].pieces}x{self._held[1].batch_size}"

    def load(self, epoch: int, saved: Any) -> None:
        """Continue an epoch with a saved cut. Raises LoaderError for a value that is no cut."""
        if saved == "":
            self._held = None
            return
        numbers = saved.split("x") if isinstance(saved, str) else []
        if len(numbers) != 2 or not all(one.isdecimal() and int(one) for one in numbers):
            raise LoaderError(f"found a state with pieces {saved!r}; expected those that state_dict() gave")
        self._held = epoch, RankCut(int(numbers[0]), int(numbers[1]))


@dataclass
class RowOrder:
    """The order of the rows of a loader, for every seed and epoch.

    Args:
        sizes: rows of each store.
        counts: rows of each store in an epoch, where stores are mixed by weight; else None.
        shuffle: as in `Loader`.
        block_rows: rows of a block with ``shuffle=Blocks()``.
        cuts: how epochs are cut into pieces, one for each rank; None where they are not.
    """

    sizes: Sequence[int]
    counts: Sequence[int] | None
    shuffle: Shuffle
    block_rows: int
    cuts: Cuts | None = None
    _made: tuple[tuple[int, RankCut | None], EpochOrders] | None = field(default=None, repr=False, compare=False)

    @property
    def row_count(self) -> int:
        """The number of rows in an epoch."""
        return sum(self.sizes)

    def orders(self, seed: int, cut: RankCut | None = None) -> EpochOrders:
        """Return the order of each epoch under ``seed``, cut into pieces if need be."""
        if self._made is None or self._made[0] != (seed, cut):
            if cut is not None or self.counts is None:
                made = orders_of(self.row_count, self.shuffle, seed, self.block_rows, cut)
            else:
                made = mixed_orders(self.sizes, self.counts, self.shuffle, seed, self.block_rows)
            self._made = (seed, cut), made
        return self._made[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}


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


class RowSampler:
    """Iteration and epochs that all samplers of a loader share.

    A ``generator`` that is assigned gives the seed of the next pass, and so the order of the loader. What else torch's
    samplers read at each pass cannot be changed: assigning it raises LoaderError.
    """

    def __init__(self, data_source: Any, rows: RowOrder, clock: EpochClock) -> None:
        self.data_source, self._rows, self._clock = data_source, rows, clock

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED and self.__dict__.get(name, value) is not value:
            raise LoaderError(
                f"found {name} assigned to the sampler of a loader; expected it as it was made, because the loader "
                "reads in an order of its own: pass a sampler, memfeed.Loader(..., sampler=RandomSampler(store, ...))"
            )
        super().__setattr__(name, value)

    @property
    def generator(self) -> torch.Generator | None:
        """The generator from which the seed is drawn. Raises LoaderError if set beside ``seed=`` of the loader."""
        return self._clock.generator

    @generator.setter
    def generator(self, generator: torch.Generator | None) -> None:
        self._clock.generator = generator

    def __iter__(self) -> Iterator[int]:
        # a generator: the pass starts with the first row that is drawn, after the frameworks have set the epoch
        epoch, position = self._begin_pass()
        cuts, seed = self._rows.cuts, self._clock.resolve_seed(1)
        cut = None if cuts is None else cuts.begin(epoch, rows_before(position), joined_world_size())
        order = self._rows.orders(seed, cut)(epoch)
        for begin in range(rows_before(position), self._rows.row_count, CHUNK_ROWS):
            yield from order(begin, min(begin + CHUNK_ROWS, self._rows.row_count)).tolist()

    def _begin_pass(self) -> tuple[int, Position | None]:
        """Return the epoch and the position of a pass that starts now."""
        return self._clock.start_sampler(joined_world_size())

    def __len__(self) -> int:
        return self._rows.row_count

    @property
    def epoch(self) -> int:
        """The epoch of the newest pass, or the one that ``set_epoch`` was given."""
        return self._clock.epoch

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass at this epoch; the loader of this sampler follows."""
        self._clock.set_sampler_epoch(epoch)


class ShuffledSampler(RowSampler, RandomSampler):
    """The order of ``shuffle=True``. Frameworks take a RandomSampler for a loader that shuffles."""

    def __init__(self, data_source: Any, rows: RowOrder, clock: EpochClock) -> None:
        super().__init__(data_source, rows, clock)  # not RandomSampler's own: it refuses a dataset without rows
        self.replacement, self._num_samples = False, None


class OrderedSampler(RowSampler, SequentialSampler):
    """The order of ``shuffle=False``. Frameworks take a SequentialSampler for a loader that does not shuffle."""

    @property
    def generator(self) -> torch.Generator | None:
        """There is none, as in a SequentialSampler: who looks for one learns that. One that is set seeds transforms."""
        raise AttributeError("found a sampler that draws nothing, and has no generator; expected shuffle=True")

    @generator.setter
    def generator(self, generator: torch.Generator | None) -> None:
        self._clock.generator = generator


class MixedSampler(RowSampler, Sampler[int]):
    """The order of ``shuffle=Blocks()``, of ``weights`` and of ``placement="sharded"``.

    It is no RandomSampler: frameworks replace that by an order of their own, which would lose blocks, weights, pieces.
    """


class LengthBatchSampler(RowSampler, Sampler[Any]):
    """The batch sampler that such a loader shows: lists of row numbers, the very batches that the loader reads."""

    def __init__(self, batches: BatchOrder, clock: EpochClock) -> None:
        super().__init__(batches.store, batches.rows, clock)
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        epoch, position = self._begin_pass()
        batches = self._batches(epoch, self._clock.resolve_seed(1))
        for at in range(rows_before(position), batches.n):
            yield batches[at][0].tolist()

    def __len__(self) -> int:
        """Return the number of batches of an epoch, for all ranks together."""
        return self._batches.count


def make_sampler(data_source: Any, rows: RowOrder, clock: EpochClock) -> Sampler[int]:
    """Return the sampler that gives the order of ``rows``."""
    if rows.counts is not None or isinstance(rows.shuffle, Blocks) or rows.cuts is not None:
        return MixedSampler(data_source, rows, clock)
    return (ShuffledSampler if rows.shuffle else OrderedSampler)(data_source, rows, clock)


def wraps_own_sampler(sampler: Any) -> bool:
    """Return True if ``sampler`` is a sampler of ours, or draws from one: batch samplers and frameworks wrap them."""
    return any(isinstance(part, RowSampler) for part in parts_of(sampler))
