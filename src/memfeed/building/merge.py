"""What the manifest of several stores' rows says, one store's after the other: fields, attributes, fingerprint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from memfeed.errors import SchemaError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field, Schema, display
from memfeed.store.attributes import Attributes, Targets, targets_column
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
    first = parts[0].manifest.schema
    for part in parts[1:]:
        difference = _difference(part.manifest.schema, first)
        if difference:
            raise SchemaError(
                f"{part.path}: found another schema than that of {parts[0].path}: {difference}. Write one of them "
                "again with memfeed.cache (dtypes= and fields= choose how a field is stored)"
            )
    every = zip(*(part.manifest.schema.fields for part in parts), strict=True)
    fields = [
        msgspec.structs.replace(group[0], lengths_of=None, optional=any(field.optional for field in group))
        for group in every
    ]
    return Schema(fields=tuple(fields), structure=first.structure)


def _difference(found: Schema, expected: Schema) -> str:
    """Return a phrase that says how one schema differs from the other, or an empty string."""
    have, want = [field.path for field in found], [field.path for field in expected]
    if have != want:
        odd = next((path for path in want if path not in have), None)
        if odd is not None:
            return f"found no field {display(odd)!r}; expected one"
        odd = next((path for path in have if path not in want), None)
        return "found the fields in another order" if odd is None else f"found a field {display(odd)!r}; expected none"
    for now, then in zip(found, expected, strict=True):
        if now.name != then.name:
            return f"field {then.name}: found the name {now.name!r}; expected the same"
        if _column(now) != _column(then):
            return f"field {then.name}: found {now.describe()} ({now.kind}); expected {then.describe()} ({then.kind})"
    if found.structure != expected.structure:
        return "found other containers around the same fields (dict, tuple, tensorclass, ...); expected the same"
    return ""


def _column(field: Field) -> tuple[Any, ...]:
    return field.kind, field.dtype, field.shape, field.form


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
