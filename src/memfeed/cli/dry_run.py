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
from memfeed.cli.messages import UsageError
from memfeed.errors import MemfeedError
from memfeed.system.files import free_bytes
from memfeed.system.units import format_bytes

SAMPLES = 64
SECONDS = 1.0  # of reading, for each form
_FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("float16", {"floats": torch.float16}),
    ("bfloat16", {"floats": torch.bfloat16}),
    ("keep=full", {"split": True, "keep": "full"}),
    ("keep=256", {"split": True, "keep": 256}),
    ("keep=encoded", {"split": True, "keep": "encoded"}),
)


class Estimate(NamedTuple):
    """Bytes of a row on disk, and how many rows a loader reads in a second from the page cache."""

    form: str
    row_bytes: float
    rows_a_second: float


def print_estimates(dataset: Any, out: str, options: Mapping[str, Any]) -> None:
    """Print a table of the forms that a store of this dataset may have. Writes nothing at `out`.

    Raises UsageError for an iterable, whose samples cannot be read twice.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError("found --dry-run for an iterable; expected a dataset with len and []: some samples are read")
    count = len(dataset)
    indices = sorted({i * count // min(SAMPLES, count) for i in range(min(SAMPLES, count))})
    sample = Subset(dataset, indices)
    first, problem = _estimate("as given", sample, options)
    if first is None:
        typer.echo(f"as given: {problem}")
    found = [] if first is None else [first]
    for form, changes in _FORMS:
        one, _ = _estimate(form, sample, {**options, **changes})
        if one is not None and (first is None or one.row_bytes < 0.99 * first.row_bytes):
            found.append(one)
    free = free_bytes(Path(out))
    shown = format_bytes(free) if free else "unknown"
    typer.echo(f"{count:,} rows; measured with {len(indices)} of them; free: {shown}")
    typer.echo(f"{'form':<14}{'a row':>12}{'in all':>12}{'rows/s':>12}")
    for one in found:
        total = format_bytes(int(one.row_bytes * count))
        typer.echo(f"{one.form:<14}{format_bytes(one.row_bytes):>12}{total:>12}{one.rows_a_second:>12,.0f}")


def _estimate(form: str, sample: Any, options: Mapping[str, Any]) -> tuple[Estimate | None, str]:
    """Store the samples in this form, read them for a second. Return None, and why, where that is not possible."""
    with tempfile.TemporaryDirectory(prefix="memfeed-") as folder:
        try:
            store = memfeed.cache(sample, Path(folder) / "s.mf", **{**options, "workers": 0, "progress": False})
            loader = memfeed.Loader(store, min(32, len(store)))
            rows, started = 0, time.perf_counter()
            while time.perf_counter() - started < SECONDS:
                for _ in loader:
                    rows += min(32, len(store))
            seconds = time.perf_counter() - started
        except MemfeedError as error:
            return None, str(error)
        return Estimate(form, store.nbytes / len(store), rows / seconds), ""
