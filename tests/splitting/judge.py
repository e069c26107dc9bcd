"""Run a dataset through `memfeed.Loader`, and compare whole samples with those of the original dataset."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from judge_samples import WrongStructureError, describe, expected_batch, row_tree, sample_tree
from judge_statistics import Draw, compare, draw_of

import memfeed
from memfeed.errors import MemfeedError, RandomDataError, SchemaError, SplitError, StaleStoreError
from memfeed.splitting.remake import Remake
from memfeed.transforms import PerSample

BATCH = 16
Batches = Iterator[tuple[Any, list[int]]]
Feed = Callable[[Any, Path, int], tuple[str, Batches]]
"""Takes a dataset, a path and a number of epochs; returns the kind of a `Verdict`, and batches with their rows."""


@dataclass(frozen=True)
class Verdict:
    """What became of a dataset.

    Args:
        kind: "batched" or "sample" (the random part runs in every epoch), "whole" (nothing is random), "refused" (a
            RandomDataError, SplitError, SchemaError, StaleStoreError), "error" (another of memfeed, less plain to the
            user), or "crash" (any other exception).
        wrong: what differs from the original dataset; empty if nothing does.
        message: of the error.
    """

    kind: str
    wrong: tuple[str, ...] = ()
    message: str = ""

    @property
    def is_right(self) -> bool:
        """Return True if the samples are those of the dataset, or if it was refused."""
        return not self.wrong and self.kind not in ("error", "crash")

    def __str__(self) -> str:
        return f"{self.kind}: {'; '.join(self.wrong) or self.message or 'right'}"


def kind_of(store: Any) -> str:
    """Return "whole", "sample" or "batched": how the random part of a store's samples is computed."""
    transform = store.transform
    if transform is None:
        return "whole"
    return "sample" if any(isinstance(part, PerSample | Remake) for part in transform.modules()) else "batched"


def memfeed_loader(dataset: Any, path: Path, epochs: int) -> tuple[str, Batches]:
    """Return how `memfeed.Loader` feeds a dataset, and the batches of some epochs."""
    loader = memfeed.Loader(
        dataset, BATCH, shuffle=True, cache=path, num_workers=0, seed=5, return_rows=True, decoders=()
    )
    return kind_of(loader.dataset), _with_rows(loader, epochs)


def _with_rows(loader: Any, epochs: int) -> Batches:
    for _ in range(epochs):
        for batch in loader:
            if isinstance(batch, dict):
                yield {key: part for key, part in batch.items() if key != "rows"}, batch["rows"].tolist()
            elif isinstance(batch, tuple):
                yield batch[0], batch[1].tolist()
            else:  # a TensorDict
                rows = batch["rows"].tolist()
                yield batch.exclude("rows"), rows


def judge(
    make: Callable[[], Any],
    path: Path,
    *,
    draws: int = 1024,
    levels: float = 0.0,
    invariant: Callable[[Any], Any] | None = None,
    feed: Feed = memfeed_loader,
) -> Verdict:
    """Return what becomes of a dataset, and whether its samples are right.

    Args:
        make: returns the dataset, a new object each time.
        path: of the store.
        draws: how many samples of each source are compared: each row as often as any other, and four times at least.
        levels: by how many levels of 8 bits images may differ, where a batched transform resizes or blends.
        invariant: what holds for each sample of the dataset, whose leaves are tensors.
        feed: what is judged.

    Raises AssertionError if the invariant does not hold for the original dataset. The global generators are seeded.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # images are small: threads cost more than they save
    try:
        return _judge(make, path, draws, levels, invariant, feed)
    finally:
        torch.set_num_threads(threads)


def _judge(
    make: Callable[[], Any],
    path: Path,
    draws: int,
    levels: float,
    invariant: Callable[[Any], Any] | None,
    feed: Feed,
) -> Verdict:
    seed(1)
    dataset = make()
    count = len(dataset)
    epochs = max(4, -(-draws // count))
    kind = ""
    try:
        kind, batches = feed(dataset, path, epochs)
        seed(2)
        first = next(batches)
    except Exception as error:  # of any kind: a verdict too
        return _of_error(error)
    samples, theirs = _read_original(make, epochs)
    if invariant is not None:
        assert all(invariant(sample_tree(sample)) for sample in samples), "the invariant does not hold in the original"
    ours: list[list[Draw]] = [[] for _ in range(count)]
    places: list[list[tuple[int, int]]] = []
    try:
        for number, (batch, rows) in enumerate(itertools.chain([first], batches)):
            wrong = _batch_differs(batch, [samples[row] for row in rows]) if number * BATCH < count else ""
            places.append([(row, len(ours[row])) for row in rows])
            for at, row in enumerate(rows):
                tree = row_tree(batch, samples[row], at)
                wrong = wrong or ("" if invariant is None or invariant(tree) else "the invariant does not hold")
                ours[row].append(draw_of(tree))
            if wrong:
                return Verdict(kind, (wrong,))
    except WrongStructureError as error:
        return Verdict(kind, (str(error),))
    except Exception as error:  # of any kind: a verdict too
        return _of_error(error)
    if {len(row) for row in ours} != {epochs}:
        return Verdict(kind, ("rows are missing or repeated in an epoch",))
    return Verdict(kind, tuple(compare(theirs, ours, levels, places)))


def _of_error(error: Exception) -> Verdict:
    if isinstance(error, RandomDataError | SplitError | SchemaError | StaleStoreError):
        return Verdict("refused", message=str(error))
    return Verdict("error" if isinstance(error, MemfeedError) else "crash", message=f"{type(error).__name__}: {error}")


def _read_original(make: Callable[[], Any], epochs: int) -> tuple[list[Any], list[list[Draw]]]:
    """Return a sample of each row as it is, and the draws of each row."""
    dataset = make()
    count = len(dataset)
    samples: list[Any] = [None] * count
    draws: list[list[Draw]] = [[] for _ in range(count)]
    order = np.random.default_rng(3)
    seed(3)
    for _ in range(epochs):
        for row in order.permutation(count).tolist():
            samples[row] = dataset[row]
            draws[row].append(draw_of(sample_tree(samples[row])))
    return samples, draws


def _batch_differs(batch: Any, samples: list[Any]) -> str:
    """Return what differs in containers, types, dtypes and shapes from what `default_collate` makes of samples."""
    expected = expected_batch(samples)
    found = describe(batch)
    if expected is None or expected == found:
        return ""
    return f"a batch is {found}; default_collate gives {expected}"


def seed(value: int) -> None:
    """Seed the global generators."""
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)
