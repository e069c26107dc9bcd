"""The measurements of a loader: how fast it is, who waited, where the data are, which plan was chosen."""

from __future__ import annotations

from typing import Any

from memfeed.loading.epoch import EpochProgress
from memfeed.loading.epoch_reader import EpochReader
from memfeed.loading.placement import ColumnPlacement
from memfeed.loading.prefetch_policy import PrefetchPolicy
from memfeed.store.store import Store


def stats(
    progress: EpochProgress | None, gathered_before: int, store: Store, reader: EpochReader, policy: PrefetchPolicy
) -> dict[str, Any]:
    """Return what ``Loader.stats`` describes. ``gathered_before`` is the bytes gathered before this epoch."""
    plan = reader.plan
    gathered = 0 if plan is None else plan.maker.gather.bytes - gathered_before
    columns = store._view.columns if plan is None else plan.placement.columns
    not_yet = [ColumnPlacement("mapped", "no epoch has begun")] * len(columns)
    placements = not_yet if plan is None else plan.placement.placements
    seconds = 0.0 if progress is None else progress.seconds
    samples, batches = (0, 0) if progress is None else (progress.samples, progress.batches)
    # the first batch of an epoch has no clock before it
    timed = samples * (batches - 1) / batches if batches > 1 else 0.0
    return {
        "epoch": None if progress is None else progress.epoch,
        "batches": batches,
        "samples": samples,
        "seconds": seconds,
        "samples_per_second": timed / seconds if seconds else 0.0,
        "bytes": gathered,
        "bytes_per_second": gathered * timed / samples / seconds if seconds and samples else 0.0,
        "wait_share": progress.wait_seconds / seconds if progress is not None and seconds else 0.0,
        "columns": {
            column.field.name: column.kept_in if one.where == "mapped" else one.where
            for column, one in zip(columns, placements, strict=True)
        },
        "placement": {column.field.name: one.why for column, one in zip(columns, placements, strict=True)},
        "cold": reader.is_cold,
        "plan": {
            "batches": str(policy),
            "batches_per_gather": 0 if plan is None else plan.maker.at_once,
            "read_ahead": "off" if not reader.is_cold else "on",
            "threads": {} if plan is None else plan.threads.describe(),
        },
    }
