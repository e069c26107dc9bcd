"""Measure the forms that a store may have with some samples of its dataset, and choose one that fits a budget."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.utils.data import Subset

from memfeed.convert.forms import LOSSY, Forms, forms_of
from memfeed.convert.options import ConvertOptions
from memfeed.convert.recode import recode, recoded_schema
from memfeed.errors import BuildError, MemfeedError, SpaceError
from memfeed.random import Keys
from memfeed.schema.fields import RAW
from memfeed.store.store import Store
from memfeed.system.share import Threads
from memfeed.system.units import format_bytes

SAMPLES = 64
SECONDS = 0.5  # of reading, for each form
BATCH = 16
IMAGE_SIDES = (256,)
JPEGS = ("jpeg:95", "jpeg:90")
LOSSLESS = ("lz4", "zstd")
FLOATS = (torch.float16, torch.bfloat16)


MakeStore = Callable[[Any, Path, ConvertOptions], Store]


class MeasuredForm(NamedTuple):
    """The bytes, the speed and the loss of a store in one form.

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

    @property
    def written(self) -> str:
        """The form as Python."""
        if isinstance(self.given, dict):
            return "{float: " + f"{self.given[float]}" + "}"
        return repr(self.given)

    def describe(self, row_count: int) -> str:
        """Return the form as it is written, and what it takes."""
        error = ""
        if self.mean_error is not None:
            error = f", pixels differ by {self.mean_error:.1f} of 255 on average and {self.largest_error:.0f} at most"
        elif self.resizes:
            error = ", smaller images"
        total = format_bytes(self.row_bytes * row_count)
        return f"forms={self.written}: {total}, {self.rows_a_second:,.0f} rows/s a core{error}"


def measure_forms(
    dataset: Any,
    options: ConvertOptions,
    make_store: MakeStore,
    *,
    rounds_floats: bool = False,
    samples: int = SAMPLES,
    seconds: float = math.inf,
) -> list[MeasuredForm]:
    """Store some samples in each form, and read them. Forms that do not suit the samples are left out.

    Args:
        dataset: a map-style dataset.
        options: of the conversion; fields for which it names a form keep that one. The first form is the one that
            ``options`` gives. Lossy ones are measured only if it allows them.
        make_store: stores a dataset at a path.
        rounds_floats: measure floats of 16 bits too.
        samples: how many are stored.
        seconds: after so many no other form is begun.

    Raises what a conversion raises if the samples cannot be stored as they are.
    """
    count, until = len(dataset), time.monotonic() + seconds
    sample = Subset(dataset, sorted({i * count // min(samples, count) for i in range(min(samples, count))}))
    found: list[MeasuredForm] = []
    with tempfile.TemporaryDirectory(prefix="memfeed-") as folder:

        def stored(name: str, forms: Forms) -> Store:
            return make_store(sample, Path(folder) / f"{name}.mf", _changed(options, forms))

        first = stored("first", options.forms)
        stores: dict[Any, Store] = {_kept(first): first}  # by what is kept of images
        if options.keep is None and _kept(first) is not None:  # a random step resizes images
            for size in ["full", "encoded", *IMAGE_SIDES] if options.forms.lossy else ["full", "encoded"]:
                if size not in stores and time.monotonic() < until:
                    with suppress(MemfeedError):  # the files are no images that can be stored as they are
                        stores[size] = stored(str(size), merged(options.forms, size))
        codecs = (*LOSSLESS, *JPEGS) if options.forms.lossy else LOSSLESS
        for size, store in stores.items():
            is_shrunk = isinstance(size, int)
            found.append(MeasuredForm(RAW if size is None else size, *_cost(store), None, None, is_shrunk))
            for name in codecs if time.monotonic() < until else ():
                with suppress(MemfeedError, ModuleNotFoundError):  # it suits no field, or is not installed
                    coded = recode(store, Path(folder) / f"{size} {name}.mf", _codecs(store, name), progress=False)
                    given = name if size is None else (size, name)
                    found.append(MeasuredForm(given, *_cost(coded), *_errors(coded), is_shrunk))
        has_floats = any(field.dtype in ("float32", "float64") for field in first.schema)
        for dtype in FLOATS if rounds_floats and has_floats and options.floats is None else ():
            if time.monotonic() < until:
                with suppress(MemfeedError):  # a value is too large
                    store = stored(str(dtype), msgspec.structs.replace(options.forms, floats=dtype))
                    found.append(MeasuredForm({float: dtype}, *_cost(store)))
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
        f"{smallest.describe(row_count)}. Expected a larger budget, or "
        f'forms="{LOSSY}", which allows JPEG and smaller images'
    )


def _changed(options: ConvertOptions, forms: Forms) -> ConvertOptions:
    """Return the options of a conversion of a few samples in this process."""
    return msgspec.structs.replace(
        options, forms=forms, keep=forms.keep, floats=forms.floats, budget=None, workers=0, engine=None, lazily=False,
        overwrite=False, progress=False, worker_init_fn=None, is_sample=True,
    )  # fmt: skip


def _kept(store: Store) -> Any:
    """Return what was kept of images, see ``Forms.keep``."""
    manifest = store._view.manifest
    return manifest.attributes.keep if manifest is not None and manifest.attributes else None


def merged(forms: Forms, given: Any) -> Forms:
    """Return the user's forms with a form for all other fields."""
    added = forms_of(given)
    return msgspec.structs.replace(forms, keep=forms.keep if added.keep is None else added.keep, codec=added.codec)


def _codecs(store: Store, name: str) -> Any:
    """Return ``forms=`` for all raw fields that a codec suits. Raises SchemaError if there is none."""
    assert store._view.manifest is not None
    pairs = zip(recoded_schema(store, forms_of(name)), store._view.manifest.schema, strict=True)
    return {new.path: name for new, old in pairs if new.coding is not None and old.coding is None}


def _cost(store: Store) -> tuple[float, float]:
    """Return the bytes of a row, and how many rows a core reads in a second."""
    return store.nbytes / len(store), _rows_a_second(store)


def _errors(store: Store) -> tuple[float | None, float | None]:
    """Return the mean and the largest difference of the fields that a lossy codec changed; None if there is none."""
    manifest = store._view.manifest
    losses = manifest.attributes.losses if manifest is not None and manifest.attributes else ()
    if not losses:
        return None, None
    return max(loss.mean for loss in losses), max(loss.largest for loss in losses)


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
