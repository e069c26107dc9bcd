"""From the arguments of a loader to what it reads, in which order, and with which settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from memfeed.errors import LoaderError, listed
from memfeed.loading.batch_forms import as_returned, padded_fields
from memfeed.loading.bind import bind, transform_of
from memfeed.loading.collate import LoaderCollate, user_collate
from memfeed.loading.index_samplers import BatchOrder, Cuts, RowOrder, Tokens, batch_order, wraps_own_sampler
from memfeed.loading.open_source import Source
from memfeed.loading.placement import PlacementRequest, placement_requests
from memfeed.loading.position import EpochClock
from memfeed.loading.ranks import LoaderName, next_name
from memfeed.loading.settings import (
    LARGEST,
    Arguments,
    ArrayKind,
    Settings,
    as_int,
    check_settings,
    check_sharded,
    row_and_list_samplers,
)
from memfeed.loading.sources import JoinedStore, as_stores
from memfeed.loading.stages import holds
from memfeed.order.choice import Blocks, default_block_rows, mixed_rows, shares
from memfeed.order.pieces import LastRows
from memfeed.schema.fields import Node
from memfeed.schema.graphs import graph_collater
from memfeed.store.store import Store
from memfeed.system.messages import say_once
from memfeed.transfer.to_device import check_device

PREFETCH = 2  # batches
LARGEST_BLOCK = 1 << 24  # its order is in memory
WITHOUT_EFFECT: dict[str, Any] = {
    "num_workers": 0,
    "pin_memory": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "persistent_workers": False,
    "pin_memory_device": "",
    "in_order": True,
}
"""DataLoader's arguments that change nothing here, with their defaults."""
CACHING = ("num_workers", "worker_init_fn", "persistent_workers", "prefetch_factor", "multiprocessing_context")
"""Those that mean something, or nothing worth a line, where a loader fills a store."""


@dataclass(frozen=True, eq=False)
class Reading:
    """The rows, the order and the settings of a loader.

    Args:
        store: all its rows.
        settings: the arguments, checked.
        rows: the order of the rows.
        batches: the batches of rows of like length; None for batches of a fixed number of rows.
        clock: the epochs and the seed; that of another loader, if this one is made of its parts.
        is_rebuilt: it is made of the parts of another one.
        name: identifies the loader on all ranks.
    """

    store: Store
    settings: Settings
    rows: RowOrder
    batches: BatchOrder | None
    clock: EpochClock
    is_rebuilt: bool
    name: LoaderName


def resolve(source: Source, given: Arguments) -> Reading:
    """Return the `Reading` of a loader of ``source`` with these arguments.

    Raises LoaderError for arguments that do not fit together, see `Loader`.
    """
    store = source.store
    check_without_effect(given, source.is_filled)
    if source.is_filled:
        _require_no_other_transform(given.transform, store)
    weights = store.weights if isinstance(store, JoinedStore) else None
    batch_size = None if given.batch_sampler is None else 1
    if given.batch_size is not None:
        batch_size = as_int("batch_size", given.batch_size, 1)
    check_arguments(given, batch_size, weights)
    last: LastRows = "drop" if given.drop_last else given.last or "repeat"
    user_sampler = given.user_sampler
    rank, world_size = check_ranks(given.ranks, user_sampler)
    stores = as_stores(store)
    check_filling(stores, by_length=given.bucket_by is not None)
    masks_rows = last == "pad" or store._backing.masks_rows
    check_names(store.schema.structure, masks_rows=masks_rows, return_rows=given.return_rows)
    transform = transform_of(given.transform, store)
    bind(transform, store.schema)  # raises for what is no transform
    rows = _row_order(store, [len(one) for one in stores], given.shuffle, weights, user_sampler)
    clock, name, is_rebuilt = _clock_and_name(given, len(store), batch_size, rows, rank, world_size)
    by_length = user_sampler is None and given.bucket_by is not None
    device = check_device(source.device if given.device is None else given.device)
    requests = _placements(given.placement, store, device, rows, batch_size, user_sampler, by_length)
    if not wraps_own_sampler(user_sampler):
        clock.has_drawn_order = bool(rows.shuffle) or rows.counts is not None or rows.cuts is not None
    batches = None
    if by_length:
        batches = batch_order(store, rows, batch_size, given.bucket_by, drop_last=last == "drop")
    sampler, batch_sampler = row_and_list_samplers(batch_size, given.sampler, given.batch_sampler)
    prefetch = given.prefetch_factor
    settings = Settings(
        batch_size=batch_size,
        last=last,
        sampler=sampler,
        batch_sampler=batch_sampler,
        has_repeats=rows.counts is not None or store._view.has_repeated_rows,
        device=device,
        transform=transform,
        has_own_transform=given.transform is None and transform is not None,
        placement_requests=requests,
        prefetch=PREFETCH if prefetch is None else as_int("prefetch_factor", prefetch, 0),
        collate_fn=_collate(given, store),
        returns_rows=given.return_rows,
        as_=given.as_,
        rank=rank,
        world_size=world_size,
        padded=padded_fields(given.pad, store.schema),
        by_length=by_length,
        is_of_dataset=source.is_filled,
        has_workers=given.num_workers > 0,
    )
    check_settings(settings)
    return Reading(store, settings, rows, batches, clock, is_rebuilt, name)


def check_arguments(given: Arguments, batch_size: int | None, weights: Any) -> None:
    """Raise LoaderError for arguments that do not fit together; ``weights`` are those of the stores."""
    shuffle, drop_last, last, bucket_by = given.shuffle, given.drop_last, given.last, given.bucket_by
    sampler, batch_sampler = given.sampler, given.batch_sampler
    if drop_last not in (False, True):
        raise LoaderError(f"found drop_last={drop_last!r}; expected True or False")
    if last not in (None, *get_args(LastRows)):
        raise LoaderError(f'found last={last!r}; expected "repeat", "pad", "uneven" or "drop"')
    if drop_last and last not in (None, "drop"):
        raise LoaderError(f"found drop_last=True and last={last!r}; expected one of them")
    if not isinstance(shuffle, Blocks) and shuffle not in (None, False, True):
        raise LoaderError(f"found shuffle={shuffle!r}; expected False, True or memfeed.Blocks()")
    if batch_size is not None and batch_size > LARGEST:
        raise LoaderError(
            f"found batch_size={batch_size}; expected at most {LARGEST:,}: for all rows use batch_size=len(store)"
        )
    # who makes a loader of the attributes of another one hands on shuffle, beside a sampler that has that order
    shuffles = bool(shuffle) and not wraps_own_sampler(batch_sampler)
    # a trainer that puts a batch sampler in drops the last rows there, and hands on last="drop"
    batch_size_alone = batch_size in (1, None) and not shuffles and not drop_last and last != "pad"
    if batch_sampler is not None and not (batch_size_alone and sampler is None):
        raise LoaderError(
            "found a batch_sampler; expected no batch_size, shuffle, sampler, drop_last or last= beside it"
        )
    if batch_size is None and (drop_last or last in ("drop", "pad")) and batch_sampler is None:
        raise LoaderError("found batch_size=None, which gives single samples; expected no drop_last or last= with it")
    user_sampler = given.user_sampler
    if sampler is not None and shuffle:
        raise LoaderError("found a sampler and shuffle=True; a sampler has its own order: leave one of them out")
    if user_sampler is not None and weights is not None and not wraps_own_sampler(user_sampler):
        raise LoaderError("found a sampler and weights; a sampler has its own order: leave one of them out")
    if bucket_by is not None and user_sampler is not None and not wraps_own_sampler(user_sampler):
        raise LoaderError(
            f"found a sampler ({type(user_sampler).__name__}) and bucket_by; expected batches in the loader's own "
            "order: leave the sampler out (Lightning and Fabric: use_distributed_sampler=False)"
        )
    if bucket_by is not None and batch_size is None:
        raise LoaderError(
            f"found bucket_by={bucket_by!r} and batch_size=None, which gives single samples; expected batches: pass "
            "batch_size=, or bucket_by=memfeed.Tokens(4096)"
        )
    if isinstance(bucket_by, Tokens):
        as_int("Tokens.per_batch", bucket_by.per_batch, 1)
    if isinstance(bucket_by, Tokens) and user_sampler is None:
        if batch_size != 1:
            raise LoaderError(
                f"found batch_size={batch_size} and bucket_by={bucket_by}; expected one of them: leave batch_size out"
            )
        if weights is not None:
            raise LoaderError(
                f"found bucket_by={bucket_by} and weights, whose epochs have other tokens each time, and so other "
                "numbers of batches; expected the name of a field as bucket_by, and batch_size=, beside weights"
            )
    if given.as_ not in get_args(ArrayKind):
        raise LoaderError(f'found as_={given.as_!r}; expected "torch", "numpy" or "jax"')


def check_without_effect(given: Arguments, is_filled: bool) -> None:
    """Check DataLoader's arguments that change nothing here, and name those that were given, once.

    Some of them have an effect if the loader fills a store. Raises LoaderError, a ValueError, where DataLoader does.
    """
    if given.num_workers < 0 or given.timeout < 0:
        raise LoaderError(
            f"found num_workers={given.num_workers} and timeout={given.timeout}; expected none below 0: each option "
            "should be non-negative"
        )
    if not given.num_workers and given.persistent_workers:
        raise LoaderError(
            "found persistent_workers without num_workers; expected num_workers above 0 beside it (here neither "
            "changes anything: leave them out)"
        )
    used = CACHING if is_filled else ()
    named = [name for name, default in WITHOUT_EFFECT.items() if getattr(given, name) != default and name not in used]
    if named:
        reads = "the rows of its store" if is_filled else "worker processes"
        needs = "reads" if is_filled else "needs no"
        say_once(
            f"memfeed: Loader {needs} {reads}; without effect: {', '.join(named)} (it reads in this process, "
            "and device= moves batches)"
        )


def check_filling(stores: Sequence[Store], *, by_length: bool) -> None:
    """Raise LoaderError for what needs all rows of a store that is being filled."""
    filling = [store for store in stores if store._view.supply is not None]
    if filling and (by_length or len(stores) > 1):
        what = "bucket_by, which needs the length of every row" if by_length else "a list of stores"
        raise LoaderError(
            f"found {what}, and {filling[0].path}, which is being filled; expected finished stores: call "
            "store.finish() first, or make it without lazily=True"
        )


def check_names(structure: Node, *, masks_rows: bool, return_rows: bool) -> None:
    """Raise LoaderError for a field whose name ``last="pad"`` (or a packed store) or ``return_rows`` needs."""
    if structure.kind not in ("dict", "tensordict"):
        return
    for name, option, needed in (("valid", 'last="pad"', masks_rows), ("rows", "return_rows", return_rows)):
        if needed and name in structure.keys:
            raise LoaderError(
                f'found a field "{name}" and {option}, which adds one; expected another name for the field'
            )


def check_ranks(ranks: Any, sampler: object) -> tuple[int | None, int | None]:
    """Return the rank and world size of ``ranks``, checked; both are None where the loader finds them itself."""
    if ranks is None:
        return None, None
    if sampler is not None:
        raise LoaderError("found a sampler and ranks; a sampler decides itself what its rank reads: leave ranks out")
    if not isinstance(ranks, tuple | list) or len(ranks) != 2:
        raise LoaderError(f"found ranks={ranks!r}; expected (rank, world_size), for example ranks=(0, 2)")
    size, own = as_int("ranks[1]", ranks[1], 1, LARGEST), as_int("ranks[0]", ranks[0])
    if not 0 <= own < size:
        raise LoaderError(f"found ranks=({own}, {size}); expected a rank of 0 to {size - 1} for this world size")
    return own, size


def _require_no_other_transform(transform: Any, store: Store) -> None:
    """Raise LoaderError for a transform that would replace the random part of a dataset; {} is meant to."""
    steps = listed([step.shown or step.name for step in store._view.recipe], 100)
    if steps and transform is not None and not (isinstance(transform, Mapping) and not transform):
        raise LoaderError(
            f"found transform= beside a dataset whose random part is cut off ({steps}), which it would replace; "
            'expected both in one: store = memfeed.cache(dataset, path, split="auto", lazily=True), then Loader(store, '
            "transform=memfeed.transforms.Compose([store.transform, yours])); or transform={} for none"
        )


def _collate(given: Arguments, store: Store) -> Callable[[Any], Any] | None:
    """Return the function that makes a batch of a list of samples, if the arguments ask for it.

    Raises LoaderError for options of graphs where samples have none.
    """
    follow_batch, exclude_keys = given.follow_batch, given.exclude_keys
    own: Callable[[Any], Any] | None = user_collate(given.collate_fn)
    # a loader that is made of the parts of another one gets its collate_fn, which has both in it
    if (follow_batch is None and exclude_keys is None) or isinstance(given.collate_fn, LoaderCollate):
        is_stored = own is not None and own is given.collate_fn and given.transform is None
        return as_returned(own, store, given.batch_size, given.batch_sampler) if is_stored else own
    if own is not None:
        raise LoaderError(
            "found follow_batch= or exclude_keys= beside a collate_fn, which decides about both; expected one of them: "
            "leave collate_fn out, or pass them on in it"
        )
    if len(store) and not holds(store.schema.structure, "graph"):
        raise LoaderError(
            "found follow_batch= or exclude_keys= for samples without graphs, where they do nothing; expected samples "
            "with a Data or HeteroData of PyTorch Geometric: leave them out. memfeed.open(path, select=[...]) leaves "
            "fields out"
        )
    return graph_collater(follow_batch, exclude_keys)


def _clock_and_name(
    given: Arguments,
    row_count: int,
    batch_size: int | None,
    rows: RowOrder,
    rank: int | None,
    world_size: int | None,
) -> tuple[EpochClock, LoaderName, bool]:
    """Return the clock, the name on all ranks, and whether a trainer makes this loader of the parts of another one.

    Such a trainer hands on the collate_fn of that one: then it is the same loader, with the same clock.
    """
    seed, collate = given.seed, given.collate_fn
    read_as = f"batch_size={batch_size}, shuffle={rows.shuffle!r}"
    if isinstance(collate, LoaderCollate):
        clock = collate.clock
    elif seed is not None:
        clock = EpochClock(as_int("seed", seed), given.generator, None)
    else:
        ranks = "" if world_size is None else f", world_size={world_size}"
        clock = EpochClock(None, given.generator, next_name(f"{row_count:,} rows, {read_as}{ranks}", rank))
    return clock, next_name(read_as, rank), isinstance(collate, LoaderCollate)


def _placements(
    placement: Any,
    store: Store,
    device: Any,
    rows: RowOrder,
    batch_size: int | None,
    user_sampler: Any,
    by_length: bool,
) -> Sequence[PlacementRequest]:
    """Return where columns are asked to be. With "sharded" the order is cut into pieces, one for each rank."""
    requests = placement_requests(placement, store._view.columns, store.schema, device)
    if "sharded" not in requests:
        return requests
    is_at_address = bool(store._backing.chunk_rows)
    check_sharded(
        user_sampler,
        has_weights=rows.counts is not None,
        by_length=by_length,
        is_filling=store._view.supply is not None and not is_at_address,
    )
    rows.cuts = Cuts(batch_size or 1)
    return ["mapped"] * len(requests) if is_at_address else requests  # on each rank, with a full cache or without


def _row_order(store: Store, sizes: Sequence[int], shuffle: Any, weights: Any, user_sampler: Any) -> RowOrder:
    fixed = (column.field.row_bytes for column in store._view.columns if column.field.kind == "fixed")
    # rows that are fetched together are a block, also once all of them are there: a saved state names the order
    default = store._backing.chunk_rows or default_block_rows(sum(fixed))
    given = shuffle.rows if isinstance(shuffle, Blocks) else None
    size = default if given is None else as_int("Blocks.rows", given, 1, LARGEST_BLOCK)
    if store._view.supply is not None:  # a sampler of the user may ask for any row
        own = shuffle or False if user_sampler is None else True
        store._view.supply.require_room(mixed_rows(own, len(store), size, store._backing.chunk_rows))
    # beside a sampler that draws from one of ours, the weights are in it already
    counts = None if weights is None or user_sampler is not None else shares(weights, sum(sizes))
    return RowOrder(sizes, counts, shuffle if isinstance(shuffle, Blocks) else bool(shuffle), size)
