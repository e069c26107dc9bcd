"""The program whose loading is judged: its dataset, its loader, and its step."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler, Subset, default_collate

from memfeed.errors import LoaderError
from memfeed.loading.loader import Loader
from memfeed.loading.sources import is_dataset
from memfeed.store.store import Store

BATCH_SIZE = 32
"""Of a dataset that comes without a loader."""
_OF_WORKERS = ("prefetch_factor", "timeout", "multiprocessing_context", "persistent_workers")
_KEPT_OPTIONS = ("collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")


@dataclass(frozen=True)
class Program:
    """A program to measure: its dataset, its loader and its step.

    Args:
        dataset: map-style.
        batch_size, worker_count, is_shuffled: of the loader as it is today.
        options: its other arguments of DataLoader, for each loop.
        step: called with each batch; None if loading alone is measured.
        device: where batches go before the step; None leaves them where they are.
        notes: sentences on what is not measured as the program has it.
    """

    dataset: Any
    batch_size: int
    worker_count: int
    is_shuffled: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    step: Callable[[Any], Any] | None = None
    device: torch.device | None = None
    notes: tuple[str, ...] = ()

    @property
    def row_count(self) -> int:
        """The samples of an epoch."""
        return len(self.dataset)

    def torch_loader(self, rows: Sequence[int], worker_count: int) -> DataLoader[Any]:
        """Return torch's loader of these rows, in this order."""
        options = {name: one for name, one in self.options.items() if worker_count or name not in _OF_WORKERS}
        return DataLoader(Subset(self.dataset, rows), self.batch_size, num_workers=worker_count, **options)

    def memfeed_loader(self, rows: Sequence[int], path: Path) -> Loader[Any]:
        """Return memfeed's loader of these rows, as one changed line gives it, with its store at ``path``."""
        sample = Subset(self.dataset, rows)
        options: dict[str, Any] = {
            "collate_fn": self.options.get("collate_fn"),
            "worker_init_fn": self.options.get("worker_init_fn"),
        }
        if self.device is not None:
            options["device"] = self.device  # in mapped memory: all rows of the store may have no room on the device
            options["placement"] = "mapped"
        return Loader(
            sample,
            self.batch_size,
            shuffle=self.is_shuffled,
            num_workers=self.worker_count,
            cache=path if is_dataset(sample) else None,
            **options,
        )


def describe(source: Any, step: Any, batch_size: int | None, worker_count: int | None, device: Any) -> Program | str:
    """Return the program, or a sentence that says why it cannot be measured.

    Args:
        source: a map-style dataset, or a `torch.utils.data.DataLoader` of one.
        batch_size, worker_count: for a dataset; None for 32, and for no worker processes.

    Raises LoaderError for arguments that do not fit together.
    """
    if isinstance(source, Loader | Store):
        raise LoaderError(
            f"found a {type(source).__name__}, which memfeed reads already; expected the dataset, or the DataLoader, "
            "that it is to be compared with"
        )
    if step is not None and not callable(step):
        raise LoaderError(f"found step={step!r:.60}; expected a function of a batch")
    device = None if device is None else torch.device(device)
    if device is not None and device.type not in ("cpu", "cuda"):
        raise LoaderError(f"found device={str(device)!r}; expected cpu or cuda: other devices are not measured")
    loader = source if isinstance(source, DataLoader) else None
    if loader is not None and (batch_size is not None or worker_count is not None):
        raise LoaderError("found a DataLoader with batch_size= or workers=; expected its own: leave these out")
    dataset = source if loader is None else loader.dataset
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return f"the samples of {type(dataset).__name__} have no numbers, so that the same ones cannot be read in turns"
    if not len(dataset):
        raise LoaderError(f"found an empty dataset (0 samples) of {type(dataset).__name__}; expected samples to read")
    if loader is None:
        return Program(dataset, batch_size or BATCH_SIZE, worker_count or 0, True, step=step, device=device)
    size, notes = loader.batch_size, []
    if size is None:
        if loader.batch_sampler is None:
            return "its DataLoader has batch_size=None, and makes no batches"
        first = next(iter(loader.batch_sampler), None)
        size = len(first) if first is not None else BATCH_SIZE
        notes.append(f"measured with batches of {size}, in the place of its batch sampler")
    options = {name: getattr(loader, name) for name in _KEPT_OPTIONS}
    if options["collate_fn"] is default_collate:
        del options["collate_fn"]
    if loader.num_workers:
        options["persistent_workers"] = loader.persistent_workers
        options |= {} if loader.prefetch_factor is None else {"prefetch_factor": loader.prefetch_factor}
    is_shuffled = size != loader.batch_size or not isinstance(loader.sampler, SequentialSampler)
    return Program(dataset, size, loader.num_workers, is_shuffled, options, step, device, tuple(notes))


def core_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def messages_kept() -> Iterator[io.StringIO]:
    """Keep what is printed to stderr during the block: lines about a temporary store help nobody."""
    with io.StringIO() as kept, redirect_stderr(kept):
        yield kept
