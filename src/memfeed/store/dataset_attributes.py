"""The data that a store keeps beside its columns: classes and targets of its dataset, and the user's metadata.

docs/format.md is the specification.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch

from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import DEEPEST, Field
from memfeed.schema.recipe import RecipeStep, recipe_problem
from memfeed.store import ragged

TARGETS_FILE = "targets.bin"
LARGEST_METADATA = 1 << 20
LABEL_DTYPES = frozenset({"uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"})

TargetsForm = Literal["list", "tensor"]
Keep = int | Literal["full", "encoded"]
ClassName = str | int | tuple[str, ...]


class Targets(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A reference to the targets of all rows: in the column of ``field``, or, if that is None, in targets.bin."""

    form: TargetsForm
    field: int | None = None


class Loss(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The loss of a lossy codec in some images of a field: the differences of pixels, in grey levels of 255.

    ``psnr`` is in dB; None if no pixel differs.
    """

    field: int
    samples: int
    mean: float
    largest: int
    psnr: float | None = None


class Attributes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The attributes of a dataset that its store keeps; None for one that it did not have.

    ``transform`` is the part of its pipeline that was not stored (``cache(split=True)``), ``keep`` the choice how
    its images were. ``proven`` is the number of samples on which its cut was proven, whole. ``losses`` is what lossy
    codecs changed.
    """

    classes: tuple[ClassName, ...] | None = None
    class_to_idx: dict[str, int] | None = None
    targets: Targets | None = None
    transform: tuple[RecipeStep, ...] | None = None
    keep: Keep | None = None
    proven: int | None = None
    losses: tuple[Loss, ...] = ()


class Kept(NamedTuple):
    """The metadata, attributes and targets that a new store keeps beside its columns.

    ``targets`` are those of all samples of the dataset, int64 [samples]; then ``attributes.targets`` has their form.
    """

    metadata: Mapping[str, Any] = {}
    attributes: Attributes = Attributes()
    targets: Int64Array | None = None


def attributes_problem(attributes: Attributes, fields: tuple[Field, ...]) -> str:
    """Return a phrase that says what is wrong with the kept attributes, or an empty string."""
    if not all(-(1 << 63) <= index < 1 << 63 for index in (attributes.class_to_idx or {}).values()):
        return "a class number beyond 64 bits"
    if attributes.targets is not None and (at := attributes.targets.field) is not None:
        if not 0 <= at < len(fields):
            return f"targets in field {at}, which is not there"
        if not may_be_targets(fields[at]):
            return f"targets in field {fields[at].name!r}, which holds no class numbers"
    if not all(0 <= loss.field < len(fields) for loss in attributes.losses):
        return "the loss of a field that is not there"
    steps = attributes.transform or ()
    return metadata_problem([step.arguments for step in steps]) or recipe_problem(steps, fields)


def metadata_problem(metadata: Any) -> str:
    """Return a phrase that says what is wrong with a JSON dict of the user's, or an empty string."""
    try:
        size = len(msgspec.json.encode(metadata))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        return f"metadata that is no JSON ({error})"
    if size > LARGEST_METADATA:
        return f"metadata of {size:,} bytes, above {LARGEST_METADATA:,}"
    level: Iterable[Any] = [metadata]
    for _ in range(DEEPEST):
        level = [part for value in level for part in _parts(value)]
    return f"metadata nested more than {DEEPEST} deep" if any(_parts(value) for value in level) else ""


def _parts(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def may_be_targets(field: Field) -> bool:
    """Return True if a column has one class number per row."""
    return field.kind == "fixed" and field.shape == () and field.dtype in LABEL_DTYPES


def targets_column(manifest_fields: tuple[Field, ...], targets: Targets, root: Path) -> tuple[Field, Path]:
    """Return the field that describes the targets, and the file that holds them."""
    if targets.field is not None:
        field = manifest_fields[targets.field]
        return field, ragged.fixed_file(root, field)
    return Field(path=(), name="targets", stem="targets", kind="fixed", dtype="int64"), root / TARGETS_FILE


def equal_field(root: Path, fields: tuple[Field, ...], targets: Int64Array) -> int | None:
    """Return the index of a field whose column in the store or build at ``root`` has these numbers; None without."""
    for index, field in enumerate(fields):
        if may_be_targets(field) and len(targets):
            column = np.memmap(ragged.fixed_file(root, field), field.dtype, "r", shape=targets.shape)
            if np.array_equal(column, targets):
                return index
    return None


def in_form(numbers: torch.Tensor, form: TargetsForm) -> list[int] | torch.Tensor:
    """Return targets in the form that the dataset had: a list of ints, or a new int64 tensor."""
    return numbers.tolist() if form == "list" else numbers.to(torch.int64, copy=True)
