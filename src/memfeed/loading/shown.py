"""A loader in one line, for people. It begins no epoch."""

from __future__ import annotations

from typing import Any


def loader_text(loader: Any) -> str:
    """Return the `repr` of a loader."""
    settings = loader._effective_settings()
    rank, world_size = settings.ranks()
    ranks = "" if world_size == 1 else f"rank {rank} of {world_size}, "
    batches = "" if settings.by_length else f"batch_size={loader.batch_size}, "
    return (
        f"Loader({len(loader.store):,} rows, {batches}{loader._epochs.order_name(settings)}, "
        f"seed={loader._clock.seed}, {ranks}{count_text(loader)} batches an epoch, "
        f"device={loader.device or 'cpu'}, placement={placement_text(loader)})"
    )


def count_text(loader: Any) -> str:
    """Return the number of batches in an epoch; "?" with a sampler without a length."""
    try:
        return f"{len(loader):,}"
    except (TypeError, ValueError):
        return "?"


def placement_text(loader: Any) -> str:
    """Return where columns are kept; before an epoch, the placement that was asked for."""
    return loader._epochs.reader.describe_placements() or repr(loader.placement)
