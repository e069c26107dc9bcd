"""The batches of an epoch from a position on: order, read-ahead, gather, stages, and a fallback if memory runs out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from memfeed.errors import LoaderError, MemfeedError, StoreError, UnfitRowError
from memfeed.loading.background import made_ahead
from memfeed.loading.gather_tasks import (
    BatchGroup,
    GatherTask,
    LastBatch,
    tasks_of_batches,
    tasks_of_order,
    tasks_of_sampler,
)
from memfeed.loading.index_samplers import BatchOrder, RowOrder
from memfeed.loading.placement import ColumnPlacement, fallback
from memfeed.loading.plan import LoadPlan, choose_placements, make_plan, with_columns
from memfeed.loading.position import Position, SamplerPosition, rows_before
from memfeed.loading.readahead import announce_in_caller, announce_in_thread, drop_after_use, present_tasks
from memfeed.loading.settings import Settings
from memfeed.order.buckets import LengthBatches
from memfeed.order.choice import Shuffle
from memfeed.order.orders import BlockOrder, EpochOrders, Order, Sequential, Shuffled
from memfeed.order.pieces import RankShards
from memfeed.random import derive
from memfeed.store.columns import Column
from memfeed.store.store import Store
from memfeed.system.messages import warn
from memfeed.transfer.page_locked import is_of_capture, is_out_of_memory
from memfeed.transfer.streams import Streams, streams_of

if TYPE_CHECKING:
    from memfeed.loading.own_rows import RankRows  # imported where columns are sharded

COLD_PROBES = 64  # rows from which those are chosen that tell whether a store is in the page cache
CAPTURED = (
    "found a CUDA graph capture while the loader's thread used the device, which CUDA forbids; expected the thread to "
    "be parked during the capture: with loader.paused(): ... # capture the graph here"
)
FIELDS_SHOWN = 4  # fields of one placement that are named one by one


class DocumentOrder:
    """Change the order of the documents of a packed store in every epoch.

    This needs ``shuffle=True`` and a store with all of its blocks.

    A view of some blocks keeps the stored order of the documents: in another order its blocks would hold tokens of the
    blocks that were left out. So does ``shuffle=Blocks()``, which is for reading a disk in long runs.
    """

    def __init__(self, store: Store, shuffle: Shuffle) -> None:
        packed = [column.packing for column in store._view.columns if column.packing is not None]
        self._count = packed[0].document_count if packed and shuffle is True and store._view.has_all_rows else 0
        self._made: tuple[int, EpochOrders] | None = None

    def orders(self, seed: int) -> list[EpochOrders]:
        """Return the orders of the documents by epoch under ``seed``, in a list; an empty one if they have none."""
        if not self._count:
            return []
        if self._made is None or self._made[0] != seed:
            drawn = partial(Shuffled, self._count, derive("documents", seed))
            self._made = seed, EpochOrders(drawn, self._count)
        return [self._made[1]]

    def columns(self, columns: Sequence[Column], epoch: int, seed: int) -> list[Column] | None:
        """Return ``columns`` as they are in an epoch; None where they are the same in every epoch."""
        for orders in self.orders(seed):
            from memfeed.store.packed import in_order  # most stores have no documents

            return in_order(columns, orders(epoch)(0, self._count))
        return None


class EpochReader:
    """Reads the epochs of one loader. Columns are placed when the first epoch begins.

    Args:
        store: all rows of the loader.
        settings: its arguments.
        rows: the order of its rows; not used with a user's sampler.
        batches: the batches of each epoch, where they are drawn by length; then positions count batches.
    """

    def __init__(self, store: Store, settings: Settings, rows: RowOrder, batches: BatchOrder | None = None) -> None:
        self._store, self._settings, self._rows, self._batches = store, settings, rows, batches
        self._documents = DocumentOrder(store, rows.shuffle)
        self._streams: Streams | None = None
        self.plan: LoadPlan | None = None  # how batches are made; None before the first epoch
        self._planned_for_filling = False
        self._planned_columns: Sequence[Column] = ()
        self._fell_back = False
        self._sampler_raised = False
        self._piece: RankRows | None = None  # what is placed, with placement="sharded"
        self._piece_placements: Sequence[ColumnPlacement] | None = None
        self.is_cold: bool | None = None  # whether rows were missing in the page cache when the epoch began

    def use(self, settings: Settings) -> bool:
        """Read with these settings from now on. Return True if they, or the store, differ from those before."""
        has_settled = self._planned_for_filling and self._store._view.supply is None
        if has_settled:  # the finished store has its columns placed, read ahead, and gathered several batches at once
            self.plan, self._planned_for_filling = None, False
        if settings is self._settings:
            return has_settled
        if settings.collate_fn is not self._settings.collate_fn:
            self.plan = None
        self._settings = settings
        return True

    def prepare(self) -> LoadPlan:
        """Return how batches are made. Places the columns at the first call, and those that have changed since."""
        if self.plan is None or self._planned_columns is not self._store._view.columns:
            # what a user's collate_fn makes has to be moved after it: nothing is gathered for the device
            self._streams = None if self._settings.collates_samples else streams_of(self._settings.device)
            self._planned_for_filling = self._store._view.supply is not None
            self.plan = self._make_plan(choose_placements(self._store, self._settings, self._streams))
        return self.plan

    def prepare_epoch(
        self, epoch: int, seed: int, shards: RankShards, position: Position | None, order_name: str = ""
    ) -> LoadPlan:
        """Return how the batches of an epoch are made from ``position`` on.

        With ``placement="sharded"`` the rows that this rank reads are placed, in place of those of another epoch. At
        the first call all ranks compare what they read. A store at an address stays mapped, and nothing is compared.
        Raises LoaderError, on each rank, if they cannot go on.
        """
        cuts = self._rows.cuts
        if cuts is None or "sharded" not in self._settings.placement_requests:
            return self.prepare()
        row = rows_before(position)
        cut = cuts.of(epoch, shards.world_size)
        if shards.world_size == 1 and cut.pieces == 1:
            return self.prepare()
        from memfeed.loading.own_rows import RankRows

        piece = RankRows(epoch if self._rows.shuffle else 0, seed, shards, cut, row)
        if self.plan is not None and self._piece is not None and self._piece.covers(piece):
            return self.plan
        self._streams = None if self._settings.collates_samples else streams_of(self._settings.device)
        if self._piece_placements is None:
            self._piece_placements = self._agreed(
                shards, {"order": order_name, "seed": seed, "epoch": epoch, "row": row, "pieces": cut.pieces}
            )
        self.plan = None  # frees the rows of another epoch
        self._piece = piece.whole()
        self.plan = self._make_plan(self._piece_placements)
        return self.plan

    def _agreed(self, shards: RankShards, reads: Mapping[str, Any]) -> Sequence[ColumnPlacement]:
        """Return the placements of a piece, once all ranks have said that theirs fits and that they read the same."""
        from memfeed.loading.own_rows import agree

        store, settings = self._store, self._settings
        placements: list[ColumnPlacement] = []
        failure = None
        try:
            most = -(-len(store) // shards.world_size) + shards.batch_size  # rows that a rank keeps
            rows = store._view.base_rows(np.arange(min(most, len(store))))  # so many, to find their bytes
            placements = choose_placements(store, settings, self._streams, rows)
        except LoaderError as error:
            failure = error
        in_ram = sum(one.nbytes for one in placements if one.where == "device") if self._streams is None else 0
        agree(store, settings, shards, reads, failure, in_ram)
        return placements

    def _make_plan(self, placements: Sequence[ColumnPlacement]) -> LoadPlan:
        rows = None
        if self._piece is not None:
            from memfeed.loading.own_rows import rows_of_rank

            order = self._rows.orders(self._piece.seed, self._piece.cut)(self._piece.epoch)
            rows = rows_of_rank(order, self._piece, self._store)
        self._planned_columns = self._store._view.columns
        return make_plan(self._store, self._settings, placements, self._streams, rows)

    def describe_placements(self) -> str:
        """Return the fields of each placement, for people: ``mapped: image, label``."""
        if self.plan is None:
            return ""
        fields: dict[str, list[str]] = {}
        for field, placement in zip(self._store.schema, self.plan.placement.placements, strict=True):
            fields.setdefault(placement.where, []).append(field.name)
        return "; ".join(
            f"{where}: {', '.join(names) if len(names) <= FIELDS_SHOWN else f'{len(names)} fields'}"
            for where, names in fields.items()
        )

    def groups(
        self, epoch: int, seed: int, shards: RankShards, position: Position | None, failed: int
    ) -> Iterator[BatchGroup]:
        """Yield the batches of an epoch after ``position``; ``shards`` is the share of this rank in it.

        Of a user's sampler, the next ``failed`` batches are drawn and left out. If it has raised, there are no more.

        Where memory runs out, the columns fall back to the next placement that needs less, once in a loader's life.
        Where a row of a store that is being filled fits no column, that is changed if the loader can take such rows.
        """
        while True:
            columns = self._store._view.columns
            try:
                for group in self._groups(epoch, seed, shards, position, failed):
                    yield group
                    position, failed = group.positions[-1], 0
                return
            except Exception as error:  # at the end of the interpreter no other name of an error is left
                if self._has_new_columns(columns, error):
                    continue
                if not isinstance(error, RuntimeError | MemoryError | OSError):
                    raise
                if is_of_capture(error):
                    raise LoaderError(CAPTURED) from error
                placements = fallback(self.prepare().placement.placements) if is_out_of_memory(error) else None
                if placements is None or self._fell_back:
                    raise
            self._fell_back, self.plan = True, None  # frees what the columns took, before they are placed again
            self.plan = self._make_plan(placements)
            if self._piece is not None:
                self._piece_placements = self.plan.placement.placements
            warn(
                f"memory ran out in epoch {epoch}: the columns fell back to places that need less, now "
                f"{self.describe_placements()}; leave more room with placement=, or a smaller batch"
            )

    def _has_new_columns(self, before: Sequence[Column], error: Exception) -> bool:
        """Return True if the store has other columns than ``before``, from which the next batches can be read.

        They are changed for a row that fits none: of a loader that can take such rows.
        """
        view, backing = self._store._view, self._store._backing
        if not self._settings.takes_any_shape:
            return False
        if isinstance(error, UnfitRowError) and backing.widen is not None and view.columns is before:
            backing.widen(backing, error)
        return isinstance(error, MemfeedError) and view.columns is not before

    def _groups(
        self, epoch: int, seed: int, shards: RankShards, position: Position | None, failed: int
    ) -> Iterator[BatchGroup]:
        plan = self.prepare_epoch(epoch, seed, shards, position)
        if not self._settings.has_own_order:
            drawing = itertools.islice(self._sampler_tasks(position, goes_on=failed > 0), failed, None)
            tasks = self._read_ahead(drawing, plan, None, 0)
            groups = plan.maker.groups(self._present(tasks), epoch, seed)
            # a sampler is the user's code: it runs in the caller's thread, also ahead of a GPU, which works meanwhile
            return groups if self._streams is None else made_ahead(groups, self._settings.prefetch)
        if columns := self._documents.columns(plan.placement.columns, epoch, seed):
            plan = self.plan = with_columns(plan, self._store, columns)
        cuts, begin = self._rows.cuts, rows_before(position)
        orders = self._rows.orders(seed, None if cuts is None else cuts.of(epoch, shards.world_size))
        base_rows = None if self._store._view.has_all_rows else self._store._view.base_rows
        repeats = self._settings.has_repeats
        if self._batches is not None:
            drawn_batches = self._batches(epoch, seed)
            tasks = tasks_of_batches(drawn_batches, shards, begin, base_rows, repeats=repeats)
            tasks = _draw_ahead(tasks, [orders], epoch + 1)
            tasks = self._read_ahead(tasks, plan, drawn_batches, begin)
            return plan.maker.groups(self._present(tasks), epoch, seed)
        order = orders(epoch)
        tasks = tasks_of_order(order, shards, begin, base_rows, plan.batches_a_task, repeats=repeats)
        drawn = [orders, *self._documents.orders(seed)]
        tasks = self._read_ahead(_draw_ahead(tasks, drawn, epoch + 1), plan, order, begin)
        return plan.maker.groups(self._present(tasks), epoch, seed)

    def _present(self, tasks: Iterator[GatherTask]) -> Iterator[GatherTask]:
        """Yield ``tasks``; of a store that is being filled, once their rows are there."""
        if self._store._view.supply is None and not self._store._backing.masks_rows:
            return tasks
        tasks = present_tasks(tasks, self._store, has_own_order=self._settings.has_own_order)
        return self._of_planned_columns(tasks)

    def _of_planned_columns(self, tasks: Iterator[GatherTask]) -> Iterator[GatherTask]:
        """Yield ``tasks`` as long as the columns are those that are read: later rows may lie in others only."""
        for task in tasks:
            if self._planned_columns is not self._store._view.columns:
                raise StoreError(
                    f"{self._store.path}: found that another loader has changed a column of the store, because a row "
                    "had another shape; expected the columns of when this epoch began: iterate again, with a "
                    "collate_fn that takes such rows"
                )
            yield task

    def _sampler_tasks(self, position: Position | None, *, goes_on: bool) -> Iterator[GatherTask]:
        """Yield the gathers of a user's sampler from ``position`` on: none if it ``goes_on`` after it has raised."""
        if goes_on and self._sampler_raised:
            return
        self._sampler_raised, settings = False, self._settings
        last: LastBatch = settings.last if settings.last in ("drop", "pad") else "keep"
        begin = position if isinstance(position, SamplerPosition) else None
        size = None if settings.sampler is None else settings.rows_a_batch
        try:
            yield from tasks_of_sampler(
                settings.user_sampler, size, last, begin, self._store._view.base_rows, settings.why_no_lists
            )
        except Exception:
            self._sampler_raised = True
            raise

    def _read_ahead(
        self, tasks: Iterator[GatherTask], plan: LoadPlan, order: Order | LengthBatches | None, begin: int
    ) -> Iterator[GatherTask]:
        """Yield ``tasks``. If rows are missing in the page cache, announce those of the next batches to the disk."""
        if self._planned_for_filling:
            return tasks
        reader, row_count = plan.reader, len(self._store)
        probes = np.arange(0, row_count, max(1, -(-row_count // COLD_PROBES)))
        self.is_cold = bool(reader.nbytes) and reader.begin(self._store._view.base_rows(probes))
        if not self.is_cold:
            return tasks
        threaded = order is not None and self._settings.prefetch > 0
        tasks = (announce_in_thread if threaded else announce_in_caller)(tasks, reader)
        if reader.beyond_memory and order is not None and not self._settings.has_repeats:
            # the runs that an order has passed are rows of the store only where the store is whole
            passed = (
                order.passed if isinstance(order, BlockOrder | Sequential) and self._store._view.has_all_rows else None
            )
            tasks = drop_after_use(tasks, reader, begin, passed)
        return tasks


def _draw_ahead(tasks: Iterator[GatherTask], drawn: Sequence[EpochOrders], epoch: int) -> Iterator[GatherTask]:
    """Yield ``tasks``. Once the first batch is on its way, start to draw the orders of the next epoch."""
    yield from itertools.islice(tasks, 1)
    for orders in drawn:
        orders.draw_ahead(epoch)
    yield from tasks
