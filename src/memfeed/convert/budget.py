"""Say what a store will take: rows, bytes and seconds. Choose forms that fit a budget."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from memfeed.building.build import Build
from memfeed.building.claim import FORMS
from memfeed.convert.measured_forms import MakeStore, fastest_within, measure_forms, merged
from memfeed.convert.options import ConvertOptions
from memfeed.convert.overlap import LEAST_FACTOR
from memfeed.errors import MemfeedError
from memfeed.schema.codec import Packed
from memfeed.store import format
from memfeed.store.format import WORK_DIRECTORY
from memfeed.system import files, trust
from memfeed.system.progress import write_line
from memfeed.system.units import format_bytes, format_seconds

MOST_PROPOSED = 4
LARGE_SHARE = 0.5  # of the free disk: above it, smaller forms of a store are proposed


def mean_row_bytes(packed: Sequence[Sequence[Packed]]) -> float:
    """Return the mean number of bytes that one of these samples takes on disk."""
    sizes = [
        sum(sum(map(len, p.buffers)) + (8 + p.dims.nbytes if p.dims is not None else 0) for p in row) for row in packed
    ]
    return float(np.mean(sizes))


def describe_budget(
    path: Path, row_count: int | None, row_bytes: float, row_seconds: float, overlap: float = 1.0
) -> str:
    """Return a line with the rows, bytes and seconds that a store takes; ``row_count`` is None if it is not known.

    ``overlap`` says how many times it has each byte. Raises SpaceError if the disk has too little free space.
    """
    found = files.free_bytes(path)
    free = "free space unknown" if found is None else f"{format_bytes(found)} free"
    if row_count is None:
        unknown = "an unknown number of rows (an iterable without an end needs length=)"
        return f"{unknown}, {format_bytes(row_bytes)} a row; {free}"
    total = int(row_bytes * row_count)
    files.check_room(path, total, f"{row_count:,} rows of {format_bytes(row_bytes)}")
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
    with files.opened(record, os.O_CREAT) as fd:
        files.lock(fd, record, wait=True)
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
    except MemfeedError:
        return ""
    fitting = sorted((one for one in found if one.row_bytes * len(dataset) <= free), key=lambda one: -one.rows_a_second)
    if not fitting:
        return ". No form of this dataset fits there"
    return ". These forms fit: " + "; ".join(one.describe(len(dataset)) for one in fitting[:MOST_PROPOSED])


class _Chosen(msgspec.Struct, frozen=True):
    """The form that was chosen for a budget in bytes, as ``forms=`` has it."""

    budget: int
    given: Any
