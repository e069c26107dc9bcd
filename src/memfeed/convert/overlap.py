"""Find out if neighbouring samples overlap, as windows of one text do: a store of samples has most bytes many times."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch

from memfeed.convert.inputs import Input, read_sample
from memfeed.convert.probe import ProbeResult
from memfeed.convert.watchdog import Watchdog
from memfeed.errors import SampleError, SchemaError
from memfeed.schema import values
from memfeed.schema.compare import tensors_equal
from memfeed.schema.tree import Flattener
from memfeed.system import random_state

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
