"""The arguments of a loader, checked."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from memfeed.errors import LoaderError
from memfeed.loading.bind import UserTransform
from memfeed.loading.placement import PlacementRequest
from memfeed.order.choice import Shuffle
from memfeed.schema.fields import Node


@dataclass(frozen=True)
class Settings:
    """How a loader reads, as `Loader` describes its arguments; all of them checked."""

    batch_size: int
    shuffle: Shuffle
    seed: int
    drop_last: bool
    pad_last: bool
    sampler: Iterable[int] | None
    batch_sampler: Iterable[Iterable[int]] | None
    shares: Sequence[int] | None
    block_rows: int
    device: torch.device | None
    transform: UserTransform
    placement_requests: Sequence[PlacementRequest]
    prefetch: int

    @property
    def has_own_order(self) -> bool:
        """Return True if the order is ours, and not that of a user's sampler."""
        return self.sampler is None and self.batch_sampler is None


def check_arguments(
    *,
    batch_size: int,
    shuffle: Any,
    drop_last: bool,
    pad_last: bool,
    sampler: Any,
    batch_sampler: Any,
    weights: Any,
    block_rows: int | None,
) -> None:
    """Raise LoaderError for arguments that do not fit together."""
    batch_size_alone = batch_size == 1 and not shuffle and not drop_last and not pad_last
    if batch_sampler is not None and not (batch_size_alone and sampler is None):
        raise LoaderError(
            "found a batch_sampler; expected no batch_size, shuffle, sampler, drop_last or pad_last beside it"
        )
    if sampler is not None and shuffle:
        raise LoaderError("found a sampler and shuffle=True; a sampler has its own order: leave one of them out")
    if (sampler is not None or batch_sampler is not None) and weights is not None:
        raise LoaderError("found a sampler and weights; a sampler has its own order: leave one of them out")
    if shuffle not in (False, True, "blocks"):
        raise LoaderError(f'found shuffle={shuffle!r}; expected False, True or "blocks"')
    if drop_last and pad_last:
        raise LoaderError("found drop_last and pad_last; expected one: the last batch is left out, or filled up")
    if block_rows is not None and shuffle != "blocks":
        raise LoaderError(f'found block_rows={block_rows!r}; expected shuffle="blocks" beside it')


def check_rows(row_count: int, world_size: int, pad_last: bool, structure: Node) -> None:
    """Raise LoaderError for too few rows, or for a field whose name ``pad_last`` needs."""
    if row_count < world_size and not pad_last:
        raise LoaderError(
            f"found {row_count} rows for {world_size} ranks; expected at least one row for each, or "
            "pad_last=True, which gives every rank a batch and says which rows count"
        )
    if pad_last and structure.kind in ("dict", "tensordict") and "valid" in structure.keys:
        raise LoaderError('found a field "valid" and pad_last, which adds one; expected another name for the field')


def as_int(name: str, value: Any, least: int | None = None) -> int:
    """Return ``value`` as an int. Raises LoaderError for anything else, a bool included, and below ``least``."""
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool) or (least is not None and found < least):
        bound = "" if least is None else f" of at least {least}"
        raise LoaderError(f"found {name}={value!r}; expected an int{bound}")
    return found


def resolve_ranks(rank: int | None, world_size: int | None, sampler: object) -> tuple[int, int]:
    """Return rank and world size as given, else those of torch.distributed where it is initialised, else (0, 1)."""
    if (rank is None) != (world_size is None):
        given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise LoaderError(f"found {given} without {missing}; expected both, or neither (then torch.distributed's)")
    if rank is not None:
        if sampler is not None:
            raise LoaderError("found a sampler and rank; a sampler decides itself what its rank reads: leave rank out")
        size = as_int("world_size", world_size, 1)
        own = as_int("rank", rank)
        if not 0 <= own < size:
            raise LoaderError(f"found rank={own}; expected 0 to {size - 1} for world_size={size}")
        return own, size
    if sampler is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
