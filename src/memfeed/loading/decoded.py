"""The loader of a dataset that no store can hold: torch's own. With a path, decoders answer from the disk in it."""

from __future__ import annotations

import cProfile
import inspect
import os
import pstats
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset
from typing_extensions import TypeVar

from memfeed.convert.splits import NotReadyError, moved_in_turn, places_in_turn
from memfeed.errors import LoaderError, RandomDataError, listed
from memfeed.loading.open_source import CannotCacheError
from memfeed.loading.ranks import joined_world_size, launched_ranks
from memfeed.loading.settings import Arguments
from memfeed.memoizing.decoders import Reading, imported_libraries, why_left_alone
from memfeed.memoizing.keys import Key
from memfeed.splitting.generators import Generators
from memfeed.splitting.unread import Unread
from memfeed.store.format import resolve
from memfeed.system import machine
from memfeed.system.messages import say_once
from memfeed.system.signals import is_of_handler
from memfeed.system.torch_loader import DataLoader

T_co = TypeVar("T_co", covariant=True, default=Any)

_SAMPLES = 8  # that are read to say what decoding takes
_SMALL_SHARE = 0.2
_FUNCTIONS_SHOWN = 3
_REASON_WIDTH = 400
_RECORDED = ("__setattr__", "__delattr__")  # Lightning records calls of them, and leaves those of the base in classes
_LIGHTNING_SEEDS = "PL_SEED_WORKERS"  # the variable that `seed_everything(workers=True)` sets
_OF_STORES: dict[str, Any] = {
    "seed": None, "last": None, "bucket_by": None, "device": None, "transform": None, "placement": "auto",
    "ranks": None, "return_rows": False, "as_": "torch", "pad": None, "follow_batch": None, "exclude_keys": None,
}  # fmt: skip
"""The arguments that torch's loader does not have, with their defaults."""
_METHODS = ("state_dict", "load_state_dict", "set_epoch", "epoch", "skip", "rewind", "stats", "store", "paused")
"""What only the loader of a store has."""
_OF_TORCH = (
    "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory", "drop_last",
    "timeout", "worker_init_fn", "multiprocessing_context", "generator", "persistent_workers", "pin_memory_device",
    "in_order",
)  # fmt: skip


class DecodedLoader(DataLoader[T_co]):
    """A `torch.utils.data.DataLoader` over a dataset as it is, for which decoded files are kept.

    `memfeed.Loader` becomes one if the samples of its dataset are random, and its pipeline cannot be cut. The values,
    their order, and all that is drawn are the program's own. In the processes that read samples (``num_workers``), or
    in the thread that iterates, the decoders of libraries (Pillow, OpenCV and others: docs/memoize.md) answer from the
    results at ``decoded.path``.

    Args:
        decoded: the kept results, and which decoders have them.
        worker_init_fn: called in each worker process, as by DataLoader, after the decoders were set up.
        arguments, options: as of DataLoader.
    """

    def __init__(
        self,
        *arguments: Any,
        decoded: Reading,
        worker_init_fn: Callable[[int], None] | None = None,
        **options: Any,
    ) -> None:
        self.decoded = decoded
        options["worker_init_fn"] = worker_init_fn
        super().__init__(*arguments, **options)

    @property
    def worker_init_fn(self) -> Callable[[int], None] | None:
        """Return what each worker process calls. A trainer makes a loader of it, and the decoders answer there too.

        It is None if the program gave none and Lightning seeds workers: it does so only where it finds None.
        """
        own = vars(self)["worker_init_fn"]
        if own is None and os.environ.get(_LIGHTNING_SEEDS, "0") not in ("", "0"):
            return None
        return own if isinstance(own, _BeginWorker) else _BeginWorker(self.decoded, own)

    @worker_init_fn.setter
    def worker_init_fn(self, own: Callable[[int], None] | None) -> None:
        vars(self)["worker_init_fn"] = own  # where a trainer looks for the arguments of a loader

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError, which says why for what a `Loader` has."""
        why = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name in _METHODS:
            why += (
                ": it is a DataLoader over a dataset that no store can hold. memfeed.Loader(..., require='samples') "
                "raises the reason"
            )
        if name in ("state_dict", "load_state_dict"):
            why += "; torchdata's StatefulDataLoader has states of such a dataset"
        raise AttributeError(why)

    def _get_iterator(self) -> Any:
        own = vars(self)["worker_init_fn"]
        self.worker_init_fn = own if isinstance(own, _BeginWorker) else _BeginWorker(self.decoded, own)
        try:
            iterator = super()._get_iterator()
        finally:
            self.worker_init_fn = own
        fetcher = getattr(iterator, "_dataset_fetcher", None)  # without workers, samples are read by this thread
        if fetcher is not None:
            fetch = fetcher.fetch

            def fetch_decoded(index: Any) -> Any:
                with self.decoded.active():
                    return fetch(index)

            fetcher.fetch = fetch_decoded
        return iterator


class _BeginWorker:
    """Sets up the decoders in a worker process, then calls the user's function."""

    def __init__(self, decoded: Reading, own: Callable[[int], None] | None) -> None:
        self.decoded, self.own = decoded, own

    def __call__(self, worker: int) -> None:
        self.decoded.begin()
        if self.own is not None:
            self.own(worker)


def names_of(decoders: Sequence[Any]) -> list[tuple[str, str]]:
    """Return module and name of each function of the user's. Raises LoaderError for one that has none."""
    found = []
    for one in decoders:
        module, name = str(getattr(one, "__module__", "")), str(getattr(one, "__qualname__", ""))
        owner: Any = sys.modules.get(module)
        for part in name.split("."):
            owner = getattr(owner, part, None)
        if owner is None or "<locals>" in name:
            raise LoaderError(
                f"found {one!r:.80} in decoders=; expected functions that can be found by their names, at the top of a "
                "module or in a class: define it there"
            )
        found.append((module, name))
    return found


def become_decoded(
    loader: DataLoader[Any],
    base: type,
    dataset: Any,
    refused: CannotCacheError,
    given: Arguments,
) -> None:
    """Make a loader torch's own, with the arguments that torch has. With a path it is a `DecodedLoader`.

    Not if no sample could be read: then nothing is kept, so that the path is free once the dataset is ready.
    ``base`` is `Loader`. With a path a few samples are read to say what it is worth; all generators are where they were
    afterwards. Raises the error of the dataset, or LoaderError, for arguments that only a loader of a store has, and
    for methods of a derived class, which would be lost.
    """
    others = [name for name, default in _OF_STORES.items() if getattr(given, name) not in (default,)]
    others += [name for name in ("forms", "budget") if getattr(given, name) is not None]
    others += [] if given.shuffle in (None, True, False) else ["shuffle"]
    derived = type(loader).__mro__[: type(loader).__mro__.index(base)]
    lost = [
        f"{cls.__name__}.{name}"
        for cls in derived
        for name, one in list(vars(cls).items())
        if _is_own(name, one) and not (name in _RECORDED and inspect.unwrap(one) is inspect.unwrap(getattr(base, name)))
    ]
    if others or lost:
        kind = LoaderError if refused.error is None else type(refused.error)
        instead = "It can be read as it is" if given.cache is None else "Decoded files can be kept in its place"
        raise kind(
            f"{refused}. {instead}, by a plain DataLoader, which has no "
            f"{', '.join([f'{name}=' for name in others] + lost)}: leave these out"
        ) from refused.error
    places = places_in_turn(dataset)
    why = " ".join(str(refused).split())
    why = why if len(why) <= _REASON_WIDTH else f"{why[: _REASON_WIDTH - 3]}... (require='samples' raises all of it)"
    reading, unread = None, refused.unread or Unread(dataset)
    is_ready = not isinstance(refused.error, NotReadyError) or given.decoders is not None
    if given.cache is None or not is_ready:
        kept = "cache='PATH' keeps decoded files" if is_ready else "nothing is kept, as no sample can be read yet"
        if isinstance(dataset, IterableDataset):
            kept = "nothing is kept"
        say_once(
            f"memfeed: {type(dataset).__name__}: no store, so it is read as it is in every epoch, as by a DataLoader "
            f"({kept}): {why}"
        )
    else:
        path = resolve(given.cache)
        reading = Reading(path, names_of(given.decoders or ()))
        worth = _measure(dataset, reading)
        say_once(
            f"memfeed: {path}: no store, neither batched nor sample by sample; the dataset is read as it is in every "
            f"epoch, and the files that it decodes are kept: {why}\nmemfeed: {worth}"
        )
    if refused.moved or moved_in_turn(dataset, places):
        say_once(
            f"memfeed: {type(dataset).__name__}: some samples were read to find that out. If it gives them in turn, "
            "whatever the index, its first epoch goes on after these (with num_workers each epoch): a DataLoader of "
            "torch begins with the first one. Put its counter or queue back when the loader is made"
        )
    if isinstance(refused.error, RandomDataError) and threading.current_thread() is not threading.main_thread():
        say_once(
            f"memfeed: {type(dataset).__name__}: this loader was made in a thread. If another thread draws random "
            "numbers, or makes or fills a store, at the same time, a fixed dataset is taken for a random one: all "
            "threads share the generators. Make the store before the threads begin, memfeed.cache(dataset, PATH, "
            "split='auto'), and pass it to their loaders: Loader(store, ...)"
        )
    # the loader of a program that joins the process group later is one of several ranks too
    if max(joined_world_size(), launched_ranks()[1]) > 1 and given.sampler is None and given.batch_sampler is None:
        say_once(
            "memfeed: this loader reads all samples on each rank, as a DataLoader does, unless a trainer divides it "
            "(Lightning, Accelerate): in a loop of your own pass sampler=torch.utils.data.DistributedSampler(dataset)"
        )
    unread.drop_generators(dataset)
    if given.num_workers and machine.start_method(given.multiprocessing_context) != "fork":
        unread.close(dataset)  # as a DataLoader finds it, which reads no sample before it starts workers
    options = {name: getattr(given, name) for name in _OF_TORCH}
    options |= {} if given.prefetch_factor is None else {"prefetch_factor": given.prefetch_factor}
    if reading is None:
        loader.__class__ = DataLoader
        DataLoader.__init__(loader, dataset, **options)
    else:
        loader.__class__ = DecodedLoader
        DecodedLoader.__init__(loader, dataset, decoded=reading, **options)  # type: ignore[arg-type]


def _is_own(name: str, value: Any) -> bool:
    """Return True for what a derived class adds, apart from its ``__init__``, which has run."""
    return name != "__init__" and (isinstance(value, FunctionType) or not name.startswith("__"))


def _measure(dataset: Any, reading: Reading) -> str:
    """Return in words how much of a sample's time is decoding; leave decoders alone that would keep nothing of use."""
    if isinstance(dataset, IterableDataset):
        return "What decoding takes is not measured of an IterableDataset"
    rows = np.unique(np.linspace(0, len(dataset) - 1, _SAMPLES).astype(int)).tolist()
    generators = Generators(dataset)
    states = generators.save()
    first, again = list[tuple[str, Key]](), list[tuple[str, Key]]()
    libraries = imported_libraries()
    try:
        reading.asked = first
        with reading.active():
            started = time.perf_counter()
            for row in rows:
                dataset[row]
            seconds = time.perf_counter() - started
        if not reading.is_called and imported_libraries() != libraries:  # at the first sample: now it is replaced
            return _measure(dataset, reading)
        own = max(0.0, seconds - reading.seconds)
        share = reading.seconds_decoding / max(own + reading.seconds_decoding, 1e-9)
        text = f"Decoding is {share:.0%} of the time of a sample ({len(rows)} samples)"
        if first:
            reading.asked = again  # with other draws
            with reading.active():
                for row in rows:
                    dataset[row]
        left = reading.leave_parts(first, again)
        if left:
            return (
                f"{text}; no result of {listed(left)} is kept, which each read of a sample asks for another part of "
                "its file: read whole files, and cut the part out of what comes back"
            )
        if share >= _SMALL_SHARE:
            return text
        generators.restore(states)
        gain = "the gain is small"
        if not reading.is_called:
            why = why_left_alone()
            text, gain = f"No decoder with kept results was called ({len(rows)} samples{why and f'; {why}'})", "no gain"
        return f"{text}: {gain}. Most of the time goes to {_slowest(dataset, rows, reading)}"
    except Exception as error:  # of the dataset's own, which its epoch will raise
        if is_of_handler(error):
            raise
        return f"What decoding takes was not measured ({type(error).__name__} in a sample)"
    finally:
        reading.asked = None
        generators.restore(states)


def _slowest(dataset: Any, rows: Sequence[int], reading: Reading) -> str:
    """Return the functions in which most of the time of samples is spent."""
    profile = cProfile.Profile()
    with reading.active():
        profile.enable()
        try:
            for row in rows:
                dataset[row]
        finally:
            profile.disable()
    found = []
    statistics: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, _, name), (_, _, own, _, _) in statistics.items():
        is_ours = f"{os.sep}memfeed{os.sep}" in file or "_lsprof" in name  # the profiler
        if not is_ours and name != "<built-in method posix.read>":
            found.append((own, name if file == "~" else f"{name} ({Path(file).name})"))
    return listed([name for _, name in sorted(found, reverse=True)[:_FUNCTIONS_SHOWN]])
