"""What a loader says of itself: how fast, who waited, where the data lie, which plan was chosen."""

from __future__ import annotations

from typing import Any

from memfeed.columns import Column, InMemory, JoinedFixed, JoinedRagged, Pieces, Values
from memfeed.loading.epoch import Place
from memfeed.loading.pace import Pace
from memfeed.loading.plan import Plan


def stats(place: Place | None, before: int, plan: Plan, pace: Pace, cold: bool | None) -> dict[str, Any]:
    """See ``Loader.stats``."""
    gathered = plan.gather.bytes - before
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
            column.field.name: _where(column) if placed.where == "mapped" else placed.where
            for column, placed in zip(plan.placement.columns, plan.placement.placed, strict=True)
        },
        "placement": {
            column.field.name: placed.why
            for column, placed in zip(plan.placement.columns, plan.placement.placed, strict=True)
        },
        "cold": cold,
        "plan": {
            "batches": str(pace),
            "batches_per_gather": plan.pipeline.at_once,
            "read_ahead": "off" if not cold else "on",
        },
    }


def _where(column: Column) -> str:
    if isinstance(column, JoinedFixed | JoinedRagged):
        return ", ".join(sorted({_where(part) for part in column.parts}))
    if isinstance(column, InMemory | Values):
        return "memory"
    return "files" if isinstance(column, Pieces) else "mapped"
