"""The fingerprint of a dataset in its store: hashes of some samples, of its attributes, and of its class's source."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from memfeed.convert.inputs import Input, RayRows
from memfeed.convert.probe import ProbeResult, probe_indices
from memfeed.schema import codec
from memfeed.schema.codec import Packed
from memfeed.schema.fields import Field, Schema
from memfeed.schema.tree import Flattener
from memfeed.store.manifest import Fingerprint, Probe
from memfeed.system.code_content import content_of


def fingerprint_of(given: Input, hashes: tuple[Probe, ...] = ()) -> Fingerprint:
    """Return the fingerprint of a dataset. Columns in memory have no class whose source could change."""
    has_class = given.kind != "columns" and not isinstance(given.dataset, RayRows)
    source, name = hash_source(given.dataset) if has_class else ("", "")
    found = {} if given.watched is None else {path: one.text for path, one in given.watched.digests().items()}
    digests = found or msgspec.UNSET
    return Fingerprint(
        kind=given.kind, length=given.length, source=source, source_name=name, probes=hashes, digests=digests
    )


def pack_samples(result: ProbeResult) -> list[list[Packed]]:
    """Return each probed sample packed by itself. Raise SchemaError with the sample's index and the field."""
    found, flattener = result.inferred, Flattener(result.inferred.structure)
    pairs = zip(result.probed.indices, result.probed.samples, strict=True)
    return [codec.pack_sample(found.schema, flattener(sample), found.casts, index) for index, sample in pairs]


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


def hash_source(dataset: Any) -> tuple[str, str]:
    """Return the hash of the source of a dataset's class and of those it wraps, and the name of the class."""
    hashed, seen, name = xxhash.xxh3_64(), set[int](), f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    while dataset is not None and id(dataset) not in seen:
        seen.add(id(dataset))
        try:
            hashed.update(inspect.getsource(type(dataset)).encode())
        except Exception:  # defined in a notebook or at a prompt, built in, or in a file that is no Python any more
            hashed.update(_source_of_methods(type(dataset)).encode("utf-8", "replace"))
        dataset = getattr(dataset, "dataset", None)
    return hashed.hexdigest(), name


def _source_of_methods(kind: type) -> str:
    """Return the name of a class without a file, and its own methods: their source, or where there is none their code.

    A notebook keeps the source of functions, not that of classes.
    """
    parts = [kind.__qualname__]
    for value in vars(kind).values():
        function = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
        if isinstance(function, types.FunctionType):
            try:
                parts.append(inspect.getsource(function))
            except Exception:  # as above
                parts.append(repr(content_of(function.__code__)))
    return "".join(parts)
