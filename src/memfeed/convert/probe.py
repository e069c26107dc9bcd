"""Read some samples of a dataset before it is converted: infer the schema, refuse random samples, measure the time."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils.data import IterableDataset

from memfeed.convert.changes import Watched
from memfeed.convert.inputs import Input, RayRows, next_sample, read_sample
from memfeed.convert.options import ConvertOptions
from memfeed.convert.randomness import REPEATED, StreamDraws, check_iterable, read_checked, require_same_together
from memfeed.convert.watchdog import Watchdog
from memfeed.convert.write_run import no_sample
from memfeed.errors import SampleError, SchemaError
from memfeed.schema import values
from memfeed.schema.compare import leaves_like
from memfeed.schema.containers import device_of, map_leaves
from memfeed.schema.fields import Schema
from memfeed.schema.infer import Inferred, infer
from memfeed.schema.tree import open_container, types_of
from memfeed.splitting.generators import Generators
from memfeed.splitting.makers import makers_of
from memfeed.store.store import Store
from memfeed.system import random_state

SAMPLES = 16
MOST_SAMPLES = 32  # of a large dataset
_LARGE = 1024  # samples; each doubling above it adds two to the probe
MOST_SECONDS = 2.0
MOST_BYTES = 256 << 20


class ProbedSamples(msgspec.Struct):
    """Samples that were read, their indices, the seconds that one took, and the errors of those that raised."""

    indices: list[int] = []
    samples: list[Any] = []
    seconds: float = 0.0
    failed: dict[int, SampleError] = {}
    remaining: Iterator[Any] | None = None  # of an iterable: the samples after these
    draws: StreamDraws | None = None  # of an iterable: notices random ones

    def leave_out_none(self) -> bool:
        """Count samples that are None as failed. Return False if there is none, or no other."""
        pairs = list(zip(self.indices, self.samples, strict=True))
        kept = [(index, sample) for index, sample in pairs if sample is not None]
        if not kept or len(kept) == len(pairs):
            return False
        self.failed = {index: no_sample(index) for index, sample in pairs if sample is None} | self.failed
        self.indices, self.samples = [index for index, _ in kept], [sample for _, sample in kept]
        return True

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
    """Return the indices of the samples to probe, ascending: the first, the last, and one of each part between them.

    There are 16 of a small dataset and at most 32 of a large one. The position within the parts differs from part to
    part, so that data with a period (every second row is flipped, say) does not hide half of its rows.
    """
    count = SAMPLES + 2 * max(0, int(math.log2(max(sample_count, 1) / _LARGE)))
    count = min(count, MOST_SAMPLES, sample_count)
    if count == sample_count:
        return list(range(sample_count))
    edges = [1 + i * (sample_count - 2) // (count - 2) for i in range(count - 1)]
    draw = random.Random(sample_count).random  # the same for every version of Python
    return [0, *(first + int(draw() * (last - first)) for first, last in pairwise(edges)), sample_count - 1]


def spread(indices: Sequence[int]) -> list[int]:
    """Return `indices` so that the first of them already cover the whole range: both ends, the middle, the quarters."""
    inner = sorted(range(1, len(indices) - 1), key=lambda i: int(f"{i:032b}"[::-1], 2))
    order = [0, len(indices) - 1, *inner] if len(indices) > 1 else range(len(indices))
    return [indices[i] for i in order]


def probe_input(
    given: Input, options: ConvertOptions, compared: Sequence[int] | None = None, row_count: int = 0
) -> ProbeResult:
    """Read samples and infer the schema. Raise SchemaError, RandomDataError or SampleError, and
    CorruptStoreError for a damaged store that is copied.

    To compare with a store of `row_count` rows, `compared` has the indices of the samples that it remembers. Else the
    schema is ``options.like``, if there is one, which the samples must fit.
    """
    if compared is None:
        source = None if given.watched is None else given.watched.dataset
        if isinstance(source, Store) and source._has_checksums:  # the checksums of the copy would vouch for damage
            source.verify(progress=options.progress)
    is_proven = options.recipe is not None  # whole samples were compared when the pipeline was cut
    may_be_random = options.allow_random or is_proven or compared is not None or given.kind == "columns"
    if given.kind == "iterable":
        draws = None
        if isinstance(given.dataset, IterableDataset | RayRows) and not may_be_random:
            draws = check_iterable(given.dataset)
        # one sample more than the store has shows that the iterable has grown
        count = len(compared) + (row_count == len(compared)) if compared else SAMPLES
        probed = probe_iterable(
            given.dataset, count if options.length is None else min(count, options.length), given.watched, draws
        )
    else:
        assert given.length is not None
        indices = [i for i in compared if i < given.length] if compared else probe_indices(given.length)
        if given.kind == "columns" and compared is None:
            # all rows of a plain column are of one kind
            indices = indices[:1] if given.dataset.is_plain else sorted({*indices, *given.dataset.telling_rows()})
        probed = probe_map(
            given.dataset,
            indices,
            may_be_random=may_be_random,
            skip_errors=options.skips_errors,
            watched=given.watched,
        )
    if not probed.samples:
        reason = f"all {len(probed.failed)} that were probed raised" if probed.failed else "the iterable is empty"
        first_error = next(iter(probed.failed.values()), None)
        raise SchemaError(f"found no sample to probe: {reason}; expected at least one") from first_error
    try:
        inferred = _infer(given, options, probed)
    except SchemaError:
        if not probed.leave_out_none():
            raise
        inferred = _infer(given, options, probed)  # if this raises, it is not about None
        if not options.skips_errors or given.kind == "iterable":
            raise next(iter(probed.failed.values())) from None
    if given.watched is not None:
        given.watched.inferred, given.watched.seconds = inferred, probed.seconds
        given.watched.device = device_of(probed.samples) if options.lazily else None
        if not options.types and given.kind != "columns":
            given.watched.leaf_makers = makers_of(probed.samples, inferred.schema)
    types = types_of(probed.samples) + options.types
    if isinstance(given.dataset, Store):
        types += given.dataset._view.types
    result = ProbeResult(probed, inferred, types)
    return result if options.like is None or compared else _fit(result, options.like.decoded)


def _fit(result: ProbeResult, like: Schema) -> ProbeResult:
    """Return the probed samples with the schema ``like`` in place of the one that was inferred from them.

    Raises SchemaError that names the field if they do not fit.
    """
    found = result.inferred
    try:
        leaves_like(result.probed.samples, found, like)
    except SchemaError as error:
        raise SchemaError(
            f"found samples that do not fit the store: {error}. Change the samples (forms= casts), or write a new "
            "store of all samples with memfeed.cache"
        ) from None
    own, want = [field.path for field in found.schema], [field.path for field in like]
    fields = [msgspec.structs.replace(field, lengths_of=None) for field in like]
    casts = frozenset(want.index(own[index]) for index in found.casts if own[index] in want)
    schema = Schema(fields=tuple(fields), structure=like.structure)
    fitted = Inferred(schema, found.structure_like(like), casts, frozenset(range(len(fields))))
    return msgspec.structs.replace(result, inferred=fitted)


def _infer(given: Input, options: ConvertOptions, probed: ProbedSamples) -> Inferred:
    return infer(
        probed.samples,
        indices=probed.indices,
        fields=options.fields,
        kinds=given.dataset.kinds if given.kind == "columns" else {},
        dtypes=options.forms.dtypes,
        types=options.types,
    )


def probe_map(
    dataset: Any,
    indices: Sequence[int],
    *,
    may_be_random: bool,
    skip_errors: bool = False,
    watched: Watched | None = None,
) -> ProbedSamples:
    """Read the samples `indices`, at least one: for 2 seconds, or 256 MB of them.

    Those of the first second are read twice, unless they `may_be_random`. Raises RandomDataError and SampleError.
    """
    probed, byte_count, limit_start, watchdog = ProbedSamples(), 0, time.monotonic(), Watchdog(0)
    generators = None if may_be_random else Generators(dataset)
    opened, read_seconds, first_count = None if watched is None else watched.opened, list[float](), 0

    def read() -> Any:
        with contextlib.nullcontext() if opened is None else opened.noticed(index):
            started = time.monotonic()
            try:
                return read_sample(dataset, index, watchdog)
            finally:
                read_seconds.append(time.monotonic() - started)

    with random_state.preserved(), watchdog.watch():
        if not may_be_random:
            require_same_together(dataset, spread(indices))
        for index in spread(indices):
            seconds = time.monotonic() - limit_start
            if probed.indices and (seconds > MOST_SECONDS or byte_count > MOST_BYTES):
                break
            try:
                repeat = len(probed.indices) < REPEATED or seconds < MOST_SECONDS / 2
                is_first = not probed.indices
                sample = (
                    read_checked(dataset, index, read, generators, repeat, watched, is_first) if generators else read()
                )
            except SampleError as error:
                if not skip_errors:
                    raise
                probed.failed[index] = error
                continue
            if not probed.indices:
                generators = generators and Generators(dataset)  # the first sample may make generators
                if watched is not None and len(indices) > 1:
                    watched.note_first()
                limit_start, first_count = time.monotonic(), len(read_seconds)  # and open files
            byte_count += probed.add(index, sample)
    counted = read_seconds[first_count:] or read_seconds  # without the checks between them
    probed.seconds = sum(counted) / len(counted) if counted else 0.0
    order = sorted(range(len(probed.indices)), key=probed.indices.__getitem__)
    probed.indices, probed.samples = [probed.indices[i] for i in order], [probed.samples[i] for i in order]
    return probed


def probe_iterable(
    dataset: Any, count: int = SAMPLES, watched: Watched | None = None, draws: StreamDraws | None = None
) -> ProbedSamples:
    """Read the first `count` samples of an iterable, within the same limits as `probe_map`."""
    samples = iter(dataset) if draws is None else draws.watched(iter(dataset))
    probed, byte_count, started = ProbedSamples(remaining=samples, draws=draws), 0, time.monotonic()
    watchdog = Watchdog(0)
    assert probed.remaining is not None
    with watchdog.watch():
        while len(probed.samples) < count and time.monotonic() - started < MOST_SECONDS and byte_count < MOST_BYTES:
            index = len(probed.samples)
            try:
                sample = next_sample(probed.remaining, index, watchdog)
            except StopIteration:
                break
            byte_count += probed.add(index, sample)
            if watched is not None and not index and count > 1:
                watched.note_first()
    probed.seconds = (time.monotonic() - started) / max(len(probed.samples), 1)
    return probed


def _sample_bytes(sample: Any) -> int:
    try:
        opened = open_container(sample)
    except SchemaError:  # which is raised again where the field is known
        return 0
    if opened is not None:
        return sum(map(_sample_bytes, opened[1]))
    if isinstance(sample, torch.Tensor):
        return sample.numel() * sample.element_size()
    if isinstance(sample, np.ndarray):
        return sample.nbytes
    if hasattr(sample, "getbands"):  # a PIL image
        return int(sample.size[0] * sample.size[1] * len(sample.getbands()))
    return len(sample) if isinstance(sample, str | bytes) else 8
