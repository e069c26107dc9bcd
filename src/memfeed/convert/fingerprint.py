"""The fingerprint of a dataset: hashes of samples and of the source, which a store keeps and compares.

The hashes of some samples are compared with the rows as they were written, before the store is finished.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch.utils.data import ConcatDataset, Subset

from memfeed.building.build import Build
from memfeed.building.partial import DURABLE, WRITTEN
from memfeed.convert.forms import Rounded
from memfeed.convert.inputs import Input, RayRows, read_sample
from memfeed.convert.options import ConvertOptions
from memfeed.convert.probe import ProbeResult, probe_indices, spread
from memfeed.convert.source_hash import hash_source
from memfeed.convert.watchdog import Watchdog
from memfeed.convert.write_run import WritePlan, flatten_sample
from memfeed.errors import BuildError, SampleError
from memfeed.schema import codec
from memfeed.schema.codec import Int64Array, Packed
from memfeed.schema.compare import rows_equal
from memfeed.schema.containers import reads_as
from memfeed.schema.fields import Field, Schema
from memfeed.schema.tree import Flattener
from memfeed.splitting.generators import attribute_of
from memfeed.store import ragged
from memfeed.store.dataset_attributes import Attributes, ClassName, Kept, Loss, Targets, TargetsForm
from memfeed.store.manifest import Fingerprint, Probe
from memfeed.system import random_state


def fingerprint_of(given: Input, hashes: tuple[Probe, ...] = ()) -> Fingerprint:
    """Return the fingerprint of a dataset. Columns in memory have no class whose source could change."""
    has_class = given.kind != "columns" and not isinstance(given.dataset, RayRows)
    dataset = given.dataset if given.watched is None else given.watched.dataset  # as the user gave it: not cut
    after = () if given.watched is None else given.watched.steps_after_cut
    source, name = hash_source(dataset, after) if has_class else ("", "")
    found = {} if given.watched is None else {path: one.text for path, one in given.watched.digests().items()}
    digests = found or msgspec.UNSET
    return Fingerprint(
        kind=given.kind, length=given.length, source=source, source_name=name, probes=hashes, digests=digests
    )


def pack_samples(result: ProbeResult, schema: Schema, step: int = 1) -> list[list[Packed]]:
    """Return each of the probed samples, or one of ``step``, packed by itself.

    Raises SchemaError with the sample's index and the field.
    """
    casts, flattener = result.inferred.casts, Flattener(result.inferred.structure)
    pairs = list(zip(result.probed.indices, result.probed.samples, strict=True))[::step]
    return [codec.pack_sample(schema, flattener(sample), casts, index) for index, sample in pairs]


def hash_samples(schema: Schema, indices: Sequence[int], packed: Sequence[Sequence[Packed]]) -> tuple[Probe, ...]:
    """Return the hashes of packed samples."""
    return tuple(
        Probe(index=index, hashes=tuple(hash_packed(f, p) for f, p in zip(schema.fields, row, strict=True)))
        for index, row in zip(indices, packed, strict=True)
    )


def hash_columns(schema: Schema, columns: Sequence[Any], casts: frozenset[int], row_count: int) -> tuple[Probe, ...]:
    """Return the hashes of the probed rows of columns in memory, hashed column by column, which is faster."""
    indices = probe_indices(row_count)
    hashes = []
    for field_index, (field, column) in enumerate(zip(schema.fields, columns, strict=True)):
        hashes.append(list(hash_rows(field, codec.pack_rows(field, column, indices, cast=field_index in casts))))
    return tuple(Probe(index=index, hashes=row) for index, row in zip(indices, zip(*hashes, strict=True), strict=True))


def hash_packed(field: Field, packed: Packed) -> str:
    """Return the xxh3-64 of one row of a field: of its dims, then of its bytes."""
    return next(hash_rows(field, [packed]))


def hash_rows(field: Field, rows: Iterable[Packed]) -> Iterator[str]:
    """Yield the hashes of rows of a field that are packed one by one; see ``hash_packed``."""
    fixed_dims = np.array(field.row_shape or (1,), np.int64).tobytes()
    for packed in rows:
        hashed = xxhash.xxh3_64(fixed_dims if packed.dims is None else packed.dims.tobytes())
        for buffer in packed.buffers:
            hashed.update(buffer.data)
        yield hashed.hexdigest()


def kept_of(given: Input, metadata: Mapping[str, Any], options: ConvertOptions, losses: tuple[Loss, ...]) -> Kept:
    """Return what a store of this dataset keeps beside its columns; ``losses`` are those of its codecs."""
    classes, class_to_idx = classes_of(given.dataset)
    found = targets_of(given.dataset, given.length) if given.kind == "map" and given.length is not None else None
    targets, form = (None, None) if found is None else (found[0], Targets(form=found[1]))
    attributes = Attributes(
        classes=classes,
        class_to_idx=class_to_idx,
        targets=form,
        transform=options.recipe,
        keep=options.keep,
        losses=losses,
    )
    return Kept(metadata, attributes, targets)


def classes_of(dataset: Any) -> tuple[tuple[ClassName, ...] | None, dict[str, int] | None]:
    """Return the ``classes`` and ``class_to_idx`` of a dataset; None for what it does not have, or is no such thing."""
    if isinstance(dataset, Rounded) or reads_as(dataset, Subset):
        return classes_of(dataset.dataset)
    if reads_as(dataset, ConcatDataset):
        every_classes, every_numbers = zip(*map(classes_of, dataset.datasets), strict=True)
        return _shared(every_classes), _shared(every_numbers)
    label = _class_label(dataset)
    if label is not None:
        names = tuple(map(str, label[1]))
        return names, {name: index for index, name in enumerate(names)}
    found, numbers = attribute_of(dataset, "classes"), attribute_of(dataset, "class_to_idx")
    classes = tuple(map(_class_name, found)) if isinstance(found, list | tuple) else ()
    kept = tuple(name for name in classes if name is not None)
    is_map = isinstance(numbers, Mapping) and all(
        type(name) is str and type(index) is int and -(1 << 63) <= index < 1 << 63 for name, index in numbers.items()
    )
    return (kept if kept and len(kept) == len(classes) else None), (dict(numbers) if is_map else None)


def targets_of(dataset: Any, length: int) -> tuple[Int64Array, TargetsForm] | None:
    """Return the ``targets`` of all samples, int64 [length], and their form; None if there are no such numbers."""
    if isinstance(dataset, Rounded):
        return targets_of(dataset.dataset, length)
    if reads_as(dataset, Subset):
        base = targets_of(dataset.dataset, len(dataset.dataset))
        with contextlib.suppress(ValueError, TypeError, IndexError):  # indices may be keys of the dataset
            return None if base is None else (base[0][np.asarray(dataset.indices, np.int64)], base[1])
        return None
    if reads_as(dataset, ConcatDataset):
        parts = [targets_of(part, len(part)) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return (np.concatenate([part[0] for part in known]), known[0][1]) if len(known) == len(parts) else None
    label = _class_label(dataset)
    found = list(dataset.with_format(None)[label[0]]) if label is not None else attribute_of(dataset, "targets")
    form: TargetsForm = "tensor" if isinstance(found, torch.Tensor | np.ndarray) else "list"
    if isinstance(found, torch.Tensor):
        found = found.detach().cpu().numpy() if found.layout == torch.strided and not found.is_nested else None
    elif isinstance(found, list | tuple) and all(isinstance(one, int | np.integer) for one in found[:1]):
        with contextlib.suppress(ValueError, OverflowError, TypeError):
            found = np.asarray(found)
    if not isinstance(found, np.ndarray) or found.shape != (length,) or found.dtype.kind not in "iu":
        return None
    numbers: Int64Array = found.astype(np.int64)
    return (numbers, form) if np.array_equal(numbers, found) else None


def _class_name(value: Any) -> ClassName | None:
    if isinstance(value, list | tuple) and all(type(name) is str for name in value):
        return tuple(value)  # ImageNet's classes have several names
    return value if type(value) in (str, int) and not (type(value) is int and abs(value) >> 63) else None


def _class_label(dataset: Any) -> tuple[str, Sequence[str]] | None:
    """Return the column and names of the only ClassLabel of a Hugging Face dataset; None for any other dataset."""
    features = getattr(dataset, "features", None) if type(dataset).__module__.startswith("datasets.") else None
    found = [(key, one.names) for key, one in (features or {}).items() if type(one).__name__ == "ClassLabel"]
    return found[0] if len(found) == 1 else None


def _shared(values: Sequence[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else None


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
