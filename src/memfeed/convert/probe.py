"""Read some samples of a dataset before it is converted: infer the schema, refuse random samples, measure the time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils.data import IterableDataset

from memfeed.convert.inputs import ConvertOptions, Input, read_sample
from memfeed.convert.randomness import REPEATED, check_iterable, read_checked
from memfeed.convert.watchdog import Watchdog
from memfeed.errors import SampleError, SchemaError
from memfeed.schema import values
from memfeed.schema.containers import map_leaves
from memfeed.schema.infer import Inferred, infer
from memfeed.schema.tree import open_container, types_of
from memfeed.store.store import Store
from memfeed.system import random_state

SAMPLES = 16
MOST_SECONDS = 2.0
MOST_BYTES = 256 << 20


class ProbedSamples(msgspec.Struct):
    """Samples that were read, their indices, the seconds that one took, and the errors of those that raised."""

    indices: list[int] = []
    samples: list[Any] = []
    seconds: float = 0.0
    failed: dict[int, SampleError] = {}
    remaining: Iterator[Any] | None = None  # of an iterable: the samples after these

    def add(self, index: int, sample: Any) -> int:
        """Keep a copy of `sample`, whose memory the dataset may use again. Return about how many bytes it has."""
        self.indices.append(index)
        self.samples.append(map_leaves(values.copy_value, sample))
        return _sample_bytes(sample)


class ProbeResult(msgspec.Struct, frozen=True):
    """The samples that were read, the schema inferred from them, and the classes of their containers."""

    probed: ProbedSamples
    inferred: Inferred
    types: tuple[type, ...]


def probe_indices(sample_count: int) -> list[int]:
    """Return the indices of the samples to probe: evenly spaced, the first and the last among them."""
    last = sample_count - 1
    return sorted({round(i * last / (SAMPLES - 1)) for i in range(SAMPLES)}) if sample_count else []


def probe_input(
    given: Input, options: ConvertOptions, compared: Sequence[int] | None = None, row_count: int = 0
) -> ProbeResult:
    """Read samples and infer the schema. Raise SchemaError, RandomDataError or SampleError.

    To compare with a store of `row_count` rows, `compared` has the indices of the samples that it remembers.
    """
    may_be_random = options.allow_random or compared is not None or given.kind == "columns"
    if given.kind == "iterable":
        if isinstance(given.dataset, IterableDataset) and not may_be_random:
            check_iterable(given.dataset)
        # one sample more than the store has shows that the iterable has grown
        probed = probe_iterable(given.dataset, len(compared) + (row_count == len(compared)) if compared else SAMPLES)
    else:
        assert given.length is not None
        indices = [i for i in compared if i < given.length] if compared else probe_indices(given.length)
        if given.kind == "columns" and compared is None:
            # all rows of a plain column are of one kind
            indices = indices[:1] if given.dataset.is_plain else sorted({*indices, *given.dataset.telling_rows()})
        probed = probe_map(given.dataset, indices, may_be_random=may_be_random, skip_errors=options.skip_errors)
    if not probed.samples:
        reason = f"all {len(probed.failed)} that were probed raised" if probed.failed else "the iterable is empty"
        first_error = next(iter(probed.failed.values()), None)
        raise SchemaError(f"found no sample to probe: {reason}; expected at least one") from first_error
    inferred = infer(
        probed.samples,
        indices=probed.indices,
        fields=options.fields,
        kinds=given.dataset.kinds if given.kind == "columns" else {},
        dtypes=options.dtypes,
        types=options.types,
    )
    types = types_of(probed.samples) + options.types
    if isinstance(given.dataset, Store):
        types += given.dataset.types
    return ProbeResult(probed, inferred, types)


def probe_map(dataset: Any, indices: Sequence[int], *, may_be_random: bool, skip_errors: bool = False) -> ProbedSamples:
    """Read the samples `indices`: at least one, at most 2 seconds or 256 MB of them.

    Raises RandomDataError and SampleError.
    """
    probed, byte_count, started = ProbedSamples(), 0, time.monotonic()
    limit_start, watchdog = started, Watchdog(0)
    with random_state.preserved(), watchdog.watch():
        for index in indices:
            if probed.indices and (time.monotonic() - limit_start > MOST_SECONDS or byte_count > MOST_BYTES):
                break
            read = partial(read_sample, dataset, index, watchdog)
            try:
                repeat = len(probed.indices) < REPEATED
                sample = read() if may_be_random else read_checked(dataset, index, read, repeat)
            except SampleError as error:
                if not skip_errors:
                    raise
                probed.failed[index] = error
                continue
            if not probed.indices:
                limit_start = time.monotonic()  # the first sample of a dataset may open its files
            byte_count += probed.add(index, sample)
    probed.seconds = (time.monotonic() - started) / max(len(probed.indices) + min(len(probed.indices), REPEATED), 1)
    return probed


def probe_iterable(dataset: Any, count: int = SAMPLES) -> ProbedSamples:
    """Read the first `count` samples of an iterable, within the same limits as `probe_map`."""
    probed, byte_count, started = ProbedSamples(remaining=iter(dataset)), 0, time.monotonic()
    watchdog = Watchdog(0)
    assert probed.remaining is not None
    with watchdog.watch():
        while len(probed.samples) < count and time.monotonic() - started < MOST_SECONDS and byte_count < MOST_BYTES:
            index = len(probed.samples)
            watchdog.begin_read(0, index)
            try:
                sample = next(probed.remaining)
            except StopIteration:
                break
            except Exception as error:
                raise SampleError(f"sample {index}: the iterable raised {type(error).__name__}: {error}") from error
            finally:
                watchdog.end_read(0)
            byte_count += probed.add(index, sample)
    probed.seconds = (time.monotonic() - started) / max(len(probed.samples), 1)
    return probed


def _sample_bytes(sample: Any) -> int:
    opened = open_container(sample)
    if opened is not None:
        return sum(map(_sample_bytes, opened[1]))
    if isinstance(sample, torch.Tensor):
        return sample.numel() * sample.element_size()
    if isinstance(sample, np.ndarray):
        return sample.nbytes
    if hasattr(sample, "getbands"):  # a PIL image
        return int(sample.size[0] * sample.size[1] * len(sample.getbands()))
    return len(sample) if isinstance(sample, str | bytes) else 8
