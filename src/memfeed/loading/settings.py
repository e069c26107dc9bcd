"""The arguments of a loader, checked."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed
from torch.utils.data import BatchSampler

from memfeed.errors import LoaderError, brief
from memfeed.loading.batch_order import Tokens
from memfeed.loading.bind import UserTransform
from memfeed.loading.index_samplers import wraps_own_sampler
from memfeed.loading.padding import PaddedField, padding_beside_collate
from memfeed.loading.placement import PlacementRequest
from memfeed.order.choice import Blocks
from memfeed.order.shards import LastRows, RankShards
from memfeed.schema.fields import Node
from memfeed.store.store import Store
from memfeed.system.messages import say_once, warn

ArrayKind = Literal["torch", "numpy", "jax"]
LARGEST = 2**31 - 1  # batch size, world size
MOST_WORKERS = 4096  # that read a dataset
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


@dataclass(frozen=True, eq=False)
class Settings:
    """How a loader reads, as `Loader` describes its arguments; all of them checked.

    Args:
        batch_size: rows of a batch; None gives single samples.
        sampler, batch_sampler: the user's; None for our order.
        last: what ranks do with the rows left at the end of an epoch.
        prefetch: how many batches are made ahead.
        has_repeats: the order may visit a row twice, because stores are mixed by weight.
        transform: what batches go through; None for nothing.
        has_own_transform: the transform is the store's own: it finishes samples, before a collate_fn gets them.
        collate_fn: the user's; None makes batches from the gathered leaves.
        padded: the jagged fields that come padded, with a mask.
        by_length: batches are drawn by the lengths of their rows, and differ in size.
    """

    batch_size: int | None
    last: LastRows
    sampler: Iterable[int] | None
    batch_sampler: Iterable[Iterable[int]] | None
    has_repeats: bool
    device: torch.device | None
    transform: UserTransform
    has_own_transform: bool
    placement_requests: Sequence[PlacementRequest]
    prefetch: int
    collate_fn: Callable[[Any], Any] | None
    returns_rows: bool
    as_: ArrayKind
    rank: int | None
    world_size: int | None
    padded: Sequence[PaddedField] = ()
    by_length: bool = False

    @property
    def has_own_order(self) -> bool:
        """Return True if the order is ours, and not that of a user's sampler."""
        return self.user_sampler is None

    @property
    def user_sampler(self) -> Any:
        """The user's sampler, of rows or of lists of rows; None for our order."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    @property
    def takes_lists(self) -> bool:
        """Return True if a batch is what the dataset gives for a list of rows, without automatic batching."""
        return self.batch_size is None and self.batch_sampler is not None

    @property
    def rows_a_batch(self) -> int:
        """The rows of one gather: those of a batch, or one for single samples."""
        return 1 if self.batch_size is None else self.batch_size

    @property
    def gives_samples(self) -> bool:
        """Return True for ``batch_size=None``: single samples, and no batches."""
        return self.batch_size is None and self.batch_sampler is None

    @property
    def collates_samples(self) -> bool:
        """Return True if batches are taken apart into samples, for a collate_fn; that of ``batch_size=None`` too."""
        return self.collate_fn is not None or (self.gives_samples and self.has_own_transform)

    @property
    def finishes_samples(self) -> bool:
        """Return True if the store's own transform runs before batches are taken apart."""
        return self.has_own_transform and self.collates_samples

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
            "launcher's RANK and WORLD_SIZE say. ranks=(0, 1) reads all rows"
        )
    return int(rank), int(world_size)


def check_arguments(
    *,
    batch_size: int | None,
    shuffle: Any,
    drop_last: Any,
    last: Any,
    sampler: Any,
    batch_sampler: Any,
    weights: Any,
    as_: str,
    bucket_by: Any,
) -> None:
    """Raise LoaderError for arguments that do not fit together."""
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
    given = sampler if batch_sampler is None else batch_sampler
    if sampler is not None and shuffle:
        raise LoaderError("found a sampler and shuffle=True; a sampler has its own order: leave one of them out")
    if given is not None and weights is not None and not wraps_own_sampler(given):
        raise LoaderError("found a sampler and weights; a sampler has its own order: leave one of them out")
    if bucket_by is not None and given is not None and not wraps_own_sampler(given):
        raise LoaderError(
            f"found a sampler ({type(given).__name__}) and bucket_by; expected batches in the loader's own order: "
            "leave the sampler out (Lightning and Fabric: use_distributed_sampler=False)"
        )
    if bucket_by is not None and batch_size is None:
        raise LoaderError(
            f"found bucket_by={bucket_by!r} and batch_size=None, which gives single samples; expected batches: pass "
            "batch_size=, or bucket_by=memfeed.Tokens(4096)"
        )
    if isinstance(bucket_by, Tokens):
        as_int("Tokens.per_batch", bucket_by.per_batch, 1)
    if isinstance(bucket_by, Tokens) and given is None:
        if batch_size != 1:
            raise LoaderError(
                f"found batch_size={batch_size} and bucket_by={bucket_by}; expected one of them: leave batch_size out"
            )
        if weights is not None:
            raise LoaderError(
                f"found bucket_by={bucket_by} and weights, whose epochs have other tokens each time, and so other "
                "numbers of batches; expected the name of a field as bucket_by, and batch_size=, beside weights"
            )
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
    if not given["num_workers"] and given["persistent_workers"]:
        raise LoaderError(
            "found persistent_workers without num_workers; expected num_workers above 0 beside it (here neither "
            "changes anything: leave them out)"
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
        what = "weights" if has_weights else "bucket_by"
        raise LoaderError(f'found placement="sharded" and {what}; expected batches of all rows by batch_size=')


def check_padding(settings: Settings) -> None:
    """Raise LoaderError for padded fields where there are no gathered batches to pad."""
    if settings.padded and (settings.collate_fn is not None or settings.gives_samples):
        raise padding_beside_collate()


def as_int(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return ``value`` as an int. Raises LoaderError for anything else, a bool included, and out of the bounds."""
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool) or (least is not None and found < least):
        bound = "" if least is None else f" of at least {least}"
        raise LoaderError(f"found {name}={value!r}; expected an int{bound}")
    if most is not None and found > most:
        raise LoaderError(f"found {name}={brief(found)}; expected at most {most:,}")
    return found


def warn_about_ranks(shards: RankShards, world_size_before: int | None, unit: str) -> None:
    """Warn if the ranks changed since the last epoch, and once if rows are repeated so that ranks stay in step.

    ``unit`` is what ``shards`` counts, for the text.
    """
    if world_size_before is not None and world_size_before != shards.world_size:
        warn(
            f"found {shards.world_size} ranks where this loader gave its last epoch to {world_size_before}; expected "
            "one world size: make the loader after init_process_group, or pass ranks=(rank, world_size)"
        )
    if shards.repeated and shards.rank == 0 and world_size_before != shards.world_size:
        warn(
            f"found {shards.rows} {unit} for {shards.world_size} ranks: {shards.repeated} {unit} from the beginning of "
            "the order are repeated at the end of an epoch, so that every rank gets the same number of batches; "
            "drop_last=True leaves them out, last='pad' says which rows count, last='uneven' gives each row once"
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


def row_and_list_samplers(batch_size: int | None, sampler: Any, batch_sampler: Any) -> tuple[Any, Any]:
    """Return the samplers of rows and of lists of rows. A BatchSampler draws lists, also where ``batch_size`` is None.

    That is how torch's documentation reads lists without automatic batching: ``dataset[list]`` is the batch.
    """
    if batch_sampler is not None:
        return None, batch_sampler
    return (None, sampler) if batch_size is None and isinstance(sampler, BatchSampler) else (sampler, None)
