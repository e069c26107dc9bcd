"""Looking at a dataset before it is copied: a few real samples, whether they are random, how much it will be."""

from __future__ import annotations

import inspect
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from memfeed.convert.watchdog import Readers
from memfeed.errors import RandomDataError, SampleError, SchemaError
from memfeed.schema import codec, values
from memfeed.schema.codec import Packed
from memfeed.schema.containers import map_leaves
from memfeed.schema.fields import Field, Schema, display
from memfeed.schema.infer import Inferred, infer
from memfeed.schema.tree import Flattener, open_container
from memfeed.store.manifest import Probe

SAMPLES = 16
MOST_SECONDS = 2.0
MOST_BYTES = 256 << 20
REPEATED = 3  # samples read a second time under another seed
_SEEDS = (20_011, 40_031)
_GENERATORS = ("torch", "numpy", "random")


class Probed(msgspec.Struct):
    """Samples read: their indices, themselves, and how long one took."""

    indices: list[int]
    samples: list[Any]
    seconds: float = 0.0
    failed: dict[int, SampleError] = {}


def indices_of(n: int) -> list[int]:
    """Which samples of ``n`` are probed: spread evenly, first and last among them."""
    return sorted({round(i * (n - 1) / (SAMPLES - 1)) for i in range(SAMPLES)}) if n else []


def _states() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    states = torch.get_rng_state().numpy().tobytes(), (kind, np.asarray(keys).tobytes(), *rest), random.getstate()
    return dict(zip(_GENERATORS, states, strict=True))


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restores the global generators of torch, numpy and Python on leaving."""
    saved = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(saved[0])
        np.random.set_state(saved[1])
        random.setstate(saved[2])


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # the CPU's alone: torch.manual_seed would touch every device
    np.random.seed(seed)
    random.seed(seed)


def read(dataset: Any, index: int, readers: Readers) -> Any:
    """``dataset[index]``; raises SampleError with the index if the dataset raises."""
    readers.begin(0, index)
    try:
        return dataset[index]
    except Exception as error:
        raise SampleError(
            f"sample {index}: the dataset raised {type(error).__name__}: {error}; "
            'mend the dataset, or leave such samples out with on_error="skip"'
        ) from error
    finally:
        readers.end(0)


def probe_map(dataset: Any, indices: Sequence[int], *, allow_random: bool, skip_errors: bool = False) -> Probed:
    """Reads the samples named (2 s and 256 MB of them at most, at least one); raises RandomDataError, SampleError.

    A sample is random if it draws from a global generator in a way that depends on its state, or if its values differ
    when it is read again under another seed.
    """
    probed, spent, started = Probed([], []), 0, time.monotonic()
    clock, readers = started, Readers(0)
    with kept_generators(), readers.watched():
        for index in indices:
            if probed.indices and (time.monotonic() - clock > MOST_SECONDS or spent > MOST_BYTES):
                break
            if not allow_random:
                _seed(_SEEDS[0])
            before = _states()
            try:
                sample = read(dataset, index, readers)
            except SampleError as error:
                if not skip_errors:
                    raise
                probed.failed[index] = error
                continue
            after = _states()
            drew = [which for which in _GENERATORS if before[which] != after[which]]
            if not allow_random and (drew or len(probed.indices) < REPEATED):
                _check_repeatable(dataset, index, sample, {which: after[which] for which in drew}, readers)
            if not probed.indices:
                clock = time.monotonic()  # the first sample of a dataset may open its files
            probed.indices.append(index)
            probed.samples.append(
                map_leaves(values.copy_value, sample)
            )  # the dataset may use its memory for the next one
            spent += sample_bytes(sample)
    probed.seconds = (time.monotonic() - started) / max(len(probed.indices) + min(len(probed.indices), REPEATED), 1)
    return probed


def probe_iterable(dataset: Any, count: int = SAMPLES) -> tuple[Probed, Iterator[Any]]:
    """Reads the first samples of an iterable, within the same limits; also gives the iterator, to go on with."""
    probed, spent, started = Probed([], []), 0, time.monotonic()
    samples, readers = iter(dataset), Readers(0)
    with readers.watched():
        while len(probed.samples) < count and time.monotonic() - started < MOST_SECONDS and spent < MOST_BYTES:
            readers.begin(0, len(probed.samples))
            try:
                sample = next(samples)
            except StopIteration:
                break
            except Exception as error:
                raise SampleError(
                    f"sample {len(probed.samples)}: the iterable raised {type(error).__name__}: {error}"
                ) from error
            finally:
                readers.end(0)
            probed.indices.append(len(probed.samples))
            probed.samples.append(map_leaves(values.copy_value, sample))
            spent += sample_bytes(sample)
    probed.seconds = (time.monotonic() - started) / max(len(probed.samples), 1)
    return probed, samples


def check_iterable(dataset: Any) -> None:
    """Raises RandomDataError if an iterable that can start anew gives other samples under another seed."""
    one_pass, another = iter(dataset), iter(dataset)
    if one_pass is another:
        return  # it can be iterated once only
    with kept_generators():
        _seed(_SEEDS[0])
        first = list(itertools.islice(one_pass, REPEATED))
        _seed(_SEEDS[1])
        second = list(itertools.islice(another, REPEATED))
        if len(second) < len(first):
            raise SchemaError(
                f"found {len(first)} samples or more in the first pass over the iterable and {len(second)} in another; "
                "expected each iter() to start anew: make __iter__ open its source itself"
            )
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            different = differing(one, other)
            if different is not None:
                raise _random(dataset, f"iterating twice gave different values in field {different} of sample {index}")


def _check_repeatable(dataset: Any, index: int, first: Any, drew: dict[str, Any], readers: Readers) -> None:
    """Reads a sample again; ``drew`` are the generators it drew from, with the states they were left in."""
    _seed(_SEEDS[1])
    again = read(dataset, index, readers)
    states = _states()
    # a dataset that seeds a generator itself leaves it in one state both times, which is not random
    drew = {which: state for which, state in drew.items() if states[which] != state}
    different = differing(first, again)
    if different is None and not drew:
        return
    if different is not None:
        found = f"reading sample {index} twice gave different values in field {different}"
    else:
        found = f"reading sample {index} drew from the global generator of {' and '.join(drew)}"
    raise _random(dataset, found)


def _random(dataset: Any, found: str) -> RandomDataError:
    transform = describe_transforms(dataset)
    shown = f" (its transform: {transform})" if transform else ""
    return RandomDataError(
        f"found random samples: {found}{shown}; "
        "expected samples that are the same each time, because a store keeps what the dataset returns once, for every "
        "epoch. Move the random part (crops, flips, jitter, noise) to Loader(..., transform=...), which draws anew for "
        "every sample and epoch; or pass allow_random=True to keep this one draw for ever"
    )


def differing(one: Any, other: Any) -> str | None:
    """The displayed path of the first leaf in which two samples differ (NaN equals NaN); None if they are equal."""
    try:
        structure = infer([one]).structure
    except SchemaError:
        return None  # no sample for a store, which is said later and better
    try:
        structure = infer([one, other]).structure
    except SchemaError:
        return "(its structure)"
    flattener = Flattener(structure)
    for path, a, b in zip(structure.leaves(), flattener(one), flattener(other), strict=True):
        if not same(a, b):
            return display(path)
    return None


def same(a: Any, b: Any) -> bool:
    """Whether two leaves are equal, NaN being equal to NaN."""
    left, right = values.as_tensor(a), values.as_tensor(b)
    if left is None or right is None:
        return bool(a == b) or (a != a and b != b)
    return values.bytes_equal(left, right)


def describe_transforms(dataset: Any) -> str:
    """The transforms of a dataset and of those it wraps, as they print."""
    shown: list[str] = []
    seen: set[int] = set()
    while dataset is not None and id(dataset) not in seen:
        seen.add(id(dataset))
        for name in ("transform", "target_transform", "transforms"):
            value = getattr(dataset, name, None)
            if value is not None and not (shown and name == "transforms"):  # torchvision's holds the other two again
                shown.append(repr(value))
        dataset = getattr(dataset, "dataset", None)
    return " ".join(" ".join(shown).split())


def sample_bytes(sample: Any) -> int:
    """About how many bytes of data a sample is."""
    opened = open_container(sample)
    if opened is not None:
        return sum(map(sample_bytes, opened[1]))
    if isinstance(sample, torch.Tensor):
        return sample.numel() * sample.element_size()
    if isinstance(sample, np.ndarray):
        return sample.nbytes
    if hasattr(sample, "getbands"):  # a PIL image
        return int(sample.size[0] * sample.size[1] * len(sample.getbands()))
    return len(sample) if isinstance(sample, str | bytes) else 8


def pack_samples(found: Inferred, probed: Probed) -> list[tuple[Packed, ...]]:
    """Each sample packed by itself, one ``Packed`` per field; raises SchemaError naming the sample and the field."""
    flattener, rows = Flattener(found.structure), []
    for index, sample in zip(probed.indices, probed.samples, strict=True):
        row = []
        for number, (field, leaf) in enumerate(zip(found.schema.fields, flattener(sample), strict=True)):
            try:
                row.append(codec.pack(field, [leaf], cast=number in found.casts))
            except SchemaError as error:
                raise SchemaError(f"sample {index}, field {field.name}: {error}") from None
        rows.append(tuple(row))
    return rows


def hash_packed(field: Field, packed: Packed) -> str:
    """The xxh3-64 of one row of a field: its dims where they vary, then its bytes."""
    hashed = xxhash.xxh3_64()
    if packed.dims is not None:
        hashed.update(packed.dims.tobytes())
    else:
        hashed.update(np.array(field.row_shape or (1,), np.int64).tobytes())
    for buffer in packed.buffers:
        hashed.update(buffer.data)
    return hashed.hexdigest()


def probe_hashes(schema: Schema, indices: Sequence[int], packed: Sequence[tuple[Packed, ...]]) -> tuple[Probe, ...]:
    """The hashes of the samples probed."""
    return tuple(
        Probe(index=index, hashes=tuple(hash_packed(f, p) for f, p in zip(schema.fields, row, strict=True)))
        for index, row in zip(indices, packed, strict=True)
    )


def column_hashes(schema: Schema, columns: Sequence[Any], casts: frozenset[int], rows: int) -> tuple[Probe, ...]:
    """``probe_hashes`` of columns in memory, a column at a time: for many columns that is faster."""
    indices = indices_of(rows)
    hashes = []
    for number, (field, column) in enumerate(zip(schema.fields, columns, strict=True)):
        packed = codec.pack_column(field, column[indices], cast=number in casts)
        parts = packed.buffers[0].reshape(len(indices), field.row_bytes)
        hashes.append([hash_packed(field, Packed([part], None)) for part in parts])
    return tuple(Probe(index=index, hashes=row) for index, row in zip(indices, zip(*hashes, strict=True), strict=True))


def source_of(dataset: Any) -> tuple[str, str]:
    """The hash of the source text of a dataset's class (and of those it wraps), and the class's name."""
    hashed, seen, name = xxhash.xxh3_64(), set[int](), f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    while dataset is not None and id(dataset) not in seen:
        seen.add(id(dataset))
        try:
            hashed.update(inspect.getsource(type(dataset)).encode())
        except (OSError, TypeError):  # defined at a prompt, or built in
            hashed.update(type(dataset).__qualname__.encode())
        dataset = getattr(dataset, "dataset", None)
    return hashed.hexdigest(), name
