"""The price list: what a store would take in each form, measured with some samples of the dataset."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from memfeed.convert import budget
from memfeed.convert.budget import SAMPLES
from memfeed.convert.cache import cache_one
from memfeed.convert.inputs import classify_input
from memfeed.convert.options import options_of
from memfeed.errors import LoaderError
from memfeed.system.files import free_bytes
from memfeed.system.messages import format_bytes
from memfeed.verdict.results import Form


def measure_forms(dataset: Any, options: Mapping[str, Any], samples: int = SAMPLES, seconds: float = inf) -> list[Form]:
    """Return the forms that a store of this dataset may have: the first one is what ``options`` give.

    Args:
        options: of `memfeed.cache`.
        samples: how many are stored in each form.
        seconds: after so many no other form is begun.

    Raises LoaderError for anything but a map-style dataset, and what `memfeed.cache` raises.
    """
    given = classify_input(dataset)
    if given.kind != "map" or given.length is None:
        what = "columns, of which a store takes as many bytes" if given.kind == "columns" else "an iterable"
        raise LoaderError(
            f"found a dry run asked for {what}; expected a dataset with len and []: some samples are read"
        )
    asked = {name: value for name, value in options.items() if name != "budget"}
    chosen = options_of(dataset, **{"budget": 1, **asked})  # it allows lossy forms
    chosen = msgspec.structs.replace(chosen, forms=msgspec.structs.replace(chosen.forms, lossy=True))
    found = budget.measure_forms(dataset, chosen, cache_one, rounds_floats=True, samples=samples, seconds=seconds)
    return [Form(one.written, one.row_bytes, one.rows_a_second, one.row_bytes * given.length) for one in found]


def print_forms(dataset: Any, options: Mapping[str, Any], place: Path) -> None:
    """Print a table of the forms that a store may have. Raises what `measure_forms` does; writes nothing."""
    forms = measure_forms(dataset, options)
    count, free = len(dataset), free_bytes(place)
    shown = format_bytes(free) if free else "unknown"
    print(f"{count:,} rows; measured with {min(SAMPLES, count)} of them; free: {shown}")
    print(f"{'forms=':<26}{'a row':>12}{'in all':>12}{'rows/s a core':>15}")
    for one in forms:
        sizes = f"{format_bytes(one.row_bytes):>12}{format_bytes(int(one.total_bytes)):>12}"
        print(f"{one.name:<26}{sizes}{one.rows_a_second:>15,.0f}")
