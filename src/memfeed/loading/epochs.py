"""The epochs of a loader: each begins where the last one ended, or where a state or its user says."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, cast

from memfeed.errors import LoaderError
from memfeed.loading import position
from memfeed.loading.arguments import Reading
from memfeed.loading.background import Pause
from memfeed.loading.epoch import EpochIterator, EpochProgress, PrefetchPolicy, Start, run_epoch, runs_of_epoch
from memfeed.loading.epoch_reader import EpochReader
from memfeed.loading.gather_tasks import BatchGroup
from memfeed.loading.index_samplers import RowSampler, wraps_own_sampler
from memfeed.loading.placement import ColumnPlacement
from memfeed.loading.position import Position
from memfeed.loading.samplers import FollowedSamplers, parts_of
from memfeed.loading.settings import Settings, check_sharded, warn_about_ranks
from memfeed.order.choice import Blocks
from memfeed.order.pieces import RankShards
from memfeed.store.store import Store


class Epochs:
    """The position in the epochs of a loader, and what makes their batches.

    All that changes while a loader is used is here, in one object, because trainers record assignments to a loader.
    Methods take the settings as they are now: a trainer may have put in another sampler.

    Args:
        reading: what the loader reads.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading, self._clock = reading, reading.clock
        self.reader = EpochReader(reading.store, reading.settings, reading.rows, reading.batches)
        self.policy = _new_policy(reading.settings, reading.store)  # who makes batches, the caller or a thread
        self.pause = Pause()
        self.progress: EpochProgress | None = None  # of the newest iterator; None until it has given a batch
        self._newest: weakref.ref[Iterator[Any]] | None = None  # iterator, which may have given nothing yet
        self.gathered_before = 0  # bytes that were gathered before its epoch
        self.has_compared = False  # whether the ranks have compared their stores
        self._world_size: int | None = None  # of the newest epoch
        parts = parts_of(reading.settings.user_sampler)
        self._samplers = FollowedSamplers(part for part in parts if not isinstance(part, RowSampler))
        if not reading.is_rebuilt:
            self._clock.begin_at(self._samplers.epoch or 0)

    @property
    def is_cut(self) -> bool:
        """True if the rows are cut into pieces, one for each rank."""
        return self._reading.rows.cuts is not None

    def shards(self, settings: Settings) -> RankShards:
        """Return the share of this rank in an epoch, in rows, or in batches that are drawn by length."""
        batches = self._reading.batches
        return settings.shards(self._reading.rows.row_count if batches is None else batches.count)

    def order_name(self, settings: Settings) -> str:
        """Return the name of the order of the rows, for messages and states."""
        if not settings.has_own_order:
            return "sampler" if settings.batch_sampler is None else "batch_sampler"
        rows, batches = self._reading.rows, self._reading.batches
        shuffle = Blocks(rows.block_rows) if isinstance(rows.shuffle, Blocks) else rows.shuffle
        sharded = "" if rows.cuts is None else f", in pieces of blocks of {rows.block_rows} rows"
        given = getattr(self._reading.store, "weights", None)
        weights = "" if given is None else f", weights={given}"
        return f"shuffle={shuffle!r}{sharded}{weights}{'' if batches is None else f', {batches.name}'}"

    # --- passes

    def iterate(self, begin: Callable[[EpochProgress], Start], length: Callable[[], int]) -> EpochIterator:
        """Return the iterator of the next pass, which calls ``begin`` for its first batch; ``length`` is its `len`."""
        progress = EpochProgress()
        self.progress = None
        prefetch = self._reading.settings.prefetch
        run = partial(run_epoch, progress, cache(begin), lambda: self.policy, prefetch, self.pause)
        iterator = cast(EpochIterator, EpochIterator.from_iterable(runs_of_epoch(progress, run)))
        iterator.length = length
        progress.iterator = self._newest = weakref.ref(iterator)
        return iterator

    def begin(self, progress: EpochProgress, settings: Settings) -> Start:
        """Start an epoch at its first batch; return what makes its batches."""
        clock, reader, cuts = self._clock, self.reader, self._reading.rows.cuts
        if reader.use(settings):
            self.policy = _new_policy(settings, self._reading.store)
        shards = self.shards(settings)
        warn_about_ranks(shards, self._world_size, "batches" if settings.by_length else "rows")
        if progress.epoch < 0:  # else an exception ended this call before, and it is the same epoch
            self._start_clock(progress, settings, shards)
        progress.has_workers = settings.has_workers
        epoch, seed = progress.epoch, clock.resolve_seed(shards.world_size)
        if cuts is not None:
            if not settings.has_own_order:
                check_sharded(settings.user_sampler)
            cuts.begin(epoch, position.rows_before(progress.begin), shards.world_size)
        plan = reader.prepare_epoch(epoch, seed, shards, progress.begin, self.order_name(settings))
        plan.threads.allow_those_of_torch()
        self.progress, self._world_size = progress, shards.world_size
        self.gathered_before = plan.maker.gather.bytes
        samplers = self._samplers

        def start(at: Position | None, failed: int) -> Iterator[BatchGroup]:
            if failed and settings.has_own_order:
                begun = position.rows_before(progress.begin)
                left = position.step_of(shards.end(begun), position.rows_before(at), shards.stride)
                at = position.moved(epoch, at, begun, min(failed, left), shards=shards, stride=shards.stride)
            yield from reader.groups(epoch, seed, shards, at, failed)
            samplers.note()

        return start

    def _start_clock(self, progress: EpochProgress, settings: Settings, shards: RankShards) -> None:
        """Take the number and the beginning of the epoch, and set the user's samplers to it."""
        clock = self._clock
        was_named = clock.was_set or clock.was_loaded
        driven = self._samplers.driven_epoch(since_last_pass=was_named)
        if driven is not None:
            (clock.set_sampler_epoch if self._samplers.has_news else clock.set_epoch)(driven)
        progress.epoch, progress.begin = clock.start(shards.world_size)
        progress.position = progress.begin
        self._samplers.begin(progress.epoch, was_named=was_named)
        if not settings.has_own_order and wraps_own_sampler(settings.user_sampler):
            clock.lend()

    def set_epoch(self, epoch: int) -> None:
        """See `Loader.set_epoch`."""
        self._clock.set_epoch(epoch)
        self._samplers.forget_news()
        self.progress = None

    def stats(self) -> Stats:
        """See `Loader.stats`."""
        progress, reader = self.progress or EpochProgress(), self.reader
        store, plan = self._reading.store, reader.plan
        gathered = 0 if plan is None else plan.maker.gather.bytes - self.gathered_before
        columns = store._view.columns if plan is None else plan.placement.columns
        not_yet = [ColumnPlacement("mapped", "no epoch has begun")] * len(columns)
        placements = not_yet if plan is None else plan.placement.placements
        seconds, samples, batches = progress.seconds, progress.samples, progress.batches
        # the first batch of an epoch has no clock before it
        timed = samples * (batches - 1) / batches if batches > 1 else 0.0
        return Stats(
            epoch=None if self.progress is None else progress.epoch,
            batches=batches,
            samples=samples,
            seconds=seconds,
            samples_per_second=timed / seconds if seconds else 0.0,
            bytes=gathered,
            bytes_per_second=gathered * timed / samples / seconds if seconds and samples else 0.0,
            wait_share=progress.wait_seconds / seconds if seconds else 0.0,
            columns={
                column.field.name: column.kept_in if one.where == "mapped" else one.where
                for column, one in zip(columns, placements, strict=True)
            },
            placement={column.field.name: one.why for column, one in zip(columns, placements, strict=True)},
            cold=reader.is_cold,
            plan={
                "batches": str(self.policy),
                "batches_per_gather": 0 if plan is None else plan.maker.at_once,
                "read_ahead": "off" if not reader.is_cold else "on",
                "threads": {} if plan is None else plan.threads.describe(),
            },
        )

    # --- positions

    def state(self, settings: Settings) -> dict[str, Any]:
        """See `Loader.state_dict`."""
        is_waiting = self.progress is None and self._newest is not None and self._newest() is not None
        if (is_waiting or self._clock.generator is not None) and settings.ranks()[1] == 1:
            self._clock.resolve_seed(1)  # so that a state before the first batch has the order of that loader
        epoch, reached = self._position()
        cuts = self._reading.rows.cuts
        pieces = {} if cuts is None else {"pieces": cuts.state(epoch, position.rows_before(reached))}
        return position.to_state(epoch, reached, self._clock.seed, {**self._identity(settings), **pieces})

    def load(self, saved: dict[str, Any], settings: Settings, seed: int | None) -> None:
        """See `Loader.load_state_dict`; ``seed`` is the one that the loader was given."""
        saved = self._of_this_conversion(saved)
        identity = self._identity(settings) if seed is None else {**self._identity(settings), "seed": seed}
        last_row = self.shards(settings).rows if settings.has_own_order else None
        epoch, found = position.from_state(saved, identity, last_row)
        cuts, rows_before = self._reading.rows.cuts, position.rows_before(found)
        if cuts is not None:
            cuts.load(epoch, saved.get("pieces", "") if rows_before else "")
        if seed is None:
            self._clock.load_seed(saved["seed"] if isinstance(saved["seed"], int) else None)
        self._clock.load(epoch, found, at_end=rows_before >= self._end_of(settings, rows_before))
        self._samplers.forget_news()
        self.progress = None

    def move(self, batches: int, settings: Settings) -> None:
        """Go on after the next ``batches`` batches; back, if that is negative. See `Loader.skip`, `Loader.rewind`."""
        progress = self.progress
        if progress is not None and not progress.finished and not progress.is_running:
            raise LoaderError(
                f"found no running iterator: that of epoch {progress.epoch} is gone; expected skip and rewind within "
                "its loop; to continue that epoch, call load_state_dict(loader.state_dict()) and iterate again"
            )
        epoch, current = self._position()
        begin = 0 if progress is None or progress.finished or not isinstance(progress.begin, int) else progress.begin
        moved = position.moved(
            epoch,
            current,
            begin,
            batches,
            shards=self.shards(settings) if settings.has_own_order else None,
            stride=1 if settings.batch_sampler is not None else settings.rows_a_batch,
        )
        if progress is None or progress.finished:
            self._clock.move(moved)
        else:
            progress.position, progress.moved, progress.failed = moved, True, 0

    def _end_of(self, settings: Settings, row: int) -> int:
        """Return the position from which nothing may be left of an epoch that goes on at ``row``.

        It is 0 for a user's own sampler, which decides.
        """
        if settings.has_own_order:
            return self.shards(settings).end(row)
        if not wraps_own_sampler(settings.user_sampler):
            return 0
        try:
            end = len(settings.user_sampler)
        except (TypeError, NotImplementedError):
            return 0
        drops = settings.last == "drop" and settings.batch_sampler is None
        return end - end % settings.rows_a_batch if drops else end

    def _position(self) -> tuple[int, Position | None]:
        progress = self.progress
        if progress is None:
            return self._clock.next
        return (progress.epoch + 1, None) if progress.finished else (progress.epoch, progress.position)

    def _identity(self, settings: Settings) -> dict[str, Any]:
        """Return the settings that a saved state must share with the loader that restores it."""
        store = self._reading.store
        return {"store": store._view.source_digest(), "rows": len(store), "order": self.order_name(settings)}

    def _of_this_conversion(self, saved: Any) -> Any:
        """Return a state as one of the dataset, that names its store by the ``digest`` of this conversion."""
        store = self._reading.store
        named, own = saved.get("store") if isinstance(saved, dict) else None, store._view.source_digest()
        if named == store.digest:
            return {**saved, "store": own}
        if store._view.skipped and store._view.has_all_rows and own != named == own.partition("-")[0]:
            epoch = saved.get("epoch")
            raise LoaderError(
                f"found a state of epoch {epoch} that was saved while the store was filled, with "
                f"{saved.get('rows')} rows; the finished store has {len(store)}, without the "
                f"{len(store._view.skipped)} for which the dataset raised, and so another order; "
                f"expected a state of it: begin an epoch again with loader.set_epoch({epoch})"
            )
        return saved


def _new_policy(settings: Settings, store: Store) -> PrefetchPolicy:
    on_gpu = settings.device is not None and settings.device.type == "cuda"
    # without workers the dataset is read where batches are made: in the caller's thread, as a user's code must be
    reads_here = store._view.supply is not None and store._view.supply.in_caller
    allowed = settings.prefetch > 0 and settings.has_own_order and not reads_here
    return PrefetchPolicy(allowed=allowed, always=on_gpu)


class Stats(dict[str, Any]):
    """A dict, which a notebook shows as bars and a table."""

    def _repr_html_(self) -> str:
        from memfeed.loading.loader_html import stats_html  # a training shows no page

        return stats_html(self)
