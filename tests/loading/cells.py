"""Cells of the table of differences: a kind of samples in a way of use, loaded by DataLoader and by a Loader."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

import memfeed
from differences import attempt, differences
from known_differences import CACHE, DATASET, SAMPLES, STORE, USE, Known
from sample_kinds import KINDS
from ways_of_use import STARTING_PROCESSES, WAYS, Feed


class Cell(NamedTuple):
    """What one kind of samples shows in one way of use.

    ``rows`` are the numbers of the rows of the table that say so; ``unknown`` has the differences that none says.
    """

    kind: str
    way: str
    form: str
    rows: frozenset[int]
    unknown: list[str]

    def __str__(self) -> str:
        return f"{self.kind} | {self.way} | {self.form}: {self.unknown[:3]} ({len(self.unknown)})"


class Cells:
    """Runs cells, with stores in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._stores, self._theirs = dict[Any, Any](), dict[tuple[str, str], Any]()

    def run(self, kind: str, way: str, form: str) -> Cell:
        """Return what a Loader made as ``form`` says shows for this kind of samples and way of use."""
        if (kind, way) not in self._theirs:
            self._theirs[kind, way] = self._result(Feed(kind, DataLoader, lambda dataset: dataset), way)
        theirs = self._theirs[kind, way]
        ours = self._result(self._feed(kind, form), way)
        found = list(differences(theirs, ours))
        known: Sequence[Known] = (*SAMPLES, *USE)
        rows, unknown = set(), []
        for change in found:
            row = next((n for n, one in enumerate(known) if one.covers(kind, way, form, change)), None)
            unknown.append(change) if row is None else rows.add(row)
        return Cell(kind, way, form, frozenset(rows), unknown)

    def _result(self, feed: Feed, way: str) -> Any:
        torch.manual_seed(0)
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")  # of pinned memory without a GPU, of few cores, of read-only arrays
            return attempt(lambda: WAYS[way](feed))

    def _feed(self, kind: str, form: str) -> Feed:
        if form == STORE:
            return Feed(kind, memfeed.Loader, self._store)
        return Feed(kind, self._caching if form == CACHE else memfeed.Loader, lambda dataset: dataset)

    def _path(self) -> Path:
        self._count += 1
        return self._folder / f"{self._count}.mf"

    def _store(self, dataset: Dataset) -> Any:
        """Return the store of a dataset; of an equal one the same."""
        key = repr((type(dataset), _plain(dataset)))
        if key not in self._stores:
            self._stores[key] = attempt(lambda: memfeed.cache(dataset, self._path(), workers=0, progress=False))
        found = self._stores[key]
        if isinstance(found, memfeed.Store):
            return found
        raise found.error

    def _caching(self, dataset: Any, *args: Any, **options: Any) -> Any:
        return memfeed.Loader(dataset, *args, cache=self._path(), **options)


def _plain(dataset: Any) -> Any:
    inner = getattr(dataset, "dataset", None)
    return vars(dataset) if inner is None else (type(inner), _plain(inner))


STORED = [kind for kind in KINDS if not any(kind in row.kinds and "SchemaError" in row.change for row in SAMPLES)]
"""Kinds that a store can hold."""

TYPICAL = ["tensor", "nested", "tensors of varying length", "str", "list of ints", "number or None"]
"""Kinds of several layouts: those that a way of use may treat in its own way."""


def short_cells() -> list[tuple[str, str, str]]:
    """Return the cells of the short form: each kind, each way, each form, but not each with each."""
    ways = [way for way in WAYS if way not in STARTING_PROCESSES]
    found = [(kind, way, STORE) for kind in KINDS for way in ("batches", "batch_size=1", "collate_fn")]
    found += [(kind, way, STORE) for kind in TYPICAL[:2] for way in ways]
    found += [("tensor", way, (CACHE, DATASET)[number % 2]) for number, way in enumerate(ways)]
    return list(dict.fromkeys(found))


def all_cells() -> list[tuple[str, str, str]]:
    """Return the cells of the whole table. What starts processes is tried with a few kinds."""
    kinds = dict.fromkeys(WAYS, STORED) | dict.fromkeys(STARTING_PROCESSES, TYPICAL[:2])
    found = [(kind, "batches", STORE) for kind in KINDS]
    found += [(kind, way, STORE) for way in WAYS for kind in kinds[way]]
    found += [
        (kind, way, form) for way in WAYS for kind in TYPICAL[:3] if kind in kinds[way] for form in (CACHE, DATASET)
    ]
    found += [(kind, "batches", CACHE) for kind in STORED]
    return list(dict.fromkeys(found))
