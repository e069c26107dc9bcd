"""The public face of loading: a store to batches, epoch by epoch."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader
from typing_extensions import TypeVar

from memfeed.errors import LoaderError
from memfeed.loading import position, state
from memfeed.loading.batch_order import LengthBatchSampler, batch_order
from memfeed.loading.bind import UserTransform, bind, transform_of
from memfeed.loading.clock import EpochClock
from memfeed.loading.collate import Collate, LoaderCollate
from memfeed.loading.cuts import Cuts
from memfeed.loading.epoch import Begun, EpochIterator, EpochProgress, run_epoch
from memfeed.loading.epoch_reader import EpochReader
from memfeed.loading.index_samplers import RowOrder, make_sampler, wraps_own_sampler
from memfeed.loading.next_epoch import Handover, Identity, NextEpoch
from memfeed.loading.padding import padded_fields
from memfeed.loading.pause import Pause
from memfeed.loading.placement import PlacementOption, placement_requests
from memfeed.loading.position import Position
from memfeed.loading.prefetch_policy import PrefetchPolicy
from memfeed.loading.samplers import FollowedSampler, followed
from memfeed.loading.settings import (
    WITHOUT_EFFECT,
    ArrayKind,
    Settings,
    as_int,
    check_arguments,
    check_filling,
    check_names,
    check_padding,
    check_ranks,
    check_sharded,
    check_without_effect,
    warn_about_ranks,
)
from memfeed.loading.sources import CACHING, as_stores, check_cache, filled_store, is_dataset, join
from memfeed.loading.stats import stats
from memfeed.order.choice import Shuffle, default_block_rows, mixed_rows
from memfeed.order.mixture import shares
from memfeed.order.shards import LastRows, RankShards
from memfeed.store.store import Store
from memfeed.system.messages import say_once
from memfeed.system.units import format_bytes
from memfeed.transfer.devices import check_device

T_co = TypeVar("T_co", covariant=True, default=Any)
READ_ONLY = frozenset(
    (
        "shuffle", "seed", "pad_last", "uneven", "weights", "block_rows", "device", "transform", "placement",
        "prefetch", "rank", "world_size", "return_rows", "as_", "pad",
        "batch_tokens", "bucket_by", "threads", "cache",
    )
)  # fmt: skip


@dataclasses.dataclass
class _Run:
    """The state that changes while a loader is used; in one object, because trainers record assignments to a loader.

    Args:
        progress: of the newest iterator; None until it has given a batch.
        gathered_before: bytes that were gathered before its epoch.
        world_size: of the newest epoch.
        samplers: the user's samplers, whose epoch is set.
        policy: who makes batches, the caller or a thread.
        pause: parks the threads that make batches.
        handover: the thread that has begun the next epoch.
    """

    policy: PrefetchPolicy
    samplers: Sequence[FollowedSampler]
    progress: EpochProgress | None = None
    gathered_before: int = 0
    world_size: int | None = None
    pause: Pause = dataclasses.field(default_factory=Pause)
    handover: Handover = dataclasses.field(default_factory=Handover)


class Loader(DataLoader[T_co]):
    """Batches of a store, as `torch.utils.data.DataLoader` would give them, at the speed of memory.

    A batch is what `default_collate` makes of its samples. Leaves of varying length are one jagged nested tensor,
    leaves of varying shape a list of tensors; str, bytes and JSON values are a list. The memory of a batch belongs to
    the caller for as long as any tensor shares it; after that it is used for another batch.

    It is a DataLoader, with its arguments and attributes, but needs no worker processes. Trainers may take it, replace
    its sampler, or make a DataLoader of its parts: order, transform, device and seed stay.

    Each pass is the next epoch (the first is 0), from the moment its first batch is asked for; ``set_epoch(e)`` sets
    the number of the next one. The order is a pure function of (number of rows, seed, epoch). At step k all ranks
    together read the same rows for any number of ranks, if ``batch_size * world_size`` is the same.

    Args:
        dataset: a Store or a view of one, a `torch.utils.data.Subset` of one, a list or ConcatDataset of stores of one
            schema, or columns in memory: a tensor, a tuple or dict of tensors, a TensorDataset, a TensorDict (read in
            place, not copied). Any other map-style dataset (``len`` and ``[]``), as DataLoader takes it: it becomes a
            store at ``cache`` that is filled while it is read, as by ``memfeed.cache(..., split="auto", lazily=True)``.
        batch_size: rows per batch and rank; the last batch is smaller unless ``drop_last`` or ``pad_last``. None gives
            single samples, through `default_convert`.
        shuffle: True for an exact uniform permutation of the rows, a new one in every epoch (8 bytes of memory a row, 4
            above a million rows). "blocks" for stores beyond memory or 10^8 rows: blocks of ``block_rows`` neighbouring
            rows in random order, the rows of 128 blocks at a time mixed; ``memfeed.order.orders.Blocks`` says how far
            that is from uniform.
        seed: the seed of the shuffling and of keyed transforms. None takes one when the first pass starts: drawn from
            ``generator``; without one that of torch's default generator, so that `torch.manual_seed` decides; with
            several ranks 0.
        drop_last: leave out the rows that make no whole batch for every rank.
        pad_last: fill the last batch with repeated rows, so that every rank gets the same number of batches, all of one
            shape, and say which rows count: a dict or TensorDict gets the key "valid", any other batch becomes
            ``(batch, valid)``; bool [batch_size].
        uneven: with several ranks, give each row once: ranks then differ by at most one row, and some may get one batch
            less. By default the last batches are filled up with rows from the beginning of the epoch's order, as
            `DistributedSampler` does, so that every rank gets the same number of batches.
        sampler: row numbers to visit instead, an iterable of ints (any of torch's samplers). If it has ``set_epoch``,
            that is called with each epoch's number, unless somebody else calls it.
        batch_sampler: an iterable of lists of row numbers; replaces batch_size, shuffle, sampler and drop_last.
        weights: for a list of stores, the share of the rows that comes from each; they sum to 1. An epoch has as many
            rows as the stores together. Without weights it has each row once.
        block_rows: rows of a block with ``shuffle="blocks"``; None takes as many as make 1 MiB, at most 1,024.
        device: the device to which batches go before the transform; None leaves them in CPU memory.
        transform: a ``memfeed.transforms`` transform, a callable ``batch -> batch``, or ``{field: callable}``. None:
            the store's own, see `Store.transform`; {} for none at all.
        placement: where columns are kept: "device" (the memory of the device, which picks the rows itself), "pinned"
            (page-locked memory of the CPU, read by the device over the bus) or "mapped" (the files of the store, or the
            columns in memory as they are); or {field: one of these}. "auto" leaves half of the device's memory to the
            model, fills the other half, then up to half of the free RAM (divided by the number of GPUs), the largest
            columns first. Without a CUDA device "auto" leaves all columns mapped, and "device" and "pinned" are a copy
            in RAM. Columns are placed when the first epoch begins, so move the model to the device before. Columns
            whose rows differ in size stay mapped. If memory runs out later, columns fall back to the next placement
            that needs less, once, with a warning. See ``stats``. "sharded" (for all fields, or beside "mapped"): as
            "device", but each rank keeps only the rows that it reads in an epoch, one ``world_size``-th of all. The
            order is then another one: random blocks of neighbouring rows come to each rank, in every epoch other ones,
            and are shuffled there; `memfeed.order.pieces.Pieces` says how far that is from uniform. Before the first
            epoch the ranks of `torch.distributed` compare their stores, settings and memory. A store opened at an
            address stays mapped: then a rank fetches only the chunks of its rows, and nothing is compared.
        prefetch: how many batches are made ahead: by a thread if the device is a GPU, else by a thread if it is
            measured to be faster (see ``stats``). 0 for none.
        rank, world_size: which slice of each global batch this loader reads; both or neither. By default those of
            `torch.distributed` when an epoch starts, where it is initialised, else those of the launcher (RANK and
            WORLD_SIZE). A sampler decides itself which rows its rank reads.
        collate_fn: called with the list of samples of a batch, in place of the gathered batch; slow, because samples
            are Python objects.
        generator: the generator from which a missing seed is drawn.
        num_workers, pin_memory, timeout, worker_init_fn, multiprocessing_context, prefetch_factor, persistent_workers,
            pin_memory_device, in_order: accepted as DataLoader's, without effect, except for a ``dataset`` that becomes
            a store (see ``cache``). The attributes read as in a DataLoader without workers.
        return_rows: say the row numbers of a batch: a dict or TensorDict gets the key "rows", any other batch becomes
            ``(batch, rows)``, with ``pad_last`` ``(batch, valid, rows)``; int64 [k], rows of ``dataset``.
        as_: "torch" for tensors, "numpy" or "jax" for arrays that share their memory where they can.
        pad: fields of varying length that come padded to the longest row of the batch, each with the value that fills
            up the others: ``pad={"tokens": 0}`` gives "tokens" [k, longest, ...] and beside it "tokens_mask", bool [k,
            longest], True where values are real. The fields must be in a dict or TensorDict.
        batch_tokens: cut batches by their tokens, in place of ``batch_size``: rows times the longest row is at most
            this, so that a padded batch never has more. Rows of like length come together: 128 batches' worth of rows,
            in the epoch's order, are sorted by length, cut, and their batches shuffled. Every epoch has the same number
            of batches. Ranks read whole batches, the same number each: the last ones are filled up with batches of the
            beginning, or as ``drop_last``, ``uneven`` or ``pad_last`` (no row of such a batch is valid) say.
        bucket_by: the field of varying length whose lengths count; None for the only one. With ``batch_size`` in place
            of ``batch_tokens`` batches have so many rows, of like length.
        threads: how many threads gather and transform, the one that makes the batches among them. None takes as many as
            are measured to be worthwhile while the loop runs, at most `torch.get_num_threads()` and the cores: one that
            gains little, or whose core others use, rests until it gains more (see ``stats``).
        cache: where the store of a map-style ``dataset`` is kept; None for a temporary store, which is removed with the
            loader. ``num_workers`` processes read the dataset while the store is filled, each after ``worker_init_fn``;
            0 reads it in this process, as DataLoader does. They start as `torch.multiprocessing` says; a message tells
            if ``multiprocessing_context`` is another way.

    Raises:
        LoaderError: arguments that do not fit together, or a source of another kind. For a dataset also what
            `memfeed.cache` raises.
        RowError: during iteration, if a sampler yields a row out of range.

    Example::

        loader = memfeed.Loader(torch.arange(300_000), 300, shuffle=True)
        for batch in loader:  # int64 [300]
            ...
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: Shuffle | None = None,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Iterable[int]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        pad_last: bool = False,
        uneven: bool = False,
        weights: Sequence[float] | None = None,
        block_rows: int | None = None,
        device: torch.device | str | None = None,
        transform: UserTransform = None,
        placement: PlacementOption = "auto",
        prefetch: int = 2,
        rank: int | None = None,
        world_size: int | None = None,
        return_rows: bool = False,
        as_: ArrayKind = "torch",
        pad: Mapping[Any, float] | None = None,
        batch_tokens: int | None = None,
        bucket_by: Any = None,
        threads: int | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        given = dict(locals())
        is_cached = is_dataset(dataset)
        check_without_effect({name: given[name] for name in WITHOUT_EFFECT}, CACHING if is_cached else ())
        if is_cached:
            dataset = filled_store(dataset, cache, num_workers, worker_init_fn, multiprocessing_context)
        elif cache is not None:
            check_cache(dataset, cache)
        if batch_size is not None:
            batch_size = as_int("batch_size", batch_size, 1)
        check_arguments(
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            pad_last=pad_last,
            uneven=uneven,
            sampler=sampler,
            batch_sampler=batch_sampler,
            weights=weights,
            block_rows=block_rows,
            as_=as_,
            batch_tokens=None if batch_tokens is None else as_int("batch_tokens", batch_tokens, 1),
            bucket_by=bucket_by,
        )
        user_sampler = sampler if batch_sampler is None else batch_sampler
        own_rank, own_world_size = check_ranks(rank, world_size, user_sampler)
        stores = as_stores(dataset)
        self.store = join(stores)
        check_filling(stores, by_length=(batch_tokens, bucket_by) != (None, None))
        check_names(self.store.schema.structure, pad_last=pad_last or self.store.masks_rows, return_rows=return_rows)
        used_transform = transform_of(transform, self.store)
        bind(used_transform, self.store.schema)  # raises for what is no transform
        # a trainer that makes a loader anew hands on the collate_fn of ours: then it is the same loader, and clock
        rebuilt = collate_fn if isinstance(collate_fn, LoaderCollate) else None
        clock = EpochClock(None if seed is None else as_int("seed", seed), generator)
        if rebuilt is not None:
            clock, collate_fn = rebuilt.clock, rebuilt.settings.collate_fn
        rows = _row_order(self.store, [len(store) for store in stores], shuffle, weights, block_rows, user_sampler)
        by_length = user_sampler is None and (batch_tokens, bucket_by) != (None, None)
        requests = placement_requests(placement, self.store.schema, check_device(device))
        if "sharded" in requests:
            check_sharded(
                user_sampler,
                has_weights=rows.counts is not None,
                by_length=by_length,
                is_filling=self.store.supply is not None and not self.store.chunk_rows,
            )
            rows.cuts = Cuts(batch_size or 1)
            if self.store.chunk_rows:  # of an address: on each rank alike, also where all of its cache is there
                requests = ["mapped"] * len(requests)
        batches = batch_order(self.store, rows, batch_size, batch_tokens, bucket_by, drop_last) if by_length else None
        last: LastRows = "drop" if drop_last else "pad" if pad_last else "uneven" if uneven else "repeat"
        self._settings = Settings(
            batch_size=batch_size,
            last=last,
            sampler=sampler,
            batch_sampler=batch_sampler,
            has_repeats=rows.counts is not None,
            device=check_device(device),
            transform=used_transform,
            placement_requests=requests,
            prefetch=as_int("prefetch", prefetch, 0),
            collate_fn=_user_collate(collate_fn),
            returns_rows=return_rows,
            as_=as_,
            rank=own_rank,
            world_size=own_world_size,
            padded=padded_fields(pad, self.store.schema),
            by_length=by_length,
            threads=None if threads is None else as_int("threads", threads, 1),
        )
        check_padding(self._settings)
        shown_batches = batch_sampler if batches is None else LengthBatchSampler(batches, clock)
        has_rows = user_sampler is None and batches is None
        super().__init__(
            self.store,
            1 if shown_batches is not None else batch_size,
            sampler=make_sampler(self.store, rows, clock) if has_rows else sampler,
            batch_sampler=shown_batches,  # type: ignore[arg-type]
            collate_fn=self._settings.collate_fn or LoaderCollate(self._settings, clock),
            drop_last=bool(drop_last) and batches is None,
            generator=generator,
        )
        self.shuffle, self.seed, self.pad_last, self.uneven = shuffle, seed, pad_last, uneven
        self.weights, self.block_rows, self.device, self.transform = weights, block_rows, device, transform
        self.placement, self.prefetch, self.rank, self.world_size = placement, prefetch, rank, world_size
        self.return_rows, self.as_, self.pad = return_rows, as_, pad
        self.batch_tokens, self.bucket_by, self.threads = batch_tokens, bucket_by, threads
        self.cache = cache
        self._clock, self._rows, self._batches = clock, rows, batches
        self._own_parts = (self.sampler, self.batch_sampler, self.collate_fn)
        self._reader = EpochReader(self.store, self._settings, rows, batches)
        samplers = (sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
        self._run = _Run(_new_policy(self._settings, self.store), followed(s for s in samplers if not _is_own(s)))
        self._locked = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in READ_ONLY and self.__dict__.get("_locked"):
            raise ValueError(f"{name} attribute should not be set after {type(self).__name__} is initialized")
        super().__setattr__(name, value)

    def _effective_settings(self) -> Settings:
        """Return the settings, with the sampler and the collate_fn that another component may have put in."""
        sampler, batch_sampler, collate_fn = self._own_parts
        settings = self._settings
        if self.collate_fn is not collate_fn:
            settings = dataclasses.replace(settings, collate_fn=_user_collate(self.collate_fn))
        if self.sampler is sampler and self.batch_sampler is batch_sampler and self._holds_own_sampler():
            return settings
        say_once("memfeed: another component has replaced the sampler of a loader: it decides which rows are read")
        batches: Any = self.batch_sampler
        rows = self.sampler if batches is None else None
        return dataclasses.replace(
            settings, sampler=rows, batch_sampler=batches, rank=None, world_size=None, by_length=False
        )

    def _holds_own_sampler(self) -> bool:
        """Return True unless the batch sampler that torch made for our order was changed in place."""
        batches: Any = self.batch_sampler
        if batches is None or not self._settings.has_own_order or self._batches is not None:
            return True
        same_batches = batches.batch_size == self.batch_size and batches.drop_last == self.drop_last
        return batches.sampler is self.sampler and same_batches

    # --- describe

    def __len__(self) -> int:
        """Batches in an epoch for this rank. Raises TypeError, as DataLoader does, for a sampler without a length."""
        settings = self._effective_settings()
        if settings.batch_sampler is not None:
            return len(settings.batch_sampler)  # type: ignore[arg-type]
        if settings.sampler is None:
            return self._shards(settings).count()
        rows, size = len(settings.sampler), settings.rows_a_batch  # type: ignore[arg-type]
        return rows // size if self.drop_last else -(-rows // size)

    def _shards(self, settings: Settings) -> RankShards:
        """Return the share of this rank in an epoch, in rows, or in batches that are drawn by length."""
        return settings.shards(self._rows.row_count if self._batches is None else self._batches.count)

    def __repr__(self) -> str:
        settings = self._effective_settings()
        sized = isinstance(settings.batch_sampler or settings.sampler or [], Sized)
        rank, world_size = settings.ranks()
        ranks = "" if world_size == 1 else f"rank {rank} of {world_size}, "
        batches = "" if settings.by_length else f"batch_size={self.batch_size}, "
        placement = self._reader.describe_placements() or repr(self.placement)
        return (
            f"Loader({len(self.store):,} rows, {batches}{self._order_name()}, "
            f"seed={self._clock.seed}, {ranks}{f'{len(self):,}' if sized else '?'} batches an epoch, "
            f"device={self.device or 'cpu'}, placement={placement})"
        )

    def _order_name(self) -> str:
        settings = self._effective_settings()
        if not settings.has_own_order:
            return "sampler" if settings.batch_sampler is None else "batch_sampler"
        is_sharded = self._rows.cuts is not None
        blocks = f", block_rows={self._rows.block_rows}" if self.shuffle == "blocks" or is_sharded else ""
        blocks += ", sharded" if is_sharded else ""
        weights = "" if self.weights is None else f", weights={[float(weight) for weight in self.weights]}"
        by_length = "" if self._batches is None else f", {self._batches.name}"
        return f"shuffle={self._rows.shuffle!r}{blocks}{weights}{by_length}"

    def stats(self) -> dict[str, Any]:
        """Return how the newest epoch goes, or went. JSON.

        ``epoch``; ``batches`` and ``samples`` given, ``bytes`` gathered; ``seconds`` since the first batch, and from it
        ``samples_per_second`` and ``bytes_per_second``; ``wait_share``, the part of that time the caller waited for
        data; ``columns``, where each is kept ("device", "pinned", "mapped", "memory", "files"), and ``placement``, why
        there; ``cold``, whether rows were missing in the page cache when the epoch began; ``plan``, how batches are
        made: when asked for or ahead in a thread, how many small batches by one gather, whether rows are read ahead,
        and ``threads``: the ``most`` there may be, and how many gather and transform at present.
        """
        run = self._run
        return stats(run.progress, run.gathered_before, self.store, self._reader, run.policy)

    # --- epochs

    @property
    def epoch(self) -> int:
        """The epoch of the newest pass, or the one that ``set_epoch`` was given after it started; at first 0."""
        return self._clock.epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        progress, run = EpochProgress(), self._run
        run.progress = None
        iterator = EpochIterator(
            run_epoch(progress, self._begin, lambda: run.policy, self._settings.prefetch, run.pause, run.handover)
        )
        iterator.length = self.__len__
        progress.iterator = weakref.ref(iterator)
        return iterator

    def _begin(self, progress: EpochProgress) -> Begun:
        """Start an epoch at its first batch; return what makes its batches."""
        settings, run, clock, reader = self._effective_settings(), self._run, self._clock, self._reader
        if reader.use(settings):
            run.policy = _new_policy(settings, self.store)
        shards = self._shards(settings)
        warn_about_ranks(shards, run.world_size, "batches" if settings.by_length else "rows")
        driven = [epoch for one in run.samplers if (epoch := one.driven_epoch()) is not None]
        was_set = clock.was_set
        if driven and not was_set:
            clock.set_epoch(driven[0])
        progress.epoch, progress.begin = clock.start(shards.world_size)
        progress.position = progress.begin
        for one in run.samplers:
            one.set_epoch(progress.epoch, was_set=was_set)
        if not settings.has_own_order and wraps_own_sampler(settings.batch_sampler or settings.sampler):
            clock.lend()
        epoch, seed = progress.epoch, clock.resolve_seed(shards.world_size)
        if (cuts := self._rows.cuts) is not None:
            if not settings.has_own_order:
                check_sharded(settings.batch_sampler or settings.sampler)
            cuts.begin(epoch, position.rows_before(progress.begin), shards.world_size)
        plan = reader.prepare_epoch(epoch, seed, shards, progress.begin, self._order_name())
        plan.threads.allow_those_of_torch()
        run.progress, run.world_size = progress, shards.world_size
        samplers, what = run.samplers, (seed, shards, settings, progress.begin is None)
        early = run.handover.take((epoch, *what, _state_of(settings.transform)))
        run.gathered_before = plan.maker.gather.bytes if early is None else early.coming.gathered_before

        def start(at: Position | None) -> Iterator[Any]:
            yield from reader.groups(epoch, seed, shards, at)
            for one in samplers:
                one.note()

        after = None if samplers else partial(_next_epoch, reader, seed, shards, settings)
        return Begun(start, (lambda: None) if after is None else partial(after, epoch + 1), early)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass start this epoch, at its beginning, or at a position that was loaded for this epoch.

        Raises LoaderError for a negative number.
        """
        self._clock.set_epoch(epoch)
        self._run.progress = None

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which the loader's threads do nothing: no call to the device, no reading.

        Capture a CUDA graph in it, if the loader has a device and its loop runs. It waits until the batch that is being
        made is done. Within the block ``next`` gives batches that are ready; without one it raises LoaderError.

        Example::

            with loader.paused(), torch.cuda.graph(graph):
                loss = step(static_batch)
        """
        return self._run.pause.paused()

    # --- resume and edit

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the newest iterator, after the last batch that ``next`` returned. Ints and strings.

        It is the same on every rank, and good for any number of ranks: it counts the rows that all of them have read.
        After the end of an epoch it is the beginning of the next. It holds the seed.
        """
        if self._clock.generator is not None:
            self._clock.resolve_seed(1)  # so that a state before the first batch has the order of that loader
        epoch, reached = self._position()
        cuts = self._rows.cuts
        pieces = {} if cuts is None else {"pieces": cuts.state(epoch, position.rows_before(reached))}
        return state.to_dict(epoch, reached, self._clock.seed, {**self._identity(), **pieces})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass continue where this state was taken, with its seed; ``len`` stays that of a whole epoch.

        An empty state changes nothing. Raises LoaderError for the state of another store, view, order or length, or of
        another seed than this loader was given, and says which differs.
        """
        if state_dict == {}:
            return
        settings = self._effective_settings()
        state_dict = self._of_finished_store(state_dict)
        identity = self._identity() if self.seed is None else {**self._identity(), "seed": self.seed}
        last_row = self._shards(settings).rows if settings.has_own_order else None
        epoch, found = state.from_dict(state_dict, identity, last_row)
        if self._rows.cuts is not None:
            self._rows.cuts.load(epoch, state_dict.get("pieces", "") if position.rows_before(found) else "")
        if self.seed is None:
            self._clock.seed = state_dict["seed"] if isinstance(state_dict["seed"], int) else None
        self._clock.load(epoch, found, at_end=last_row is not None and position.rows_before(found) >= last_row)
        self._run.progress = None

    def _of_finished_store(self, state_dict: Any) -> Any:
        """Return a state that was saved while this store was filled as one of the finished store."""
        if not isinstance(state_dict, dict) or state_dict.get("store") != self.store.source_digest:
            return state_dict
        if self.store.skipped and self.store.has_all_rows and state_dict.get("rows") != len(self.store):
            epoch = state_dict.get("epoch")
            raise LoaderError(
                f"found a state of epoch {epoch} that was saved while the store was filled, with "
                f"{state_dict.get('rows')} rows; the finished store has {len(self.store)}, without the "
                f"{len(self.store.skipped)} for which the dataset raised, and so another order; expected a state of "
                f"it: begin an epoch anew with loader.set_epoch({epoch})"
            )
        return {**state_dict, "store": self.store.digest}

    def skip(self, n_batches: int) -> None:
        """Leave out the next batches of the epoch, for instance those of a loss spike.

        The running iterator continues after them; without one, they are left out at the beginning of the next epoch. On
        several ranks call it on each. Raises LoaderError if the epoch has fewer batches left.
        """
        self._move(as_int("n_batches", n_batches, 0))

    def rewind(self, n_batches: int) -> None:
        """Go back, so that the newest batches come again. Raises LoaderError beyond the beginning of the epoch."""
        self._move(-as_int("n_batches", n_batches, 0))

    def _identity(self) -> dict[str, Any]:
        """Return the settings that a saved state must share with the loader that restores it."""
        return {"store": self.store.digest, "rows": len(self.store), "order": self._order_name()}

    def _position(self) -> tuple[int, Position | None]:
        progress = self._run.progress
        if progress is None:
            return self._clock.next
        return (progress.epoch + 1, None) if progress.finished else (progress.epoch, progress.position)

    def _move(self, batches: int) -> None:
        progress = self._run.progress
        if progress is not None and not progress.finished and not progress.is_running:
            raise LoaderError(
                f"found no running iterator: that of epoch {progress.epoch} is gone; expected skip and rewind within "
                "its loop; to continue that epoch, call load_state_dict(loader.state_dict()) and iterate again"
            )
        epoch, current = self._position()
        begin = 0 if progress is None or progress.finished or not isinstance(progress.begin, int) else progress.begin
        settings = self._effective_settings()
        moved = position.moved(
            epoch,
            current,
            begin,
            batches,
            shards=self._shards(settings) if settings.has_own_order else None,
            stride=1 if settings.batch_sampler is not None else settings.rows_a_batch,
        )
        if progress is None or progress.finished:
            self._clock.move(moved)
        else:
            progress.position, progress.moved = moved, True

    def __reduce__(self) -> tuple[Any, ...]:
        # small: where the store is and how it is read; the other process opens it itself, at the same position
        self.store.__reduce__()  # raises for columns in memory, which a pickle would copy
        settings = self._settings
        options = {name: getattr(self, name) for name in READ_ONLY} | {"drop_last": settings.last == "drop"}
        options |= {"sampler": settings.sampler, "batch_sampler": settings.batch_sampler}
        options["batch_size"] = 1 if settings.batch_sampler is not None else settings.batch_size
        options["collate_fn"] = settings.collate_fn
        return _remake, (type(self), self.store, options, self.state_dict())


def _remake(cls: type[Loader[Any]], dataset: Any, options: dict[str, Any], state_dict: dict[str, Any]) -> Loader[Any]:
    loader = cls(dataset, **options)
    loader.load_state_dict(state_dict)
    return loader


def _row_order(
    store: Store, sizes: Sequence[int], shuffle: Any, weights: Any, block_rows: int | None, user_sampler: Any
) -> RowOrder:
    fixed = (column.field.row_bytes for column in store.columns if column.field.kind == "fixed")
    # rows that are fetched together are a block, also once all of them are there: a saved state names the order
    default = store.chunk_rows or default_block_rows(sum(fixed))
    size = default if block_rows is None else as_int("block_rows", block_rows, 1)
    spread = mixed_rows(shuffle or False, len(store), size, store.chunk_rows)
    again = 0 if store.supply is None else store.supply.bytes_again(spread)
    if again:
        advice = 'shuffle="blocks", or a larger size=' if shuffle is True else "a larger size="
        say_once(
            f"memfeed: the cache {store.path} has no room for the rows that this order mixes: rows are fetched again "
            f"one by one, {format_bytes(again)} in each epoch; expected {advice}"
        )
    # beside a sampler that draws from one of ours, the weights are in it already
    counts = None if weights is None or user_sampler is not None else shares(weights, len(sizes), sum(sizes))
    return RowOrder(sizes, counts, shuffle or False, size)


def _new_policy(settings: Settings, store: Store) -> PrefetchPolicy:
    on_gpu = settings.device is not None and settings.device.type == "cuda"
    # without workers the dataset is read where batches are made: in the caller's thread, as a user's code must be
    reads_here = store.supply is not None and store.supply.in_caller
    allowed = settings.prefetch > 0 and settings.has_own_order and not reads_here
    return PrefetchPolicy(allowed=allowed, always=on_gpu)


def _user_collate(collate_fn: Any) -> Any:
    """Return the user's collate_fn; None for ours, and for one that gives the gathered batch anyway."""
    if collate_fn is None or isinstance(collate_fn, LoaderCollate):
        return None
    if not isinstance(collate_fn, Collate):
        say_once("memfeed: a collate_fn makes a batch from a list of samples, which is slow; a transform takes batches")
    return collate_fn


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
