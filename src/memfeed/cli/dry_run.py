"""``memfeed cache --dry-run``: what a store would take in each form, measured with some samples of the dataset."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from torch.utils.data import Subset

import memfeed
from memfeed.cli.error_lines import UsageError
from memfeed.convert.inputs import classify_input
from memfeed.errors import MemfeedError
from memfeed.system.files import free_bytes
from memfeed.system.units import format_bytes

SAMPLES = 64
SECONDS = 1.0  # of reading, for each form
_FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("float16", {"forms": {float: torch.float16}}),
    ("bfloat16", {"forms": {float: torch.bfloat16}}),
    ("full", {"split": True, "forms": "full"}),
    ("256", {"split": True, "forms": 256}),
    ("encoded", {"split": True, "forms": "encoded"}),
)


class Estimate(NamedTuple):
    """Bytes of a row on disk, and how many rows a loader reads in a second from the page cache."""

    form: str
    row_bytes: float
    rows_a_second: float


def print_estimates(dataset: Any, out: str, options: Mapping[str, Any]) -> None:
    """Print a table of the forms that a store of this dataset may have. Writes nothing at `out`.

    Raises UsageError for anything but a map-style dataset, and the error of `memfeed.cache` if there is no form.
    """
    given = classify_input(dataset)
    if given.kind != "map" or given.length is None:
        what = "columns, of which a store takes as many bytes" if given.kind == "columns" else "an iterable"
        raise UsageError(f"found --dry-run for {what}; expected a dataset with len and []: some samples are read")
    count = given.length
    indices = sorted({i * count // min(SAMPLES, count) for i in range(min(SAMPLES, count))})
    sample = Subset(dataset, indices)
    first = _estimate("as given", sample, options)
    found = [first] if isinstance(first, Estimate) else []
    for form, changes in _FORMS:
        one = _estimate(form, sample, {**options, **changes})
        if isinstance(one, Estimate) and (not isinstance(first, Estimate) or one.row_bytes < 0.99 * first.row_bytes):
            found.append(one)
    if isinstance(first, MemfeedError):
        if not found:
            raise first
        typer.echo(f"as given: {first}")
    free = free_bytes(Path(out))
    shown = format_bytes(free) if free else "unknown"
    typer.echo(f"{count:,} rows; measured with {len(indices)} of them; free: {shown}")
    typer.echo(f"{'form':<14}{'a row':>12}{'in all':>12}{'rows/s':>12}")
    for one in found:
        total = format_bytes(int(one.row_bytes * count))
        typer.echo(f"{one.form:<14}{format_bytes(one.row_bytes):>12}{total:>12}{one.rows_a_second:>12,.0f}")


def _estimate(form: str, sample: Any, options: Mapping[str, Any]) -> Estimate | MemfeedError:
    """Store the samples in this form, read them for a second. Return the error where that is not possible."""
    with tempfile.TemporaryDirectory(prefix="memfeed-") as folder:
        try:
            store = memfeed.cache(sample, Path(folder) / "s.mf", **{**options, "workers": 0, "progress": False})
            loader = memfeed.Loader(store, min(32, len(store)))
            rows, started = 0, time.perf_counter()
            while time.perf_counter() - started < SECONDS:
                for _ in loader:
                    pass
                rows += len(store)
            seconds = time.perf_counter() - started
        except MemfeedError as error:
            return error
        return Estimate(form, store.nbytes / len(store), rows / seconds)
