"""The price list: what a store would take in each form, measured with some samples of the dataset."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from memfeed.convert.cache import cache
from memfeed.convert.inputs import classify_input
from memfeed.errors import LoaderError, MemfeedError
from memfeed.loading.loader import Loader
from memfeed.system.files import free_bytes
from memfeed.system.units import format_bytes, printable
from memfeed.verdict.results import Form

SAMPLES = 64
SECONDS = 0.5  # of reading, for each form
AS_GIVEN = "as given"
_FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("float16", {"dtypes": {float: torch.float16}}),
    ("bfloat16", {"dtypes": {float: torch.bfloat16}}),
    ("keep=full", {"split": True, "keep": "full"}),
    ("keep=256", {"split": True, "keep": 256}),
    ("keep=encoded", {"split": True, "keep": "encoded"}),
)


def measure_forms(
    dataset: Any, options: Mapping[str, Any], samples: int = SAMPLES, seconds: float = inf
) -> tuple[list[Form], str]:
    """Return the forms that a store of this dataset may have, and why it cannot have the one that was asked for.

    Args:
        options: of `memfeed.cache`, the form that was asked for: it is "as given". Others are listed if they are
            smaller.
        samples: how many are stored in each form.
        seconds: after so many no other form is begun.

    Raises LoaderError for anything but a map-style dataset, and the error of `memfeed.cache` if there is no form.
    """
    given = classify_input(dataset)
    if given.kind != "map" or given.length is None:
        what = "columns, of which a store takes as many bytes" if given.kind == "columns" else "an iterable"
        raise LoaderError(
            f"found a dry run asked for {what}; expected a dataset with len and []: some samples are read"
        )
    count = given.length
    started = time.perf_counter()
    indices = sorted({i * count // min(samples, count) for i in range(min(samples, count))})
    sample = Subset(dataset, indices)
    first, has_floats = _measure(AS_GIVEN, sample, options, count)
    found = [first] if isinstance(first, Form) else []
    for name, changes in _FORMS:
        if time.perf_counter() - started > seconds or ("dtypes" in changes and not has_floats):
            continue
        one, _ = _measure(name, sample, {**options, **changes}, count)
        if isinstance(one, Form) and (not isinstance(first, Form) or one.row_bytes < 0.99 * first.row_bytes):
            found.append(one)
    if isinstance(first, MemfeedError) and not found:
        raise first
    return found, str(first) if isinstance(first, MemfeedError) else ""


def _measure(name: str, sample: Any, options: Mapping[str, Any], count: int) -> tuple[Form | MemfeedError, bool]:
    """Store the samples in this form, read them for some time. Return the error where that is not possible.

    The second value is False if the store has no floats that could be rounded to 16 bits.
    """
    with tempfile.TemporaryDirectory(prefix="memfeed-") as folder:
        try:
            store = cache(sample, Path(folder) / "s.mf", **{**options, "workers": 0, "progress": False})
            loader = Loader(store, min(32, len(store)))
            rows, started, cpu_started = 0, time.perf_counter(), time.process_time()
            while time.perf_counter() - started < SECONDS:
                for _ in loader:
                    pass
                rows += len(store)
            cpu_seconds = max(time.process_time() - cpu_started, 1e-9)
        except MemfeedError as error:
            return error, True
        row_bytes = store.nbytes / len(store)
        has_floats = any(field.dtype in ("float32", "float64") for field in store.schema)
        return Form(name, row_bytes, rows / cpu_seconds, row_bytes * count), has_floats


def print_forms(dataset: Any, options: Mapping[str, Any], place: Path) -> None:
    """Print a table of the forms that a store may have. Raises what `measure_forms` does; writes nothing."""
    forms, refused = measure_forms(dataset, options)
    if refused:
        print(f"{AS_GIVEN}: {printable(refused)}")
    count, free = len(dataset), free_bytes(place)
    shown = format_bytes(free) if free else "unknown"
    print(f"{count:,} rows; measured with {min(SAMPLES, count)} of them; free: {shown}")
    print(f"{'form':<14}{'a row':>12}{'in all':>12}{'rows/s a core':>15}")
    for one in forms:
        sizes = f"{format_bytes(one.row_bytes):>12}{format_bytes(int(one.total_bytes)):>12}"
        print(f"{one.name:<14}{sizes}{one.rows_a_second:>15,.0f}")
