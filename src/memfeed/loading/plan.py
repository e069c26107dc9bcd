"""How a loader reads: where the columns are, and what its batches are made with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from memfeed.loading.bind import UserTransform, bind
from memfeed.loading.pipeline import Pipeline
from memfeed.loading.placement import Asked, Placed, Placement, Room, choose, place, sizes_of
from memfeed.loading.readahead import ReadAhead
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Node
from memfeed.store.gather import MOST_AT_ONCE, Gather
from memfeed.store.store import Store
from memfeed.system.buffers import Pool
from memfeed.transfer.streams import Streams
from memfeed.transfer.transfer import StreamTransfer, SyncTransfer, Transfer
from memfeed.transforms import Transform

TASK_BYTES, TASK_BATCHES = 16 << 20, 32
# what a GPU is told to do takes some 50 microseconds of Python a time, in which it copies this much over the bus, or in
# its own memory; batches that came together keep each other's memory
CROSSING_BYTES, PICKING_BYTES = 16 << 20, 256 << 20
PICKING_SHARE = 64  # and a small device's memory is not filled with batches


def _kept(store: Store) -> Int64Array:
    """The rows that a loader of this store reads, ascending."""
    rows = store.base_rows(np.arange(len(store)))
    return rows if store.whole else np.unique(rows)


@dataclass(frozen=True)
class LoadPlan:
    """Made when a loader's first epoch begins, and anew where memory ran out.

    Args:
        placement: where the columns are.
        gather: rows to leaves, of the columns that the CPU gathers.
        reader: reads their files ahead.
        pipeline: rows to batches.
        batches_a_task: how many batches are planned at once.
    """

    placement: Placement
    gather: Gather
    reader: ReadAhead
    pipeline: Pipeline
    batches_a_task: int


def first_places(store: Store, asked: Sequence[Asked], streams: Streams | None) -> list[Placed]:
    """Where the columns of a store shall go. Raises LoaderError where what is asked for does not fit."""
    placing = streams is not None or not {*asked} <= {"auto", "mapped"}
    rows = len(store) if store.whole or not placing else len(_kept(store))
    room = Room.now(streams) if placing else Room(None, 0, 0)
    return choose([field.name for field in store.schema], sizes_of(store.columns, rows), asked, room)


def make(
    store: Store,
    placed: Sequence[Placed],
    batch_size: int,
    streams: Streams | None,
    device: torch.device | None,
    transform: UserTransform,
    seed: int,
    pads: bool,
) -> LoadPlan:
    """Loads what is to be placed, and plans the rest."""
    if any(one.where != "mapped" for one in placed):
        placement = place(store.columns, placed, _kept(store), store.whole, streams)
    else:
        placement = Placement(placed, store.columns, {}, None)
    crossing: Transfer = SyncTransfer(device) if streams is None else StreamTransfer(streams, placement.tables)
    gather = Gather(placement.columns, crossing.lenders(len(store.columns)), placement.tables)
    on_disk = [c for n, c in enumerate(placement.columns) if placement.placed[n].where == "mapped"]
    reader = ReadAhead(on_disk, order_covers=2 * len(store) >= store.base_length)
    keyed = transform if isinstance(transform, Transform) else None
    at_once = (
        gather.batches_at_once(batch_size)
        if streams is None
        else _crossing_at_once(gather, placement, batch_size, streams)
    )
    # what is to be gathered is planned for several batches, also where each has a gather of its own
    planned = TASK_BYTES // max(gather.row_bytes * batch_size, 1)
    pipeline = Pipeline(
        gather=gather,
        at_once=at_once,
        assemble=store.assemble_batch,
        keyed=bind(keyed, store.schema, Pool()),
        anywhere=keyed is None or keyed.runs_anywhere,
        plain=bind(None if keyed is not None else transform, store.schema),
        crossing=crossing,
        placement=placement,
        seed=seed,
        pads=pads,
        tensordicts=_holds_tensordicts(store.schema.structure),
    )
    return LoadPlan(placement, gather, reader, pipeline, at_once if at_once > 1 else max(1, min(TASK_BATCHES, planned)))


def _crossing_at_once(gather: Gather, placement: Placement, batch_size: int, streams: Streams) -> int:
    """How many batches cross together, or are picked together where all columns are in the device's memory."""
    if gather.ragged:
        return 1
    there = all(placed.where == "device" for placed in placement.placed)
    most = min(PICKING_BYTES, streams.room()[1] // PICKING_SHARE) if there else CROSSING_BYTES
    return max(1, min(MOST_AT_ONCE, most // max(gather.row_bytes * batch_size, 1)))


def _holds_tensordicts(structure: Node) -> bool:
    return structure.kind in ("tensordict", "tensorclass") or any(map(_holds_tensordicts, structure.children))
