"""The arguments of a loader, checked; and its pickle: its store, its arguments, and its position."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils.data import BatchSampler

from memfeed.errors import LoaderError, brief
from memfeed.loading.batch_forms import PaddedField, padding_beside_collate
from memfeed.loading.bind import UserTransform
from memfeed.loading.placement import PlacementOption, PlacementRequest
from memfeed.loading.ranks import present_ranks
from memfeed.order.choice import Shuffle
from memfeed.order.pieces import LastRows, RankShards
from memfeed.store.lengths import Fill
from memfeed.store.store import Store
from memfeed.system.messages import say_once, warn

ArrayKind = Literal["torch", "numpy", "jax"]
Require = Literal["batched", "samples"]
"""The least that ``cache=`` may do: random steps run on whole batches, or sample by sample."""
LARGEST = 2**31 - 1  # batch size, world size


@dataclass(frozen=True, eq=False, kw_only=True)
class Arguments:
    """The arguments of a loader as they were given, beside the dataset; see `Loader`."""

    batch_size: int | None
    shuffle: Shuffle | None
    sampler: Iterable[int] | None
    batch_sampler: Iterable[Iterable[int]] | None
    collate_fn: Callable[[Any], Any] | None
    drop_last: bool
    generator: torch.Generator | None
    prefetch_factor: int | None
    seed: int | None
    last: LastRows | None
    bucket_by: Any
    device: torch.device | str | None
    transform: UserTransform
    placement: PlacementOption
    ranks: tuple[int, int] | None
    return_rows: bool
    as_: ArrayKind
    pad: Fill
    follow_batch: Sequence[str] | None
    exclude_keys: Sequence[str] | None
    num_workers: int
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    persistent_workers: bool
    pin_memory: bool
    pin_memory_device: str
    timeout: float
    in_order: bool
    cache: str | os.PathLike[str] | None
    forms: Any
    budget: int | str | None
    decoders: Sequence[Callable[..., Any]] | None
    require: Require | None

    def __post_init__(self) -> None:
        """Raise LoaderError for objects of a wrong kind, before a dataset is read: they would fail at a first batch."""
        for names, is_right, expected in (
            (("collate_fn", "worker_init_fn"), callable, "a function"),
            (("sampler", "batch_sampler"), _is_iterable, "row numbers, or lists of them: an object with __iter__"),
            (("generator",), lambda one: isinstance(one, torch.Generator), "a torch.Generator"),
            (("timeout",), lambda one: isinstance(one, int | float), "a number of seconds"),
            (("return_rows",), lambda one: one in (False, True), "True or False"),
        ):
            for name in names:
                value = getattr(self, name)
                if value is not None and not is_right(value):
                    raise LoaderError(f"found {name}={brief(value)}; expected {expected}")

    @property
    def user_sampler(self) -> Any:
        """The user's sampler, of rows or of lists of rows; None for our order."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    @property
    def may_read_as_it_is(self) -> bool:
        """True if a dataset that no store can hold may be read by a DataLoader, and its decoded files be kept."""
        return self.require is None and (self.decoders is None or len(self.decoders) > 0)


def _is_iterable(value: Any) -> bool:
    return hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__")  # of a class: its metaclass's


@dataclass(frozen=True, eq=False)
class Settings:
    """How a loader reads, as `Loader` describes its arguments; all of them checked.

    Args:
        batch_size: rows of a batch; None gives single samples.
        sampler, batch_sampler: the user's; None for our order.
        last: what ranks do with the rows left at the end of an epoch.
        prefetch: how many batches are made ahead.
        has_repeats: the order may visit a row twice, because stores are mixed by weight, or a view has it twice.
        transform: what batches go through; None for nothing.
        has_own_transform: the transform is the store's own: it finishes samples, before a collate_fn gets them.
        collate_fn: the user's; None makes batches from the gathered leaves.
        padded: the jagged fields that come padded, with a mask.
        by_length: batches are drawn by the lengths of their rows, and differ in size.
        is_of_dataset: the loader was made of a dataset, and reads the store of its samples.
        has_workers: num_workers is not 0: what a handler of signals raises in the caller is no error of a batch.
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
    is_of_dataset: bool = False
    has_workers: bool = False

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
    def why_no_lists(self) -> str:
        """Return why a batch cannot be a list of lists of rows, and what to do; an empty string if it can be.

        A dataset may return anything for a list, and a loader that is made of a dataset reads the samples of single
        rows.
        """
        if self.batch_sampler is None or self.takes_lists:
            return "lists of rows are batches, pass what draws them as batch_sampler=, without batch_size"
        if self.is_of_dataset:
            return (
                "lists of lists are what dataset[[...]] returns, which a store does not know: Loader(store, ...) of "
                "store = memfeed.cache(dataset, path) gives a batch of store[[...]]; or read the dataset by DataLoader"
            )
        if self.collate_fn is not None:
            return "beside a collate_fn a list of lists is not a batch: leave collate_fn out, or draw lists of rows"
        return ""

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
    def takes_any_shape(self) -> bool:
        """Return True if the user's code gets each sample as it is: a field whose rows differ in shape is no other."""
        return (self.collate_fn is not None or self.gives_samples) and self.transform is None and not self.takes_lists

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
        return present_ranks() if self.has_own_order else (0, 1)

    def shards(self, count: int) -> RankShards:
        """Return the share of this rank in an epoch of ``count`` rows (``by_length``: batches), as ranks are now."""
        return RankShards(count, 1 if self.by_length else self.rows_a_batch, *self.ranks(), self.last)

    def drawn_by(self, sampler: Any, batch_sampler: Any) -> Settings:
        """Return these settings with the samplers of another component, which decides which rows are read."""
        rows, batches = row_and_list_samplers(self.batch_size, sampler, batch_sampler)
        return replace(self, sampler=rows, batch_sampler=batches, rank=None, world_size=None, by_length=False)


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


def check_settings(settings: Settings) -> None:
    """Raise LoaderError where there are no whole batches, and fields are to be padded, or decoded on the device."""
    if settings.padded and (settings.collate_fn is not None or settings.gives_samples):
        raise padding_beside_collate()
    if "nvjpeg" in settings.placement_requests and (settings.collates_samples or settings.gives_samples):
        raise LoaderError(
            'found placement "nvjpeg" beside a collate_fn, or batch_size=None; expected whole batches, which go to the '
            "device: leave it out, or leave the field mapped"
        )


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
    """Warn if the ranks changed since the last epoch, and once if rows are repeated, or none is left for a batch.

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
    is_empty = shards.world_size > 1 and 0 < shards.rows < shards.stride and shards.last == "drop"
    if is_empty and shards.rank == 0 and world_size_before != shards.world_size:
        warn(
            f"found {shards.rows} {unit} for {shards.world_size} ranks with drop_last=True; expected {shards.stride} "
            "for a batch on each rank: an epoch has no batch; use a smaller batch_size, or leave drop_last out"
        )


def row_and_list_samplers(batch_size: int | None, sampler: Any, batch_sampler: Any) -> tuple[Any, Any]:
    """Return the samplers of rows and of lists of rows. A BatchSampler draws lists, also where ``batch_size`` is None.

    That is how torch's documentation reads lists without automatic batching: ``dataset[list]`` is the batch.
    """
    if batch_sampler is not None:
        return None, batch_sampler
    return (None, sampler) if batch_size is None and isinstance(sampler, BatchSampler) else (sampler, None)


def reduced(loader: Any, store: Store, options: dict[str, Any], settings: Settings, collate_fn: Any) -> tuple[Any, ...]:
    """Return the tuple of `Loader.__reduce__`. ``options`` are arguments that are attributes of the loader.

    Raises TypeError for columns in memory, which a pickle would copy.
    """
    store.__reduce__()
    options = options | {
        "drop_last": settings.last == "drop",
        "prefetch_factor": settings.prefetch,
        "sampler": settings.sampler,
        "batch_sampler": settings.batch_sampler,
        "batch_size": 1 if settings.batch_sampler is not None else settings.batch_size,
        "collate_fn": collate_fn,
    }
    if settings.takes_lists:
        options |= {"sampler": settings.batch_sampler, "batch_sampler": None, "batch_size": None}
    return _remake, (type(loader), store, options, loader.state_dict())


def _remake(cls: Any, dataset: Any, options: dict[str, Any], state_dict: dict[str, Any]) -> Any:
    loader = cls(dataset, **options)
    loader.load_state_dict(state_dict)
    if state_dict["row"]:
        say_once(
            f"memfeed: a copy of a loader goes on within epoch {state_dict['epoch']}, where the loader was when it "
            "was copied or sent to another process; for a whole epoch do that before a batch is read, or call "
            f"set_epoch({state_dict['epoch'] + 1}) of the copy"
        )
    return loader
