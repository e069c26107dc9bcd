"""Measure the forms that a store may have with some samples of its dataset, and choose one that fits a budget."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.utils.data import Subset

from memfeed.convert.forms import LOSSY, Forms, forms_of
from memfeed.convert.options import ConvertOptions
from memfeed.errors import BuildError, MemfeedError, SpaceError
from memfeed.random import Keys
from memfeed.store.store import Store
from memfeed.system.share import Threads
from memfeed.system.units import format_bytes

SAMPLES = 64
SECONDS = 0.5  # of reading, for each form
BATCH = 16
IMAGE_SIDES = (256,)
JPEGS = ("jpeg:95", "jpeg:90")
LOSSLESS = ("lz4", "zstd")


class MeasuredForm(NamedTuple):
    """What a store takes in one form.

    ``row_bytes`` are the bytes of a row on the disk, ``rows_a_second`` how many rows one core reads in batches from the
    page cache. ``mean_error`` and ``largest_error`` compare the pixels of lossy columns with those before they were
    compressed, in grey levels; None where nothing was changed. ``resizes`` is True if images are shrunk.
    """

    given: Any
    row_bytes: float
    rows_a_second: float
    mean_error: float | None = None
    largest_error: float | None = None
    resizes: bool = False

    def describe(self, row_count: int) -> str:
        """Return the form as it is written, and what it takes."""
        error = ""
        if self.mean_error is not None:
            error = f", pixels differ by {self.mean_error:.1f} of 255 on average and {self.largest_error:.0f} at most"
        elif self.resizes:
            error = ", smaller images"
        total = format_bytes(self.row_bytes * row_count)
        return f"forms={self.given!r}: {total}, {self.rows_a_second:,.0f} rows/s a core{error}"


def candidates(options: ConvertOptions, *, is_cut: bool) -> Iterator[Any]:
    """Yield the forms to measure, as ``forms=`` has them, for what a user leaves open."""
    lossy = options.forms.lossy
    yield "raw"
    yield from LOSSLESS
    if is_cut and options.keep is None:
        yield "encoded"
    if not lossy:
        return
    yield from JPEGS
    if is_cut and options.keep is None:
        for side in IMAGE_SIDES:
            yield side
            yield from ((side, jpeg) for jpeg in JPEGS)


def measure_forms(
    dataset: Any, options: ConvertOptions, make_store: Callable[[Any, Path, ConvertOptions], Store], *, is_cut: bool
) -> list[MeasuredForm]:
    """Store some samples in each form, and read them. Forms that do not suit the samples are left out.

    Args:
        dataset: a map-style dataset.
        options: of the conversion; fields for which it names a form keep that one.
        make_store: stores a dataset at a path.
        is_cut: the dataset's pipeline may be cut, so that images can be stored in several sizes.
    """
    count = len(dataset)
    sample = Subset(dataset, sorted({i * count // min(SAMPLES, count) for i in range(min(SAMPLES, count))}))
    found: list[MeasuredForm] = []
    with tempfile.TemporaryDirectory(prefix="memfeed-") as folder:
        raw: dict[Any, Store] = {}
        for number, given in enumerate(candidates(options, is_cut=is_cut)):
            forms = _merged(options.forms, given)
            changed = msgspec.structs.replace(
                options, forms=forms, keep=forms.keep, budget=None, workers=0, engine=None, lazily=False,
                overwrite=False, progress=False, worker_init_fn=None,
            )  # fmt: skip
            try:
                store = make_store(sample, Path(folder) / f"{number}.mf", changed)
            except (MemfeedError, ModuleNotFoundError):
                continue
            if forms.codec is None:
                raw[forms.keep] = store
            elif not _is_coded(store):
                continue  # the codec suits no field
            errors = _errors(store, raw[forms.keep]) if forms.keep in raw else None
            rate = _rows_a_second(store)
            found.append(
                MeasuredForm(given, store.nbytes / len(store), rate, *(errors or (None, None)), isinstance(forms.keep, int))
            )
    return found


def fastest_within(found: list[MeasuredForm], budget: int, row_count: int) -> tuple[MeasuredForm, MeasuredForm | None]:
    """Return the fastest form that fits a budget in bytes, and the next one. Raises SpaceError if none does."""
    fitting = sorted((one for one in found if one.row_bytes * row_count <= budget), key=lambda one: -one.rows_a_second)
    if fitting:
        return fitting[0], fitting[1] if len(fitting) > 1 else None
    smallest = min(found, key=lambda one: one.row_bytes, default=None)
    if smallest is None:
        raise BuildError("found no form in which the samples can be stored; leave budget= out to see the error")
    raise SpaceError(
        f"found no form of {row_count:,} rows that fits {format_bytes(budget)}; the smallest is "
        f"{smallest.describe(row_count)}. Expected a larger budget, or {lossy_hint()}"
    )


def lossy_hint() -> str:
    """Return how a user allows forms that change pixels."""
    return f'forms="{LOSSY}", which allows JPEG and smaller images'


def _merged(forms: Forms, given: Any) -> Forms:
    """Return the user's forms with a form for all other fields."""
    added = forms_of(given)
    return msgspec.structs.replace(forms, keep=forms.keep if added.keep is None else added.keep, codec=added.codec)


def _is_coded(store: Store) -> bool:
    manifest = store._view.manifest
    return manifest is not None and any(field.coding is not None for field in manifest.schema)


def _errors(store: Store, raw: Store) -> tuple[float, float] | None:
    """Return the mean and the largest difference of the fields that a lossy codec changed; None if none was."""
    manifest, total, largest, count = store._view.manifest, 0.0, 0.0, 0
    assert manifest is not None
    for index, field in enumerate(manifest.schema):
        if field.coding is None or field.coding.codec != "jpeg":
            continue
        for row in range(min(len(store), BATCH)):
            one, other = (np.asarray(one._view.columns[index].read_row(row), np.int16) for one in (store, raw))
            difference = np.abs(one - other)
            total, count = total + float(difference.sum()), count + difference.size
            largest = max(largest, float(difference.max(initial=0)))
    return (total / count, largest) if count else None


def _rows_a_second(store: Store) -> float:
    """Return how many rows one core reads and transforms in batches, in a random order."""
    rows, done, started = np.random.default_rng(0).permutation(len(store)), 0, time.perf_counter()
    names = {} if store.transform is None else store.schema.given_names()
    with Threads(1).in_use():
        while time.perf_counter() - started < SECONDS:
            for first in range(0, len(rows), BATCH):
                part = rows[first : first + BATCH]
                batch = store[part]
                if store.transform is not None:
                    keys = Keys(0, 0, torch.from_numpy(part))
                    store.transform.apply(batch, keys, given_names=names, ragged=store.schema.list_paths())
                done += len(part)
    return done / (time.perf_counter() - started)


