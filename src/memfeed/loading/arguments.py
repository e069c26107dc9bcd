"""From the arguments of a loader to what it reads, in which order, and with which settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memfeed.errors import LoaderError, listed
from memfeed.loading.batch_order import BatchOrder, batch_order
from memfeed.loading.bind import bind, transform_of
from memfeed.loading.clock import EpochClock
from memfeed.loading.collate import LoaderCollate, user_collate
from memfeed.loading.drawn_seed import LoaderName, next_name
from memfeed.loading.index_samplers import Cuts, RowOrder
from memfeed.loading.padding import padded_fields
from memfeed.loading.placement import PlacementRequest, placement_requests
from memfeed.loading.settings import (
    LARGEST_BLOCK,
    MOST_WORKERS,
    WITHOUT_EFFECT,
    Settings,
    as_int,
    check_arguments,
    check_filling,
    check_names,
    check_padding,
    check_ranks,
    check_sharded,
    check_without_effect,
    row_and_list_samplers,
)
from memfeed.loading.sources import (
    CACHING,
    JoinedStore,
    as_stores,
    beside_cache,
    check_keep,
    filled_store,
    is_dataset,
    joined,
    own_device,
)
from memfeed.order.choice import Blocks, default_block_rows, mixed_rows
from memfeed.order.mixture import shares
from memfeed.order.shards import LastRows
from memfeed.store.store import Store
from memfeed.system.messages import say_once
from memfeed.system.units import format_bytes
from memfeed.transfer.devices import check_device

PREFETCH = 2  # batches


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


def resolve(given: Mapping[str, Any]) -> Reading:
    """Return what a loader reads with the arguments ``given``, by name.

    Raises LoaderError for arguments that do not fit together, see `Loader`.
    """
    dataset = _source(given)
    store = joined(dataset)
    weights = store.weights if isinstance(store, JoinedStore) else None
    batch_size = _batch_size(given)
    checked = ("shuffle", "drop_last", "last", "sampler", "batch_sampler", "as_", "bucket_by")
    check_arguments(batch_size=batch_size, weights=weights, **{name: given[name] for name in checked})
    last: LastRows = "drop" if given["drop_last"] else given["last"] or "repeat"
    user_sampler = given["sampler"] if given["batch_sampler"] is None else given["batch_sampler"]
    rank, world_size = check_ranks(given["ranks"], user_sampler)
    stores = as_stores(store)
    check_filling(stores, by_length=given["bucket_by"] is not None)
    masks_rows = last == "pad" or store._backing.masks_rows
    check_names(store.schema.structure, masks_rows=masks_rows, return_rows=given["return_rows"])
    transform = transform_of(given["transform"], store)
    bind(transform, store.schema)  # raises for what is no transform
    rows = _row_order(store, [len(one) for one in stores], given["shuffle"], weights, user_sampler)
    clock, name, is_rebuilt = _clock_and_name(given, len(store), batch_size, rows, rank, world_size)
    by_length = user_sampler is None and given["bucket_by"] is not None
    device = check_device(own_device(dataset) if given["device"] is None else given["device"])
    requests = _placements(given["placement"], store, device, rows, batch_size, user_sampler, by_length)
    batches = None
    if by_length:
        batches = batch_order(store, rows, batch_size, given["bucket_by"], drop_last=last == "drop")
    sampler, batch_sampler = row_and_list_samplers(batch_size, given["sampler"], given["batch_sampler"])
    prefetch = given["prefetch_factor"]
    settings = Settings(
        batch_size=batch_size,
        last=last,
        sampler=sampler,
        batch_sampler=batch_sampler,
        has_repeats=rows.counts is not None,
        device=device,
        transform=transform,
        has_own_transform=given["transform"] is None and transform is not None,
        placement_requests=requests,
        prefetch=PREFETCH if prefetch is None else as_int("prefetch_factor", prefetch, 0),
        collate_fn=user_collate(given["collate_fn"]),
        returns_rows=given["return_rows"],
        as_=given["as_"],
        rank=rank,
        world_size=world_size,
        padded=padded_fields(given["pad"], store.schema),
        by_length=by_length,
    )
    check_padding(settings)
    return Reading(store, settings, rows, batches, clock, is_rebuilt, name)


def _source(given: Mapping[str, Any]) -> Any:
    """Return what is read: the dataset as it was given, or the store that it becomes."""
    dataset, path, workers = given["dataset"], given["cache"], given["num_workers"]
    is_cached = is_dataset(dataset)
    check_without_effect({name: given[name] for name in WITHOUT_EFFECT}, CACHING if is_cached else ())
    if is_cached:
        count = as_int("num_workers", workers, 0, MOST_WORKERS)
        store = filled_store(
            dataset, path, count, given["worker_init_fn"], given["multiprocessing_context"], given["keep"]
        )
        _require_no_other_transform(given["transform"], store)
        return store
    check_keep(dataset, given["keep"])
    return dataset if path is None else beside_cache(dataset, path, workers, given["worker_init_fn"])


def _require_no_other_transform(transform: Any, store: Store) -> None:
    """Raise LoaderError for a transform that would replace the random part of a dataset; {} is meant to."""
    steps = listed([step.shown or step.name for step in store._view.recipe], 100)
    if steps and transform is not None and not (isinstance(transform, Mapping) and not transform):
        raise LoaderError(
            f"found transform= beside a dataset whose random part is cut off ({steps}), which it would replace; "
            'expected both in one: store = memfeed.cache(dataset, path, split="auto", lazily=True), then Loader(store, '
            "transform=memfeed.transforms.Compose([store.transform, yours])); or transform={} for none"
        )


def _batch_size(given: Mapping[str, Any]) -> int | None:
    if given["batch_size"] is not None:
        return as_int("batch_size", given["batch_size"], 1)
    return None if given["batch_sampler"] is None else 1


def _clock_and_name(
    given: Mapping[str, Any],
    row_count: int,
    batch_size: int | None,
    rows: RowOrder,
    rank: int | None,
    world_size: int | None,
) -> tuple[EpochClock, LoaderName, bool]:
    """Return the clock, the name on all ranks, and whether a trainer makes this loader of the parts of another one.

    Such a trainer hands on the collate_fn of that one: then it is the same loader, with the same clock.
    """
    seed, collate = given["seed"], given["collate_fn"]
    read_as = f"batch_size={batch_size}, shuffle={rows.shuffle!r}"
    is_rebuilt = isinstance(collate, LoaderCollate)
    if is_rebuilt:
        clock = collate.clock
    elif seed is not None:
        clock = EpochClock(as_int("seed", seed), given["generator"], None)
    else:
        ranks = "" if world_size is None else f", world_size={world_size}"
        clock = EpochClock(None, given["generator"], next_name(f"{row_count:,} rows, {read_as}{ranks}", rank))
    return clock, next_name(read_as, rank), is_rebuilt


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
    requests = placement_requests(placement, store.schema, device)
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
    # at an address they stay mapped: on each rank alike, also where all of its cache is there
    return ["mapped"] * len(requests) if is_at_address else requests


def _row_order(store: Store, sizes: Sequence[int], shuffle: Any, weights: Any, user_sampler: Any) -> RowOrder:
    fixed = (column.field.row_bytes for column in store._view.columns if column.field.kind == "fixed")
    # rows that are fetched together are a block, also once all of them are there: a saved state names the order
    default = store._backing.chunk_rows or default_block_rows(sum(fixed))
    given = shuffle.rows if isinstance(shuffle, Blocks) else None
    size = default if given is None else as_int("Blocks.rows", given, 1, LARGEST_BLOCK)
    shuffle_span = mixed_rows(shuffle or False, len(store), size, store._backing.chunk_rows)
    again = 0 if store._view.supply is None else store._view.supply.refetched_bytes(shuffle_span)
    if again:
        advice = "shuffle=memfeed.Blocks(), or a larger size=" if shuffle is True else "a larger size="
        say_once(
            f"memfeed: the cache {store.path} has no room for the rows that this order mixes: rows are fetched again "
            f"one by one, {format_bytes(again)} in each epoch; expected {advice}"
        )
    # beside a sampler that draws from one of ours, the weights are in it already
    counts = None if weights is None or user_sampler is not None else shares(weights, sum(sizes))
    return RowOrder(sizes, counts, shuffle if isinstance(shuffle, Blocks) else bool(shuffle), size)
