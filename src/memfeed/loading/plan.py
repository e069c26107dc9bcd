"""How a loader reads: where the columns are, and how its batches are made from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import default_convert

from memfeed.loading.batch_forms import (
    CollateSamples,
    OneRow,
    collate_finished,
    collate_stored,
    converter,
    giving_samples,
    masked_assembler,
)
from memfeed.loading.bind import Bound, bind, is_keyed
from memfeed.loading.gather_tasks import BatchMaker
from memfeed.loading.host_labels import host_labels
from memfeed.loading.placement import RESIDENT, ColumnPlacement, DeviceDecoder, FreeMemory, Placement, choose, place
from memfeed.loading.readahead import ReadAhead
from memfeed.loading.settings import Settings
from memfeed.loading.stages import UserStages, build_stages, holds
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Node
from memfeed.store.coded_columns import CodedColumn
from memfeed.store.columns import Column
from memfeed.store.gather import MOST_AT_ONCE, Gather
from memfeed.store.store import Store
from memfeed.system.buffers import Pool
from memfeed.system.share import Threads
from memfeed.transfer.streams import Streams
from memfeed.transfer.transfer import StreamTransfer, Transfer

TASK_BYTES, TASK_BATCHES = 16 << 20, 32
# to start a copy takes some 50 microseconds of Python, in which a GPU moves this much over the bus, or in its own
# memory; batches that came together keep each other's memory
COPY_BYTES, PICK_BYTES = 16 << 20, 256 << 20
LAG = 3  # batches in use: one by the caller, one that the device works on, one between them
LENGTH_BYTES = 8  # a row of the lengths beside a padded field
PICK_SHARE = 64  # the part of a small device's memory that one group of batches may take
VIEWED_BYTES = 16 << 10  # of an image: smaller ones are copied together faster than a transform visits each
# kind and rank of columns that may hold images, masks or volumes of several sizes
IMAGE_COLUMNS = {("list", 2), ("list", 3), ("list", 4), ("jagged", 3), ("jagged", 4)}


@dataclass(frozen=True)
class LoadPlan:
    """How a loader reads. It is made when the first epoch begins, and again after memory ran out.

    Args:
        placement: where the columns are.
        reader: announces rows of their files.
        maker: gather tasks to batches.
        batches_a_task: how many batches are planned at once.
        threads: that gather and transform.
    """

    placement: Placement
    reader: ReadAhead
    maker: BatchMaker
    batches_a_task: int
    threads: Threads


def choose_placements(
    store: Store, settings: Settings, streams: Streams | None, rows: Int64Array | None = None
) -> list[ColumnPlacement]:
    """Return where the columns of a store go, for ``rows`` of its base store; None stands for all that it has.

    Raises LoaderError where a requested placement does not fit.
    """
    if store._view.supply is not None:
        return [ColumnPlacement("mapped", "the store is being filled")] * len(store._view.columns)
    requests = settings.placement_requests
    has_places = streams is not None or not {*requests} <= {"auto", "mapped"}
    if rows is None and has_places:
        rows = _rows_read(store)
    free = FreeMemory.now(streams) if has_places else FreeMemory(None, 0, 0)
    sizes = [column.placed_bytes(rows) for column in store._view.columns]
    placements = choose([field.name for field in store.schema], sizes, requests, free)
    pairs = zip(store._view.columns, placements, strict=True)
    return [one._replace(why=column.why_mapped) if column.why_mapped else one for column, one in pairs]


def make_plan(
    store: Store,
    settings: Settings,
    placements: Sequence[ColumnPlacement],
    streams: Streams | None,
    rows: Int64Array | None = None,
) -> LoadPlan:
    """Load the columns that are to be placed, ``rows`` of them (None: all), and plan how batches are made."""
    if any(one.where in RESIDENT for one in placements):
        placement = place(store._view.columns, placements, _rows_read(store) if rows is None else rows, streams)
    else:
        placement = Placement(placements, store._view.columns, {}, {})
    transfer = Transfer(settings.device) if streams is None else StreamTransfer(streams, placement.tables)
    decoders = {
        index: DeviceDecoder(column, streams.device)
        for index, (column, one) in enumerate(zip(placement.columns, placement.placements, strict=True))
        if streams is not None and one.where == "nvjpeg" and isinstance(column, CodedColumn)
    }
    on_device = {*placement.tables, *decoders}
    pad = {one.field_index: one.value for one in settings.padded}
    row_bytes = [
        0 if index in on_device else column.field.row_bytes if column.field.kind == "fixed" else None
        for index, column in enumerate(placement.columns)
    ]
    allocators = transfer.allocators(len(row_bytes) + len(pad), [*row_bytes, *[LENGTH_BYTES] * len(pad)])
    keeps_rows = store._view.supply is None or store._view.supply.keeps_rows
    may_view = streams is None and keeps_rows
    is_on_cpu = settings.device is None or settings.device.type == "cpu"
    views = _columns_as_views(placement.columns, settings, store.schema.structure) if may_view else ()
    threads = Threads()
    gather = Gather(placement.columns, allocators, on_device, pad, views, threads)
    is_filling = store._view.supply is not None  # then no batch waits for the rows of the next ones
    at_once, size = 1, settings.rows_a_batch
    if not (settings.by_length or is_filling or decoders):
        at_once = gather.batches_at_once(size) if streams is None else _batches_a_copy(gather, placement, size, streams)
    # the rows of several batches are planned together, also where each batch has a gather of its own
    planned = TASK_BYTES // max(gather.row_bytes * size, 1)
    assemble = _assembler(store, settings)
    stages = build_stages(
        assemble, _user_stages(store, settings, threads, bool(views)), transfer, store.schema.structure
    )
    return LoadPlan(
        placement=placement,
        reader=_reader(store, placement),
        maker=BatchMaker(
            gather,
            at_once,
            stages,
            assemble,
            transfer,
            placement,
            transfer.lag(settings.prefetch + LAG),
            labels=None if is_on_cpu else host_labels(settings.transform, store.schema, placement),
            decoders=decoders,
        ),
        batches_a_task=at_once if at_once > 1 or is_filling else max(1, min(TASK_BATCHES, planned)),
        threads=threads,
    )


def with_columns(plan: LoadPlan, store: Store, columns: Sequence[Column]) -> LoadPlan:
    """Return the same plan for other columns, of which only computed ones may differ."""
    placement = replace(plan.placement, columns=columns)
    maker = replace(plan.maker, gather=plan.maker.gather.with_columns(columns), placement=placement)
    return replace(plan, placement=placement, reader=_reader(store, placement, plan.reader.warm_at), maker=maker)


def _reader(store: Store, placement: Placement, warm_at: float = -math.inf) -> ReadAhead:
    pairs = zip(placement.columns, placement.placements, strict=True)
    mapped = [column for column, one in pairs if one.where not in RESIDENT]
    return ReadAhead(mapped, order_covers=2 * len(store) >= store._view.base_length, warm_at=warm_at)


def _columns_as_views(columns: Sequence[Column], settings: Settings, structure: Node) -> list[int]:
    """Return the columns of images whose rows a transform of ours reads straight from the map.

    A crop then reads its own pixels only. Columns that the transform does not replace are copied after it.
    """
    transform = settings.transform
    on_cpu = settings.device is None or settings.device.type == "cpu" or settings.finishes_samples
    if not is_keyed(transform) or not transform.takes_views:
        return []
    takes_batches = settings.finishes_samples or not (settings.collates_samples or settings.gives_samples)
    if not takes_batches or not on_cpu or holds(structure, "tensordict", "tensorclass", "graph", "tensor"):
        return []
    return [index for index, column in enumerate(columns) if _may_hold_images(column)]


def _may_hold_images(column: Column) -> bool:
    field = column.field
    if not column.gives_views:
        return False
    if field.kind == "fixed":
        is_image = len(field.shape) == 3 and field.form == "tensor" and 1 <= field.row_shape[0] <= 4
        return is_image and field.row_bytes >= VIEWED_BYTES
    return (field.kind, len(field.shape)) in IMAGE_COLUMNS and not field.optional


def _rows_read(store: Store) -> Int64Array:
    """Return the rows of the base store that a loader of this store reads, ascending."""
    rows = store._view.base_rows(np.arange(len(store)))
    return rows if store._view.has_all_rows else np.unique(rows)


def _user_stages(store: Store, settings: Settings, threads: Threads, views: bool) -> UserStages:
    is_finishing = settings.finishes_samples and not settings.takes_lists
    transform = giving_samples(settings.transform) if is_finishing else settings.transform
    keyed = transform if is_keyed(transform) else None
    bound = bind(transform, store.schema, Pool(), store._view.window_paths, views)
    bound = _one_row(store, settings).after(bound)
    return UserStages(
        transform=bound if bound is None or keyed is None else _with_threads(bound, threads),
        is_keyed=keyed is not None,
        runs_anywhere=keyed is not None and keyed.runs_anywhere,
        pads=settings.last == "pad" or store._backing.masks_rows,
        returns_rows=settings.returns_rows,
        collate=_collate(store, settings),
        finishes_samples=settings.finishes_samples,
        canvases=store._view.sample_maker.canvases if settings.finishes_samples else None,
        convert=converter(settings.as_),
    )


def _with_threads(keyed: Bound, threads: Threads) -> Bound:
    """Return a transform that shares its work among ``threads``."""

    def transform(batch: Any, keys: Any) -> Any:
        with threads.in_use():
            return keyed(batch, keys)

    return transform


def _collate(store: Store, settings: Settings) -> CollateSamples | None:
    """Return the function that gives the samples of a batch to the user's collate_fn; None where batches stay whole."""
    if not settings.collates_samples:
        return None
    collate_fn = settings.collate_fn or default_convert
    if settings.takes_lists:  # the batch is what the dataset gives for a list of rows
        if settings.has_own_transform:
            return lambda batch, _: collate_fn(batch)
        return lambda leaves, _: collate_fn(store._view.assemble_batch(leaves))
    if settings.has_own_transform:
        return collate_finished(collate_fn, settings.transform, store, single=settings.gives_samples)
    return collate_stored(collate_fn, store, single=settings.gives_samples)


def _assembler(store: Store, settings: Settings) -> Callable[[Sequence[Any]], Any]:
    """Return the function that puts leaves together, as a batch, or as the one sample of ``batch_size=None``."""
    if settings.gives_samples and not settings.has_own_transform:
        return lambda leaves: default_convert(next(store._view.sample_maker.samples_of_leaves(leaves)))  # type: ignore[no-untyped-call]
    assemble: Callable[[Sequence[Any]], Any] = store._view.assemble_batch
    if settings.padded:
        assemble = masked_assembler(store.schema.structure, store._view.types, settings.padded)
    return _one_row(store, settings).before(assemble)


def _one_row(store: Store, settings: Settings) -> OneRow:
    """Return the change that makes batches of one row plain. Batches drawn by length are always nested."""
    is_wanted = not (settings.by_length or settings.collates_samples or settings.takes_lists)
    return OneRow(store.schema, settings.transform, is_wanted)


def _batches_a_copy(gather: Gather, placement: Placement, batch_size: int, streams: Streams) -> int:
    """Return how many batches cross in one copy, or are picked at once where all columns are on the device."""
    if gather.has_ragged:
        return 1
    on_device = all(one.where == "device" for one in placement.placements)
    most = min(PICK_BYTES, streams.memory_info()[1] // PICK_SHARE) if on_device else COPY_BYTES
    return max(1, min(MOST_AT_ONCE, most // max(gather.row_bytes * batch_size, 1)))
