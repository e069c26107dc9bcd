"""Open what a loader reads as one store: a source that is read in place, or a dataset that becomes a store."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, default_convert

from memfeed.errors import (
    LoaderError,
    MemfeedError,
    NoSampleError,
    RandomDataError,
    SchemaError,
    SplitError,
    length_of,
    listed,
)
from memfeed.loading.ranks import present_ranks
from memfeed.loading.settings import Arguments, Require, as_int, row_and_list_samplers
from memfeed.loading.sources import as_stores, device_of_columns, has_own_transform, is_dataset, joined
from memfeed.schema.tensordicts import is_tensordict
from memfeed.store.format import resolve
from memfeed.store.memo_format import is_memo
from memfeed.store.store import Store
from memfeed.system import machine
from memfeed.system.messages import say_once
from memfeed.system.torch_loader import DataLoader

if TYPE_CHECKING:
    from memfeed.splitting.unread import Unread

MOST_WORKERS = 4096  # that read a dataset
MOST_PARTS = 64  # of a list in a dataset that are looked at for a store


class Source(NamedTuple):
    """The rows that a loader reads.

    Args:
        store: all its rows.
        device: of the tensors that are read, which batches have too; None for the CPU.
        is_filled: the store was made of a map-style dataset, for this loader.
    """

    store: Store
    device: torch.device | None = None
    is_filled: bool = False


class CannotCacheError(Exception):
    """No store can be made of a dataset, and it may be read as it is; the message says why.

    ``moved``: to find that out has changed its own data, so it may give other samples than before. ``unread`` is what
    it held before, if samples were read.
    """

    def __init__(
        self, reason: str, error: MemfeedError | None = None, *, moved: bool = False, unread: Unread | None = None
    ) -> None:
        super().__init__(reason)
        self.error, self.moved, self.unread = error, moved, unread


def open_source(dataset: Any, given: Arguments) -> Source:
    """Return the rows of ``dataset`` as one store. Raises LoaderError for what no loader reads."""
    is_filled = is_dataset(dataset)
    if is_filled:
        store = _fill_store(dataset, given)
        device = store._backing.device
    else:
        _check_forms(dataset, given)
        store = joined(_beside_cache(dataset, given))
        device = device_of_columns(dataset)
    if device is not None and given.device is None and not is_tensordict(dataset):
        say_once(
            f"memfeed: {type(dataset).__name__} has tensors on {device}, so all tensors of a batch are put there; "
            "device='cpu' puts them on the CPU"
        )
    return Source(store, device, is_filled)


def _fill_store(dataset: Any, given: Arguments) -> Store:
    """Return a store of a dataset that is filled while it is read; see `memfeed.cache`.

    Its processes start as all of `torch.multiprocessing` do. Another ``multiprocessing_context`` gets a message.
    """
    worker_count = as_int("num_workers", given.num_workers, 0, MOST_WORKERS)
    if not length_of(dataset):  # as in DataLoader, no batch comes of it
        say_once(
            f"memfeed: found an empty dataset (0 samples) of {type(dataset).__name__}: its loader has no batches; "
            "check the folder, the split or the filter that it was made with"
        )
        return as_stores(torch.empty(0, device="cpu"))[0]
    if given.transform is None and any(map(has_own_transform, _stores_in(dataset))):
        say_once(
            f"memfeed: {type(dataset).__name__}: found a store in it with a transform of its own (cache(split=True)), "
            "which is not applied: the dataset gets its samples before it. Pass transform=, which may be "
            "store.transform, or {} for none"
        )
    from memfeed.convert.cache import cache  # loaders of stores need no conversion
    from memfeed.convert.changes import OwnStateError
    from memfeed.convert.splits import moved_in_turn, places_in_turn
    from memfeed.splitting.generators import Generators
    from memfeed.splitting.unread import Unread

    if given.cache is None and present_ranks()[1] > 1:
        say_once(
            "memfeed: each rank fills a temporary store of its own with all rows; with Loader(..., cache='PATH') the "
            "ranks of a machine fill one together"
        )
    _require_no_memo(given)
    # the dataset is read before it is known if a store can be made of it
    states = Generators(dataset) if given.may_read_as_it_is else None
    before, places = (None, {}) if states is None else (states.save(), places_in_turn(dataset))
    unread = Unread(dataset)
    lists = row_and_list_samplers(given.batch_size, given.sampler, given.batch_sampler)[1]
    try:
        if lists is not None and given.batch_size is None:
            _require_lists_give_batches(dataset)
        store = cache(
            dataset,
            given.cache,
            split="auto",
            forms=given.forms,
            budget=given.budget,
            lazily=True,
            workers=worker_count,
            worker_init_fn=given.worker_init_fn,
        )
    except (NoSampleError, RandomDataError, SchemaError, SplitError) as error:
        if isinstance(error, NoSampleError) and given.collate_fn is None:
            raise  # a collate_fn may leave it out, torch's own fails
        if states is None or before is None:
            raise
        states.restore(before)
        moved = isinstance(error, OwnStateError) or moved_in_turn(dataset, places)
        raise CannotCacheError(str(error), error, moved=moved, unread=unread) from None
    _require_batched(store, given.require)
    if given.collate_fn is None and given.batch_size is not None:
        _say_lists(dataset, store)
    if given.collate_fn is not None:
        _say_pictures(dataset, store)
    context, starts_processes = given.multiprocessing_context, worker_count > 0 and store._view.supply is not None
    if starts_processes:  # warns if they are more than there are cores
        DataLoader.check_worker_number_rationality(SimpleNamespace(num_workers=worker_count))  # type: ignore[arg-type]
    if context is not None and starts_processes:
        method, used = machine.start_method(context), machine.start_method()
        if method != used:
            say_once(
                f"memfeed: multiprocessing_context={method!r} has no effect: the processes that fill the store start "
                f"with {used!r}; to change that, call torch.multiprocessing.set_start_method({method!r}) first"
            )
    return store


def _require_lists_give_batches(dataset: Any) -> None:
    """Raise SchemaError if ``dataset[[...]]``, which is a batch then, is not made of the samples of single rows.

    For what raises in a DataLoader too, a batch of the store is as good as any.
    """
    from memfeed.convert.inputs import read_sample
    from memfeed.convert.watchdog import Watchdog
    from memfeed.schema.compare import difference
    from memfeed.splitting.generators import Generators
    from memfeed.system.signals import is_of_handler

    rows, generators = sorted({0, length_of(dataset) - 1}), Generators(dataset)
    with generators.preserved():
        try:
            generators.seed(0)
            found = default_convert(dataset[list(rows)])  # type: ignore[no-untyped-call]
        except Exception as error:
            if is_of_handler(error):
                raise
            return
        try:
            generators.seed(0)
            expected = default_collate([read_sample(dataset, row, Watchdog(0)) for row in rows])
            differs: object = difference(found, expected)
        except Exception as error:
            if is_of_handler(error):
                raise
            differs = f"the samples of {rows} do not make a batch ({type(error).__name__}: {error})"
    if differs is not None:
        raise SchemaError(
            f"found that {type(dataset).__name__}[{rows}], which is a batch for a sampler of lists and "
            f"batch_size=None, is not made of the samples of single rows: {differs}; expected their batch, because a "
            "store keeps each row by itself: return single samples, and pass batch_size, or batch_sampler="
        )


def _say_lists(dataset: Any, store: Store) -> None:
    """Say which lists of numbers have another form in the batches of a DataLoader, where code may take them apart."""
    lists = [field for field in store.schema if field.form == "list" and field.kind == "fixed"]
    if lists:
        names, count = listed([field.name for field in lists], 200), lists[0].shape[0]
        say_once(
            f"memfeed: {type(dataset).__name__}: a list of numbers (field {names}) is one tensor [n, {count}] in a "
            f"batch, where a DataLoader gives a list of {count} tensors [n]: "
            "collate_fn=torch.utils.data.default_collate gives that too"
        )


def _say_pictures(dataset: Any, store: Store) -> None:
    """Say which PIL images a collate_fn gets as tensors, because a store does not keep all that they are."""
    from memfeed.splitting.makers import is_kept_as_tensor

    makers = store._backing.leaf_makers if store.transform is None else {}
    kept = [field.name for field in store.schema if is_kept_as_tensor(makers.get(field.path))]
    if kept:
        say_once(
            f"memfeed: {type(dataset).__name__}: the collate_fn gets a PIL image (field {listed(kept, 200)}) as a "
            "tensor [channels, height, width], because its mode, palette or transparent colour is not kept: convert it "
            'in the dataset, as image.convert("RGB"), or return np.array(image)'
        )


def _require_no_memo(given: Arguments) -> None:
    """Raise CannotCacheError if decoded files are kept at the path of ``cache=``, and may be."""
    if given.may_read_as_it_is and given.cache is not None and is_memo(resolve(given.cache)):
        raise CannotCacheError("an earlier run kept them there; remove that directory to try again what is possible")


def check_required(source: Any, given: Arguments) -> None:
    """Raise LoaderError for ``decoders=`` and ``require=`` that are none, or without what they are about."""
    require, decoders = given.require, given.decoders
    if require not in (None, *get_args(Require)):
        raise LoaderError(f"found require={require!r:.60}; expected one of {', '.join(map(repr, get_args(Require)))}")
    if decoders is not None and not (isinstance(decoders, list | tuple) and all(map(callable, decoders))):
        raise LoaderError(f"found decoders={decoders!r:.60}; expected a list of functions, or () for none")
    if isinstance(source, Store):  # of a trainer that makes a loader of another one's parts
        return
    if (require is not None or decoders is not None) and not is_dataset(source):
        name = "decoders" if require is None else "require"
        raise LoaderError(
            f"found {name}= without a dataset that becomes a store; expected it beside a map-style dataset"
        )
    if decoders is not None and given.cache is None:
        raise LoaderError("found decoders= without a path where results are kept: Loader(dataset, cache=path, ...)")


def _require_batched(store: Store, require: Require | None) -> None:
    """Raise LoaderError if random steps run sample by sample, and ``require`` is "batched"."""
    transform = store.transform if require == "batched" else None
    own = [] if transform is None else [part for part in transform.modules() if not getattr(part, "is_batched", True)]
    if own:
        raise LoaderError(
            f'found require="batched", and steps that run sample by sample ({listed(own, 200)}); expected steps that '
            "have a counterpart for batches: use those of torchvision, or leave require= out"
        )


def _check_forms(source: Any, given: Arguments) -> None:
    """Raise LoaderError for ``forms=`` or ``budget=`` beside a source that does not become a store.

    A trainer that makes a loader of the attributes of another one hands on those of its store, which then fits them.
    """
    if given.forms is None and given.budget is None:
        return
    from memfeed.convert.forms import has_forms  # loaders of stores need no conversion

    if not has_forms(source._view.manifest if isinstance(source, Store) else None, given.forms, given.budget):
        pairs = [(name, getattr(given, name)) for name in ("forms", "budget")]
        found = " and ".join(f"{name}={value!r:.80}" for name, value in pairs if value is not None)
        raise LoaderError(
            f"found {found} beside {type(source).__name__}, whose rows are read as they are; expected a "
            "map-style dataset, which Loader(dataset, cache=path, forms=...) makes a store of"
        )


def _beside_cache(source: Any, given: Arguments) -> Any:
    """Return the source that is read in place of one that is not filled, beside ``cache=``.

    A store of an IterableDataset is written as a whole; without a path it is read as it is. So are columns in memory.
    Raises LoaderError for a store at another path.
    """
    path = given.cache
    if path is None:
        if isinstance(source, IterableDataset) and given.may_read_as_it_is and not given.shuffle:
            raise CannotCacheError(
                "the samples of an IterableDataset have no numbers, by which a store is filled while it is read; with "
                "cache='PATH' they are written to a store there first"
            )
        return source
    if isinstance(source, IterableDataset):
        from memfeed.convert.cache import cache_one
        from memfeed.convert.jobs import STREAM_BLOCK
        from memfeed.convert.options import options_of
        from memfeed.convert.splits import moved_in_turn, places_in_turn
        from memfeed.splitting.unread import Unread

        _require_no_memo(given)
        unread, places = Unread(source), places_in_turn(source)
        turns = (
            f"; the {given.num_workers} workers take turns of {STREAM_BLOCK} rows, where those of a DataLoader take "
            "turns of a batch: shuffle=True mixes the rows of all"
            if given.num_workers > 1 and not given.shuffle
            else ""
        )
        say_once(
            f"memfeed: the samples of {type(source).__name__}, an IterableDataset, have no numbers: all are written to "
            f"{path} before the first batch, unless they are random{turns}"
        )
        try:
            options = options_of(
                source, workers=given.num_workers, worker_init_fn=given.worker_init_fn, is_watched=True
            )
            return cache_one(source, path, options)
        except RandomDataError as error:  # decoders= and require= are an error here
            moved = moved_in_turn(source, places)
            raise CannotCacheError(str(error), error, moved=moved, unread=unread) from None
    as_stores(source)  # raises for what no loader reads
    is_on_disk = isinstance(source, Store) and source.path.is_absolute()
    if not is_on_disk:
        say_once(f"memfeed: cache= has no effect beside {type(source).__name__}, which is read in place")
    elif source.path != resolve(path):  # not of a trainer that makes a loader of another one's parts
        raise LoaderError(
            f"found cache={str(path)!r} and a store at {source.path}, which is read as it is; expected a map-style "
            "dataset beside it: leave cache= out"
        )
    return source


def _stores_in(dataset: Any, depth: int = 4) -> Iterator[Store]:
    """Yield the stores that a dataset holds in its attributes, in lists and dicts there, and in datasets there."""
    if isinstance(dataset, Store):
        yield dataset
    elif depth and isinstance(dataset, Dataset):
        for value in [*getattr(dataset, "__dict__", {}).values()]:
            parts = value if type(value) in (list, tuple) else value.values() if type(value) is dict else [value]
            for one in itertools.islice(parts, MOST_PARTS):
                yield from _stores_in(one, depth - 1)


def forget_record(loader: object) -> None:
    """Remove the arguments that Lightning recorded of a loader, if they are another class's.

    In its hooks Lightning records those of the classes that exist when a hook begins. If `Loader` is imported in the
    hook, it records only what `Loader` passes on to DataLoader. Without a record it takes the attributes.
    """
    for name in [name for name in vars(loader) if name.startswith("__pl_")]:
        del vars(loader)[name]
