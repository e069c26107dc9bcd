"""Merge the manifests of several stores, whose rows follow one another: fields, attributes, fingerprint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from memfeed.errors import SchemaError
from memfeed.schema.codec import Int64Array
from memfeed.schema.compare import common_schema
from memfeed.schema.fields import Schema
from memfeed.store.dataset_attributes import Attributes, Targets, targets_column
from memfeed.store.manifest import Fingerprint, Manifest, Probe

MOST_PROBES = 64  # of a fingerprint: each append adds some, and cache() reads their samples again


class Part(NamedTuple):
    """A finished store whose rows become rows of another one."""

    path: Path
    manifest: Manifest

    @property
    def attributes(self) -> Attributes:
        """The attributes; empty ones if there are none."""
        return self.manifest.attributes or Attributes()

    @property
    def sample_count(self) -> int:
        """How many samples its dataset had: also those that were skipped."""
        return self.manifest.rows + len(self.manifest.skipped)


def merged_schema(parts: Sequence[Part]) -> Schema:
    """Return the schema of the rows of all parts. Raise SchemaError that names the first difference."""
    try:
        return common_schema([(part.path, part.manifest.schema) for part in parts])
    except SchemaError as error:
        raise SchemaError(
            f"{error}. Write one of them again with memfeed.cache (forms= and fields= choose how a field is stored), "
            "or with memfeed.recode if only the codecs differ"
        ) from None


def merged_attributes(parts: Sequence[Part]) -> tuple[Attributes, Int64Array | None]:
    """Return the attributes of the rows of all parts, and the targets that are to be written beside the columns.

    Those of the first part, with which the others must agree if they have them. Raises SchemaError if they do not.
    """
    first = parts[0]
    for part in parts[1:]:
        for name in ("classes", "class_to_idx", "transform"):
            one, other = getattr(first.attributes, name), getattr(part.attributes, name)
            if one != other and (name == "transform" or (one is not None and other is not None)):
                raise SchemaError(
                    f"{part.path}: found another {name} than that of {first.path}; expected the same"
                    + (": pass the same split= for both" if name == "transform" else ", in the same order")
                )
    own = [part.attributes.targets for part in parts]
    kept = msgspec.structs.replace(first.attributes, targets=None)
    if own[0] is None:
        return kept, None
    fields = {one.field for one in own if one is not None}
    if len(fields) == 1 and None not in fields:  # the column has the targets of all rows
        return msgspec.structs.replace(kept, targets=own[0]), None
    numbers = [_targets(part, one) for part, one in zip(parts, own, strict=True)]
    return msgspec.structs.replace(kept, targets=Targets(form=own[0].form)), np.concatenate(numbers)


def _targets(part: Part, targets: Targets | None) -> Int64Array:
    if targets is None:
        raise SchemaError(
            f"{part.path}: found a dataset without targets; expected them, as the other rows have targets that are no "
            "field of theirs: give the dataset an attribute `targets`, one int per sample"
        )
    field, file = targets_column(part.manifest.schema.fields, targets, part.path)
    return np.fromfile(file, field.dtype, part.manifest.rows).astype(np.int64)


def merged_skipped(parts: Sequence[Part]) -> tuple[int, ...]:
    """Return the indices of skipped samples in the datasets of all parts, one after the other."""
    found, before = list[int](), 0
    for part in parts:
        found += [before + index for index in part.manifest.skipped]
        before += part.sample_count
    return tuple(found)


def merged_fingerprint(parts: Sequence[Part]) -> Fingerprint | None:
    """Return the fingerprint of the datasets of all parts, one after the other; None if one is not known.

    `cache` compares it with a ConcatDataset, or a dataset that has grown by the new samples.
    """
    found = [part.manifest.fingerprint for part in parts]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    if any(one.kind == "iterable" for one in known):
        return msgspec.structs.replace(known[0], length=None) if known[0].kind == "iterable" else None
    probes, before = list[Probe](), 0
    for part, one in zip(parts, known, strict=True):
        probes += [msgspec.structs.replace(probe, index=before + probe.index) for probe in one.probes]
        before += part.sample_count
    return Fingerprint(
        kind="columns" if all(one.kind == "columns" for one in known) else "map",
        length=before,
        source=known[0].source,
        source_name=known[0].source_name,
        # rows of random samples cannot be compared
        probes=tuple(probes[:: -(-len(probes) // MOST_PROBES)]) if all(one.probes for one in known) else (),
    )
