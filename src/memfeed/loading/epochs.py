"""The epochs of a loader: each begins where the last one ended, or where a state or its user says."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler

from memfeed.errors import LoaderError
from memfeed.loading import position
from memfeed.loading.arguments import ResolvedArguments
from memfeed.loading.epoch import Begun, EpochIterator, EpochProgress, run_epoch
from memfeed.loading.epoch_reader import EpochReader
from memfeed.loading.index_samplers import wraps_own_sampler
from memfeed.loading.next_epoch import Identity, NextEpoch, PrefetchSlot
from memfeed.loading.pause import Pause
from memfeed.loading.position import Position, SamplerPosition, rows_before
from memfeed.loading.prefetch_policy import PrefetchPolicy
from memfeed.loading.samplers import FollowedSamplers
from memfeed.loading.settings import Settings, check_sharded, warn_about_ranks
from memfeed.order.choice import Blocks
from memfeed.order.shards import RankShards
from memfeed.store.store import Store


class Epochs:
    """The position in the epochs of a loader, and what makes their batches.

    All that changes while a loader is used is here, in one object, because trainers record assignments to a loader.
    Methods take the settings as they are now: a trainer may have put in another sampler.

    Args:
        resolved: what the loader reads.
        samplers: the user's samplers, whose epoch is set.
    """

    def __init__(self, resolved: ResolvedArguments, *samplers: Any) -> None:
        self._resolved, self._clock = resolved, resolved.clock
        self.reader = EpochReader(resolved.store, resolved.settings, resolved.rows, resolved.batches)
        self.policy = _new_policy(resolved.settings, resolved.store)  # who makes batches, the caller or a thread
        self.pause, self.handover = Pause(), PrefetchSlot()  # the latter holds the next epoch that a thread has begun
        self.progress: EpochProgress | None = None  # of the newest iterator; None until it has given a batch
        self.gathered_before = 0  # bytes that were gathered before its epoch
        self.has_compared = False  # whether the ranks have compared their stores
        self._world_size: int | None = None  # of the newest epoch
        self._samplers = FollowedSamplers(one for one in samplers if not _is_own(one))
        if not resolved.is_rebuilt:
            self._clock.begin_at(self._samplers.epoch or 0)

    @property
    def is_cut(self) -> bool:
        """True if the rows are cut into pieces, one for each rank."""
        return self._resolved.rows.cuts is not None

    def shards(self, settings: Settings) -> RankShards:
        """Return the share of this rank in an epoch, in rows, or in batches that are drawn by length."""
        batches = self._resolved.batches
        return settings.shards(self._resolved.rows.row_count if batches is None else batches.count)

    def order_name(self, settings: Settings) -> str:
        """Return what orders the rows, for messages and states."""
        if not settings.has_own_order:
            return "sampler" if settings.batch_sampler is None else "batch_sampler"
        rows, batches = self._resolved.rows, self._resolved.batches
        shuffle = Blocks(rows.block_rows) if isinstance(rows.shuffle, Blocks) else rows.shuffle
        sharded = "" if rows.cuts is None else f", in pieces of blocks of {rows.block_rows} rows"
        given = getattr(self._resolved.store, "weights", None)
        weights = "" if given is None else f", weights={given}"
        return f"shuffle={shuffle!r}{sharded}{weights}{'' if batches is None else f', {batches.name}'}"

    # --- passes

    def iterate(self, begin: Callable[[EpochProgress], Begun], length: Callable[[], int]) -> EpochIterator:
        """Return the iterator of the next pass, which calls ``begin`` for its first batch; ``length`` is its `len`."""
        progress = EpochProgress()
        self.progress = None
        prefetch = self._resolved.settings.prefetch
        iterator = EpochIterator(run_epoch(progress, begin, lambda: self.policy, prefetch, self.pause, self.handover))
        iterator.length = length
        progress.iterator = weakref.ref(iterator)
        return iterator

    def begin(self, progress: EpochProgress, settings: Settings) -> Begun:
        """Start an epoch at its first batch; return what makes its batches."""
        clock, reader, cuts = self._clock, self.reader, self._resolved.rows.cuts
        if reader.use(settings):
            self.policy = _new_policy(settings, self._resolved.store)
        shards = self.shards(settings)
        warn_about_ranks(shards, self._world_size, "batches" if settings.by_length else "rows")
        self._start_clock(progress, settings, shards)
        epoch, seed = progress.epoch, clock.resolve_seed(shards.world_size)
        if cuts is not None:
            if not settings.has_own_order:
                check_sharded(settings.user_sampler)
            cuts.begin(epoch, position.rows_before(progress.begin), shards.world_size)
        plan = reader.prepare_epoch(epoch, seed, shards, progress.begin, self.order_name(settings))
        plan.threads.allow_those_of_torch()
        self.progress, self._world_size = progress, shards.world_size
        samplers, what = self._samplers, (seed, shards, settings, progress.begin is None)
        early = self.handover.take((epoch, *what, _state_of(settings.transform)))
        self.gathered_before = plan.maker.gather.bytes if early is None else early.coming.gathered_before

        def start(at: Position | None) -> Iterator[Any]:
            yield from reader.groups(epoch, seed, shards, at)
            samplers.note()

        after = None if samplers else partial(_next_epoch, reader, seed, shards, settings)
        return Begun(start, (lambda: None) if after is None else partial(after, epoch + 1), early)

    def _start_clock(self, progress: EpochProgress, settings: Settings, shards: RankShards) -> None:
        """Take the number and the beginning of the epoch, and set the user's samplers to it."""
        clock = self._clock
        was_named = clock.was_set or clock.was_loaded
        driven = self._samplers.driven_epoch(anew=was_named)
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

    # --- positions

    def state(self, settings: Settings) -> dict[str, Any]:
        """See `Loader.state_dict`."""
        if self._clock.generator is not None and settings.ranks()[1] == 1:
            self._clock.resolve_seed(1)  # so that a state before the first batch has the order of that loader
        epoch, reached = self._position()
        cuts = self._resolved.rows.cuts
        pieces = {} if cuts is None else {"pieces": cuts.state(epoch, position.rows_before(reached))}
        return state_to_dict(epoch, reached, self._clock.seed, {**self._identity(settings), **pieces})

    def load(self, saved: dict[str, Any], settings: Settings, seed: int | None) -> None:
        """See `Loader.load_state_dict`; ``seed`` is the one that the loader was given."""
        saved = self._of_this_conversion(saved)
        identity = self._identity(settings) if seed is None else {**self._identity(settings), "seed": seed}
        last_row = self.shards(settings).rows if settings.has_own_order else None
        epoch, found = state_from_dict(saved, identity, last_row)
        cuts, rows_before = self._resolved.rows.cuts, position.rows_before(found)
        if cuts is not None:
            cuts.load(epoch, saved.get("pieces", "") if rows_before else "")
        if seed is None:
            self._clock.load_seed(saved["seed"] if isinstance(saved["seed"], int) else None)
        self._clock.load(epoch, found, at_end=last_row is None or rows_before >= last_row)
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
            progress.position, progress.moved = moved, True

    def _position(self) -> tuple[int, Position | None]:
        progress = self.progress
        if progress is None:
            return self._clock.next
        return (progress.epoch + 1, None) if progress.finished else (progress.epoch, progress.position)

    def _identity(self, settings: Settings) -> dict[str, Any]:
        """Return the settings that a saved state must share with the loader that restores it."""
        store = self._resolved.store
        return {"store": store._view.source_digest(), "rows": len(store), "order": self.order_name(settings)}

    def _of_this_conversion(self, saved: Any) -> Any:
        """Return a state as one of the dataset, that names its store by the ``digest`` of this conversion."""
        store = self._resolved.store
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


def _next_epoch(
    reader: EpochReader, seed: int, shards: RankShards, settings: Settings, number: int
) -> NextEpoch | None:
    """Return the epoch of this number, to be begun early; None where that would not be right. Keeps no plan alive."""
    if not reader.begins_early():
        return None
    key = (number, seed, shards, settings, True, _state_of(settings.transform))
    after = partial(_next_epoch, reader, seed, shards, settings, number + 1)
    groups = reader.groups(number, seed, shards, None)
    return NextEpoch(key, groups, reader.prepare().maker.gather.bytes, after)


def _state_of(transform: Any) -> Any:
    """Return what differs after somebody has changed a transform: all its modules and their attributes."""
    modules = list(transform.modules()) if isinstance(transform, torch.nn.Module) else []
    return [Identity(value) for module in modules for value in (module, *vars(module).values())]


def _is_own(sampler: Any) -> bool:
    return sampler is None or (type(sampler) is not BatchSampler and wraps_own_sampler(sampler, 0))


VERSION = 1
FINISHED = "_iterator_finished"
"""torchdata's name for a state whose epoch is over. Accelerate sets it in a state that it saves."""


def state_to_dict(epoch: int, position: Position | None, seed: int | None, identity: dict[str, Any]) -> dict[str, Any]:
    """Return a position in an epoch as a state. ``identity`` is what must be the same where the state is loaded.

    A seed that is not drawn yet is an empty string.
    """
    sampler = ""
    if isinstance(position, SamplerPosition):
        sampler = json.dumps({"start": position.generators, "hash": position.drawn_hash})
    row = rows_before(position)
    known = "" if seed is None else seed
    return {
        "version": VERSION,
        "epoch": epoch,
        "row": row,
        "sampler": sampler,
        "seed": known,
        FINISHED: False,
        **identity,
    }


def state_from_dict(state: Any, identity: dict[str, Any], last_row: int | None) -> tuple[int, Position | None]:
    """Return the epoch and the position of a state.

    Raises LoaderError for a state of something else, and says what differs. ``last_row`` is the end of an epoch where
    that is known.
    """
    wanted = {"version", "epoch", "row", "sampler", "seed", *identity}
    if not isinstance(state, dict) or not wanted <= set(state):
        found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise LoaderError(f"found a state of {found}; expected the dict that state_dict() gave, with {sorted(wanted)}")
    if state["version"] != VERSION:
        raise LoaderError(f"found a state of version {state['version']!r}; expected {VERSION}")
    for name, value in identity.items():
        if state[name] != value:
            raise LoaderError(
                f"found a state with {name} {state[name]!r}; this loader has {name} {value!r}; expected a state of the "
                "same store, view, order and seed: make the loader as it was made then"
            )
    epoch, row = state["epoch"], state["row"]
    if not _is_count(epoch) or not _is_count(row) or (last_row is not None and row > last_row):
        raise LoaderError(f"found a state at epoch {epoch!r}, row {row!r}; expected whole numbers within the epoch")
    if state.get(FINISHED):
        return epoch + 1, None
    if not state["sampler"]:
        return epoch, row or None
    try:
        kept = json.loads(state["sampler"])
        return epoch, SamplerPosition(row, str(kept["start"]), str(kept["hash"])) if row else None
    except (ValueError, KeyError, TypeError) as error:
        raise LoaderError(f"found a state whose sampler cannot be read ({error}); expected state_dict()'s") from error


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
