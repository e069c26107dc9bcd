"""The arguments of a loader, checked."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed

from memfeed.errors import LoaderError
from memfeed.loading.bind import UserTransform
from memfeed.loading.index_samplers import wraps_own_sampler
from memfeed.loading.padding import PaddedField
from memfeed.loading.placement import PlacementRequest
from memfeed.order.shards import LastRows, RankShards
from memfeed.schema.fields import Node
from memfeed.store.store import Store
from memfeed.system.messages import say_once

ArrayKind = Literal["torch", "numpy", "jax"]
LARGEST_BATCH = 2**31 - 1
WITHOUT_EFFECT: dict[str, Any] = {
    "num_workers": 0,
    "pin_memory": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "prefetch_factor": None,
    "persistent_workers": False,
    "pin_memory_device": "",
    "in_order": True,
}
"""DataLoader's arguments that change nothing here, with their defaults."""


@dataclass(frozen=True, eq=False)
class Settings:
    """How a loader reads, as `Loader` describes its arguments; all of them checked.

    Args:
        batch_size: rows of a batch; None gives single samples.
        sampler, batch_sampler: the user's; None for our order.
        last: what ranks do with the rows left at the end of an epoch.
        has_repeats: the order may visit a row twice, because stores are mixed by weight.
        collate_fn: the user's; None makes batches from the gathered leaves.
        padded: the jagged fields that come padded, with a mask.
        by_length: batches are drawn by the lengths of their rows, and differ in size.
        threads: that gather and transform; None measures.
    """

    batch_size: int | None
    last: LastRows
    sampler: Iterable[int] | None
    batch_sampler: Iterable[Iterable[int]] | None
    has_repeats: bool
    device: torch.device | None
    transform: UserTransform
    placement_requests: Sequence[PlacementRequest]
    prefetch: int
    collate_fn: Callable[[Any], Any] | None
    returns_rows: bool
    as_: ArrayKind
    rank: int | None
    world_size: int | None
    padded: Sequence[PaddedField] = ()
    by_length: bool = False
    threads: int | None = None

    @property
    def has_own_order(self) -> bool:
        """Return True if the order is ours, and not that of a user's sampler."""
        return self.sampler is None and self.batch_sampler is None

    @property
    def rows_a_batch(self) -> int:
        """The rows of one gather: those of a batch, or one for single samples."""
        return 1 if self.batch_size is None else self.batch_size

    def ranks(self) -> tuple[int, int]:
        """Return rank and world size as they are now: as given, else those of torch.distributed, else the launcher's.

        With a user's sampler (0, 1): the sampler decides which rows its rank reads.
        """
        if self.rank is not None and self.world_size is not None:
            return self.rank, self.world_size
        if not self.has_own_order:
            return 0, 1
        return present_ranks()

    def shards(self, count: int) -> RankShards:
        """Return the share of this rank in an epoch of ``count`` rows (``by_length``: batches), as ranks are now."""
        return RankShards(count, 1 if self.by_length else self.rows_a_batch, *self.ranks(), self.last)


def present_ranks() -> tuple[int, int]:
    """Return rank and world size of this process: those of torch.distributed, else the launcher's."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return _launched_ranks()


def _launched_ranks() -> tuple[int, int]:
    """Return the ranks that torchrun or accelerate gave to this process, before torch.distributed is initialised."""
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    launched = "LOCAL_RANK" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
    if not launched or not rank.isdigit() or not world_size.isdigit() or not int(rank) < int(world_size):
        return 0, 1
    if int(world_size) > 1:
        say_once(
            f"memfeed: torch.distributed is not initialised; a loader reads as rank {rank} of {world_size}, as the "
            "launcher's RANK and WORLD_SIZE say. rank=0, world_size=1 reads all rows"
        )
    return int(rank), int(world_size)


def check_arguments(
    *,
    batch_size: int | None,
    shuffle: Any,
    drop_last: Any,
    pad_last: bool,
    uneven: bool,
    sampler: Any,
    batch_sampler: Any,
    weights: Any,
    block_rows: int | None,
    as_: str,
    batch_tokens: int | None,
    bucket_by: Any,
) -> None:
    """Raise LoaderError for arguments that do not fit together."""
    if drop_last not in (False, True):
        raise LoaderError(f"found drop_last={drop_last!r}; expected True or False")
    if shuffle not in (None, False, True, "blocks"):
        raise LoaderError(f'found shuffle={shuffle!r}; expected False, True or "blocks"')
    if batch_size is not None and batch_size > LARGEST_BATCH:
        raise LoaderError(
            f"found batch_size={batch_size}; expected at most {LARGEST_BATCH:,}: for all rows use batch_size=len(store)"
        )
    batch_size_alone = batch_size in (1, None) and not shuffle and not drop_last and not pad_last
    if batch_sampler is not None and not (batch_size_alone and sampler is None):
        raise LoaderError(
            "found a batch_sampler; expected no batch_size, shuffle, sampler, drop_last or pad_last beside it"
        )
    if batch_size is None and (drop_last or pad_last) and batch_sampler is None:
        raise LoaderError(
            "found batch_size=None, which gives single samples; expected no drop_last or pad_last with it"
        )
    given = sampler if batch_sampler is None else batch_sampler
    if sampler is not None and shuffle:
        raise LoaderError("found a sampler and shuffle=True; a sampler has its own order: leave one of them out")
    if given is not None and weights is not None and not wraps_own_sampler(given):
        raise LoaderError("found a sampler and weights; a sampler has its own order: leave one of them out")
    if sum((bool(drop_last), pad_last, uneven)) > 1:
        raise LoaderError(
            "found more than one of drop_last, pad_last and uneven; expected one: the last batch is left out, or "
            "filled up, or shared out"
        )
    if block_rows is not None and shuffle != "blocks" and not (given is not None and wraps_own_sampler(given)):
        raise LoaderError(f'found block_rows={block_rows!r}; expected shuffle="blocks" beside it')
    if (batch_tokens is not None or bucket_by is not None) and given is not None and not wraps_own_sampler(given):
        raise LoaderError(
            f"found a sampler ({type(given).__name__}) and batch_tokens or bucket_by; expected batches in the loader's "
            "own order: leave the sampler out (Lightning and Fabric: use_distributed_sampler=False)"
        )
    if batch_tokens is not None and batch_size != 1 and given is None:
        raise LoaderError(
            f"found batch_size={batch_size} and batch_tokens={batch_tokens}; expected one of them: leave batch_size out"
        )
    if batch_tokens is not None and weights is not None and given is None:
        raise LoaderError(
            "found batch_tokens and weights, whose epochs have other tokens each time, and so other numbers of "
            "batches; expected bucket_by with batch_size= beside weights"
        )
    if bucket_by is not None and batch_size is None:
        raise LoaderError("found bucket_by and batch_size=None; expected batches: pass batch_size= or batch_tokens=")
    if as_ not in get_args(ArrayKind):
        raise LoaderError(f'found as_={as_!r}; expected "torch", "numpy" or "jax"')


def check_without_effect(given: dict[str, Any], used: Sequence[str] = ()) -> None:
    """Check DataLoader's arguments that change nothing here, and name those that were given, once.

    Those in ``used`` have an effect.
    Raises LoaderError, a ValueError, where DataLoader does.
    """
    if given["num_workers"] < 0 or given["timeout"] < 0:
        raise LoaderError(
            f"found num_workers={given['num_workers']} and timeout={given['timeout']}; expected none below 0: each "
            "option should be non-negative"
        )
    if not given["num_workers"] and (given["prefetch_factor"] is not None or given["persistent_workers"]):
        raise LoaderError(
            "found prefetch_factor or persistent_workers without num_workers; expected num_workers above 0 beside them "
            "(here none of the three changes anything: leave them out)"
        )
    named = [name for name, default in WITHOUT_EFFECT.items() if given[name] != default and name not in used]
    if named:
        reads = "the rows of the store that it fills" if used else "worker processes"
        needs = "reads" if used else "needs no"
        say_once(
            f"memfeed: Loader {needs} {reads}; without effect: {', '.join(named)} (it reads in this process, "
            "and device= moves batches)"
        )


def check_filling(stores: Sequence[Store], *, by_length: bool) -> None:
    """Raise LoaderError for what needs all rows of a store that is being filled."""
    filling = [store for store in stores if store.supply is not None]
    if filling and (by_length or len(stores) > 1):
        what = "batch_tokens or bucket_by, which need the length of every row" if by_length else "a list of stores"
        raise LoaderError(
            f"found {what}, and {filling[0].path}, which is being filled; expected finished stores: call "
            "store.finish() first, or make it without lazily=True"
        )


def check_names(structure: Node, *, pad_last: bool, return_rows: bool) -> None:
    """Raise LoaderError for a field whose name ``pad_last`` or ``return_rows`` needs."""
    if structure.kind not in ("dict", "tensordict"):
        return
    for name, option, needed in (("valid", "pad_last", pad_last), ("rows", "return_rows", return_rows)):
        if needed and name in structure.keys:
            raise LoaderError(
                f'found a field "{name}" and {option}, which adds one; expected another name for the field'
            )


def check_sharded(
    sampler: object, *, has_weights: bool = False, by_length: bool = False, is_filling: bool = False
) -> None:
    """Raise LoaderError for what cannot be read from the pieces of ranks."""
    if is_filling:
        raise LoaderError(
            'found placement="sharded" and a store that is being filled; expected a finished one, from which each rank '
            "loads its piece: memfeed.cache(dataset, path)"
        )
    if sampler is not None:
        raise LoaderError(
            f'found placement="sharded" and a sampler ({type(sampler).__name__}); expected the loader\'s own order, in '
            "which a rank reads its own piece: leave the sampler out (Lightning and Fabric: "
            "use_distributed_sampler=False)"
        )
    if has_weights or by_length:
        what = "weights" if has_weights else "batch_tokens or bucket_by"
        raise LoaderError(f'found placement="sharded" and {what}; expected batches of all rows by batch_size=')


def check_padding(settings: Settings) -> None:
    """Raise LoaderError for padded fields where there are no gathered batches to pad."""
    if settings.padded and (
        settings.collate_fn is not None or (settings.batch_size is None and settings.batch_sampler is None)
    ):
        raise LoaderError(
            "found pad= and a collate_fn, or batch_size=None; expected batches of the loader's own: leave pad= out, or "
            "make the batches with batch_size= and change them with transform="
        )


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


def warn_about_ranks(shards: RankShards, world_size_before: int | None, unit: str) -> None:
    """Warn if the ranks changed since the last epoch, and once if rows are repeated so that ranks stay in step.

    ``unit`` is what ``shards`` counts, for the text.
    """
    if world_size_before is not None and world_size_before != shards.world_size:
        warnings.warn(
            f"found {shards.world_size} ranks where this loader gave its last epoch to {world_size_before}; expected "
            "one world size: make the loader after init_process_group, or pass rank= and world_size=",
            stacklevel=5,
        )
    if shards.repeated and shards.rank == 0 and world_size_before != shards.world_size:
        warnings.warn(
            f"found {shards.rows} {unit} for {shards.world_size} ranks: {shards.repeated} {unit} from the beginning of "
            "the order are repeated at the end of an epoch, so that every rank gets the same number of batches; "
            "drop_last=True leaves them out, pad_last=True says which rows count, uneven=True gives each row once",
            stacklevel=5,
        )


def check_ranks(rank: int | None, world_size: int | None, sampler: object) -> tuple[int | None, int | None]:
    """Return rank and world size as given, checked; both are None where the loader finds them itself."""
    if (rank is None) != (world_size is None):
        given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise LoaderError(f"found {given} without {missing}; expected both, or neither (then torch.distributed's)")
    if rank is None or world_size is None:
        return None, None
    if sampler is not None:
        raise LoaderError("found a sampler and rank; a sampler decides itself what its rank reads: leave rank out")
    size, own = as_int("world_size", world_size, 1), as_int("rank", rank)
    if not 0 <= own < size:
        raise LoaderError(f"found rank={own}; expected 0 to {size - 1} for world_size={size}")
    return own, size
