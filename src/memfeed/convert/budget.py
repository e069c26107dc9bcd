"""Say what a store will take: rows, bytes and seconds. Choose forms that fit a budget.

The forms are measured with some samples of the dataset. Neighbouring samples may overlap, as windows of one text do: a
store of them has most bytes many times.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.utils.data import Subset

from memfeed.building.build import Build
from memfeed.building.claim import FORMS
from memfeed.convert.fingerprint import pack_samples
from memfeed.convert.forms import LOSSY, Forms, forms_of
from memfeed.convert.inputs import Input, read_sample
from memfeed.convert.options import ConvertOptions
from memfeed.convert.probe import ProbeResult
from memfeed.convert.recode import recode, recoded_schema
from memfeed.convert.splits import keep_of
from memfeed.convert.watchdog import Watchdog
from memfeed.errors import BuildError, MemfeedError, SampleError, SchemaError, SpaceError
from memfeed.random import Keys
from memfeed.schema import values
from memfeed.schema.codec import Packed
from memfeed.schema.compare import tensors_equal
from memfeed.schema.fields import RAW, Schema
from memfeed.schema.tree import Flattener
from memfeed.store import format
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.store import Store
from memfeed.system import files, locks, random_state, trust
from memfeed.system.messages import format_bytes, format_seconds
from memfeed.system.progress import write_line
from memfeed.system.share import Threads

LEAST_FACTOR = 2.0  # below it, overlap is not worth a word
SHORTEST = 8  # steps; shorter rows agree by chance
MOST_NEIGHBOURS = 2
MOST_SECONDS = 0.5  # that one sample may take


def overlap_factor(given: Input, result: ProbeResult) -> float:
    """Return how many times a store has each byte of a map-style dataset whose neighbouring samples overlap, else 1.

    Reads the samples after two of those that were probed. Fields count that are those of the neighbour, moved by a few
    steps along their first dim; of these, the ones of one sample may be parts of one sequence too.
    """
    if given.kind != "map" or given.length is None or result.probed.seconds > MOST_SECONDS:
        return 1.0
    flattener, watchdog, factors = Flattener(result.inferred.structure), Watchdog(0), []
    pairs = zip(result.probed.indices, result.probed.samples, strict=True)
    chosen = [(index, sample) for index, sample in pairs if index + 1 < given.length][:MOST_NEIGHBOURS]
    with random_state.preserved(), watchdog.watch(), contextlib.suppress(SampleError, SchemaError):
        for index, sample in chosen:
            neighbour = read_sample(given.dataset, index + 1, watchdog)
            factors.append(_factor(flattener(sample), flattener(neighbour)))
        return min(factors, default=1.0)
    return 1.0


def _factor(one: list[Any], other: list[Any]) -> float:
    byte_count = new_bytes = 0.0
    sequences: list[tuple[torch.Tensor, float]] = []
    for left, right in zip(map(values.as_tensor, one), map(values.as_tensor, other), strict=True):
        if left is None or right is None:
            continue
        size = left.numel() * left.element_size()
        byte_count += size
        moved = _moved_by(left, right)
        if not moved:
            new_bytes += size
        elif not any(_moved_by(earlier, left) or tensors_equal(earlier, left) for earlier, _ in sequences):
            sequences.append((left, size * moved / len(left)))
    return byte_count / (new_bytes + sum(size for _, size in sequences)) if sequences else 1.0


def _moved_by(one: torch.Tensor, other: torch.Tensor) -> int:
    """Return by how many steps `other` is further along one sequence than `one`; 0 if it is none of the same."""
    if one.shape != other.shape or one.dtype != other.dtype or not one.ndim or len(one) < SHORTEST or not one.numel():
        return 0
    a, b = (values.bytes_of(tensor).reshape(len(tensor), -1) for tensor in (one, other))
    if np.array_equal(a, b) or (a == a[:1]).all():
        return 0
    steps = np.flatnonzero((a[1 : len(a) // 2 + 1] == b[0]).all(1)) + 1
    return next((step for step in steps.tolist() if np.array_equal(a[step:], b[:-step])), 0)


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
        stores: dict[Any, Store] = {keep_of(first): first}  # by what is kept of images
        if options.keep is None and keep_of(first) is not None:  # a random step resizes images
            for size in ["full", "encoded", *IMAGE_SIDES] if options.forms.lossy else ["full", "encoded"]:
                if size not in stores and time.monotonic() < until:
                    with contextlib.suppress(MemfeedError):  # the files are no images that can be stored as they are
                        stores[size] = stored(str(size), merged(options.forms, size))
        codecs = (*LOSSLESS, *JPEGS) if options.forms.lossy else LOSSLESS
        for size, store in stores.items():
            is_shrunk = isinstance(size, int)
            found.append(MeasuredForm(RAW if size is None else size, *_cost(store), None, None, is_shrunk))
            for name in codecs if time.monotonic() < until else ():
                with contextlib.suppress(MemfeedError, ModuleNotFoundError):  # it suits no field, or is not installed
                    coded = recode(store, Path(folder) / f"{size} {name}.mf", _codecs(store, name), progress=False)
                    given = name if size is None else (size, name)
                    found.append(MeasuredForm(given, *_cost(coded), *_errors(coded), is_shrunk))
        has_floats = any(field.dtype in ("float32", "float64") for field in first.schema)
        for dtype in FLOATS if rounds_floats and has_floats and options.forms.floats is None else ():
            if time.monotonic() < until:
                with contextlib.suppress(MemfeedError):  # a value is too large
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
        options, forms=forms, keep=forms.keep, budget=None, workers=0, on_ray=False, lazily=False,
        overwrite=False, progress=False, worker_init_fn=None, is_sample=True,
    )  # fmt: skip


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
    return max((loss.mean for loss in losses), default=None), max((loss.largest for loss in losses), default=None)


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


MOST_PROPOSED = 4
CODED_SAMPLES, CODED_BYTES = 8, 64 << 20  # at most, that are compressed to estimate the bytes of a store
LARGE_SHARE = 0.5  # of the free disk: above it, smaller forms of a store are proposed


def mean_row_bytes(packed: Sequence[Sequence[Packed]]) -> float:
    """Return the mean number of bytes that one of these samples takes on disk."""
    sizes = [
        sum(sum(map(len, p.buffers)) + (8 + p.dims.nbytes if p.dims is not None else 0) for p in row) for row in packed
    ]
    return float(np.mean(sizes))


def stored_row_bytes(schema: Schema, result: ProbeResult, row_bytes: float) -> float:
    """Return the mean number of bytes that a few of the probed samples take on disk; ``row_bytes`` without a codec."""
    if all(field.coding is None for field in schema):
        return row_bytes
    count = max(1, min(CODED_SAMPLES, int(CODED_BYTES // max(row_bytes, 1))))
    return mean_row_bytes(pack_samples(result, schema, -(-len(result.probed.samples) // count)))


def describe_budget(
    path: Path,
    row_count: int | None,
    row_bytes: float,
    row_seconds: float,
    overlap: float = 1.0,
    is_new: bool = True,
) -> str:
    """Return a line with the rows, bytes and seconds that a store takes; ``row_count`` is None if it is not known.

    ``overlap`` is the `overlap_factor`. Raises SpaceError if the disk has too little free space; its
    text proposes other forms if the store is new, and no rows are appended.
    """
    found = files.free_bytes(path)
    free = "free space unknown" if found is None else f"{format_bytes(found)} free"
    if row_count is None:
        unknown = "an unknown number of rows (an iterable without an end needs length=)"
        return f"{unknown}, {format_bytes(row_bytes)} a row; {free}"
    total = int(row_bytes * row_count)
    choices = ", choose another path, or store fewer or smaller fields (forms=)" if is_new else ""
    files.check_room(path, total, f"{row_count:,} rows of {format_bytes(row_bytes)}", f"free some space{choices}")
    line = f"{row_count:,} rows, {format_bytes(total)}, about {format_seconds(row_count * row_seconds)}; {free}"
    is_large = found is not None and total > found * LARGE_SHARE
    smaller = "; smaller forms: forms= of memfeed.cache (memfeed cache --dry-run measures them)"
    again = (
        f"; neighbouring samples overlap, so that it has each byte about {overlap:,.0f} times: store the sequences "
        "whole, and read windows of them with Store.packed() or Store.windows() (docs/sequences.md)"
    )
    return line + (smaller if is_large else "") + (again if overlap >= LEAST_FACTOR else "")


def within_budget(dataset: Any, target: Path, options: ConvertOptions, make_store: MakeStore) -> ConvertOptions:
    """Return the options of a new store, with the fastest form that fits ``options.budget``.

    The choice is kept in the build, so that processes that fill one store together, and a later call that resumes it,
    take the same. Raises SpaceError if no form fits.
    """
    assert options.budget is not None
    root = format.build_path(target)
    record = root / WORK_DIRECTORY / FORMS
    trust.require_own_directory(root)
    files.make_directory(record.parent)
    with locks.locked(record, os.O_CREAT) as fd:
        kept = os.pread(fd, format.JSON_A_FILE, 0)
        chosen = msgspec.json.decode(kept, type=_Chosen) if kept else None
        if chosen is None or (chosen.budget != options.budget and not Build.is_begun(root)):
            try:
                found = measure_forms(dataset, options, make_store)
                best, other = fastest_within(found, options.budget, len(dataset))
            except BaseException:
                if not Build.is_begun(root):
                    files.remove_tree(root)
                raise
            chosen = _Chosen(options.budget, best.given)
            os.ftruncate(fd, 0)
            files.write_at(fd, np.frombuffer(msgspec.json.encode(chosen), np.uint8), 0)
            if options.says:
                following = f"; the next one is {other.describe(len(dataset))}" if other else ""
                write_line(f"memfeed: {best.describe(len(dataset))}{following}")
        given = tuple(chosen.given) if isinstance(chosen.given, list) else chosen.given
    forms = merged(options.forms, given)
    return msgspec.structs.replace(options, forms=forms, keep=forms.keep)


def forms_that_fit(dataset: Any, target: Path, options: ConvertOptions, make_store: MakeStore) -> str:
    """Return the forms of a map-style dataset whose bytes are free at ``target``, for an error message."""
    free = files.free_bytes(target) or 0
    lossy = msgspec.structs.replace(options, forms=msgspec.structs.replace(options.forms, lossy=True))
    try:
        found = measure_forms(dataset, lossy, make_store)
    except (MemfeedError, OSError):  # the directory of temporary files may be on the same disk
        return ""
    fitting = sorted((one for one in found if one.row_bytes * len(dataset) <= free), key=lambda one: -one.rows_a_second)
    if not fitting:
        return ". No form of this dataset fits there"
    return ". These forms fit: " + "; ".join(one.describe(len(dataset)) for one in fitting[:MOST_PROPOSED])


class _Chosen(msgspec.Struct, frozen=True):
    """The form that was chosen for a budget in bytes, as ``forms=`` has it."""

    budget: int
    given: Any
