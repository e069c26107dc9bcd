"""Compare rows as they were written with the dataset, before the store is finished."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from memfeed.building.build import Build
from memfeed.building.partial import DURABLE, WRITTEN
from memfeed.convert.fingerprint import hash_rows
from memfeed.convert.inputs import read_sample
from memfeed.convert.probe import spread
from memfeed.convert.watchdog import Watchdog
from memfeed.convert.write_run import WritePlan, flatten_sample
from memfeed.errors import BuildError, SampleError
from memfeed.schema import codec
from memfeed.schema.compare import rows_equal
from memfeed.schema.fields import Field
from memfeed.store import ragged
from memfeed.system import random_state

MOST_SECONDS = 1.0
ROUNDING = 1e-3  # of the largest value: a worker has one thread, and may add floats in another order


def require_probed(build: Build) -> None:
    """Raise BuildError unless the rows of the probed samples have the hashes that the probe took.

    The rows of an iterable with several workers are in another order than the samples that the probe read, and those
    of a build that ``is_closing`` have moved, so neither is compared.
    """
    if build.is_closing or build.settings.shares > 1 or build.settings.fingerprint is None:
        return
    presence = build.presence()
    probes = [
        probe
        for probe in build.settings.fingerprint.probes
        if probe.index < len(presence) and presence[probe.index] in (WRITTEN, DURABLE)
    ]
    rows = [probe.index for probe in probes]
    for field_index, field in enumerate(build.schema):  # a column at a time, whose files are opened once
        if field.coding is not None:
            continue  # a lossy codec gives other values: these rows are compared with samples that are read again
        hashes = hash_rows(field, ragged.read_rows(build.root, field, rows))
        for probe, found in zip(probes, hashes, strict=True):
            if found != probe.hashes[field_index]:
                raise _differs(build, field, probe.index)


def require_reread(build: Build, dataset: Any, plan: WritePlan) -> None:
    """Read some samples of a map-style dataset again, for a second. Raise BuildError if a row is not what they are.

    These are samples between those of the probe, so that rows that a worker wrote are among them.
    """
    if build.is_closing or build.settings.fingerprint is None:
        return
    presence, watchdog, started = build.presence(), Watchdog(0), time.monotonic()
    between = indices_between([probe.index for probe in build.settings.fingerprint.probes])
    with random_state.preserved(), watchdog.watch():
        for row in spread(between):
            if presence[row] not in (WRITTEN, DURABLE):
                continue
            try:
                leaves = flatten_sample(plan, read_sample(dataset, row, watchdog), row)
            except SampleError:  # it raises now and then
                continue
            for field, again in zip(
                build.schema, codec.pack_sample(build.schema, leaves, plan.casts, row), strict=True
            ):
                if not rows_equal(field, again, ragged.read_row(build.root, field, row), ROUNDING):
                    raise _differs(build, field, row)
            if time.monotonic() - started > MOST_SECONDS:
                return


def indices_between(probed: Sequence[int]) -> list[int]:
    """Return an index in the middle of each two neighbours of ``probed``, which are ascending."""
    return [(one + other) // 2 for one, other in pairwise(probed) if other - one > 1]


def _differs(build: Build, field: Field, row: int) -> BuildError:
    return BuildError(
        f"found in row {row}, field {field.name}, another value than the dataset gives for that sample; expected the "
        "same each time. Either the sample is random: move the random part to Loader(transform=...), or keep these "
        "rows with allow='random'. Or its memory was filled again while it was read, or the dataset writes "
        "to its own data: return a copy, as in `return self.buffer.clone()`. To start from the beginning, remove "
        f"{build.root}"
    )
