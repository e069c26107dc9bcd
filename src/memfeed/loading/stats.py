"""What a loader says of itself: how fast, who waited, where the data lie, which plan was chosen."""

from __future__ import annotations

from typing import Any

from memfeed.loading.epoch import Place
from memfeed.loading.placement import Placed
from memfeed.loading.plan import LoadPlan
from memfeed.loading.prefetch_policy import PrefetchPolicy
from memfeed.store.columns import Column, InMemory, JoinedFixed, JoinedRagged, Pieces, Values
from memfeed.store.store import Store


def stats(
    place: Place | None, before: int, store: Store, plan: LoadPlan | None, pace: PrefetchPolicy, cold: bool | None
) -> dict[str, Any]:
    """See ``Loader.stats``."""
    gathered = 0 if plan is None else plan.gather.bytes - before
    columns = store.columns if plan is None else plan.placement.columns
    placed = [Placed("mapped", "no epoch has begun")] * len(columns) if plan is None else plan.placement.placed
    seconds = 0.0 if place is None else place.seconds
    samples, batches = (0, 0) if place is None else (place.samples, place.batches)
    # the first batch of an epoch has no clock before it
    timed = samples * (batches - 1) / batches if batches > 1 else 0.0
    return {
        "epoch": None if place is None else place.epoch,
        "batches": batches,
        "samples": samples,
        "seconds": seconds,
        "samples_per_second": timed / seconds if seconds else 0.0,
        "bytes": gathered,
        "bytes_per_second": gathered * timed / samples / seconds if seconds and samples else 0.0,
        "wait_share": place.wait_seconds / seconds if place is not None and seconds else 0.0,
        "columns": {
            column.field.name: _where(column) if one.where == "mapped" else one.where
            for column, one in zip(columns, placed, strict=True)
        },
        "placement": {column.field.name: one.why for column, one in zip(columns, placed, strict=True)},
        "cold": cold,
        "plan": {
            "batches": str(pace),
            "batches_per_gather": 0 if plan is None else plan.pipeline.at_once,
            "read_ahead": "off" if not cold else "on",
        },
    }


def _where(column: Column) -> str:
    if isinstance(column, JoinedFixed | JoinedRagged):
        return ", ".join(sorted({_where(part) for part in column.parts}))
    if isinstance(column, InMemory | Values):
        return "memory"
    return "files" if isinstance(column, Pieces) else "mapped"
