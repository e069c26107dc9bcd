"""The program whose loading is judged: its dataset, its loader, and its step.

One turn of its loop is measured in three parts: waiting for a batch, its transfer, and the step.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import optree
import torch
from torch.utils.data import SequentialSampler, Subset, default_collate

from memfeed.errors import LoaderError, brief
from memfeed.loading.loader import Loader
from memfeed.loading.sources import is_dataset
from memfeed.store.store import Store
from memfeed.system.torch_loader import DataLoader
from memfeed.transfer.to_device import check_device
from memfeed.verdict.judge import Turn

BATCH_SIZE = 32
"""Of a dataset that comes without a loader."""
_OF_WORKERS = ("prefetch_factor", "timeout", "multiprocessing_context", "persistent_workers")
_KEPT_OPTIONS = ("collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")


class _Marks:
    """Moments on the CPU, or in the stream of a CUDA device, which computes later than Python runs."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device if device is not None and device.type == "cuda" else None

    def mark(self) -> Any:
        if self.device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def finish(self) -> None:
        """Wait until all moments have come."""
        if self.device is not None:
            torch.cuda.synchronize(self.device)

    def seconds(self, one: Any, other: Any) -> float:
        return float(other - one) if self.device is None else float(one.elapsed_time(other)) / 1000


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

    def run_turn(
        self,
        make: Callable[[], Iterable[Any]],
        row_counts: list[int],
        first_batches: int,
        seconds: float,
        *,
        is_transferred: bool = False,
    ) -> Turn:
        """Run epochs until ``seconds`` have passed, at least one; return what a row took after the first batches.

        Args:
            make: returns what one epoch iterates over.
            row_counts: the rows of each of its batches.
            first_batches: so many are left out: those that workers make while they start. All count if there are no
                others.
            is_transferred: True if batches come on the device.
        """

        def to_device(leaf: Any) -> Any:
            return leaf.to(device, non_blocking=True) if hasattr(leaf, "to") else leaf

        step, device = self.step, self.device
        first_batches = first_batches if len(row_counts) > first_batches else 0
        marks, parts, rows, first_seconds = _Marks(device), [0.0, 0.0, 0.0], 0, []
        started = time.perf_counter()
        while not rows or time.perf_counter() - started < seconds:
            begun = time.perf_counter()
            last, moments = marks.mark(), []
            for number, batch in enumerate(make()):
                if not number:
                    first_seconds.append(time.perf_counter() - begun)
                arrived = marks.mark()
                if device is not None and not is_transferred:
                    batch = optree.tree_map(to_device, batch)
                moved = marks.mark()
                if step is not None:
                    step(batch)
                done = marks.mark()
                if number >= first_batches:
                    moments.append((last, arrived, moved, done))
                last = done
            marks.finish()
            for moment in moments:
                for part in range(3):
                    parts[part] += marks.seconds(moment[part], moment[part + 1])
            rows += sum(row_counts[first_batches:])
        waiting, transfer, computing = (part / rows for part in parts)
        first = median(first_seconds)
        return Turn(
            first, first - waiting * sum(row_counts[: max(1, first_batches)]), waiting, transfer, computing, rows
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
    device = check_device(device)
    if device is not None and device.type not in ("cpu", "cuda"):
        raise LoaderError(f"found device={str(device)!r}; expected cpu or cuda: other devices are not measured")
    loader = source if isinstance(source, DataLoader) else None
    if loader is not None and (batch_size is not None or worker_count is not None):
        raise LoaderError("found a DataLoader with batch_size= or workers=; expected its own: leave these out")
    dataset: Any = source if loader is None else loader.dataset
    if isinstance(dataset, type):
        raise LoaderError(f"found the class {dataset.__name__} itself; expected a dataset, an object of it")
    if not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
        raise LoaderError(f"found {brief(dataset)} ({type(dataset).__name__}); expected a dataset, or its DataLoader")
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


@contextmanager
def messages_kept() -> Iterator[io.StringIO]:
    """Keep what is printed to stderr during the block: lines about a temporary store help nobody."""
    with io.StringIO() as kept, redirect_stderr(kept):
        yield kept


def batch_rows(row_count: int, batch_size: int) -> list[int]:
    """Return the rows of each batch of an epoch."""
    return [min(batch_size, row_count - start) for start in range(0, row_count, batch_size)]
