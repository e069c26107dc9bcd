"""Does a store still say what its dataset says? If not: which field, which sample, found, expected."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memfeed.convert import probe
from memfeed.convert.probe import Probed
from memfeed.errors import SchemaError, StaleStoreError
from memfeed.schema import codec, values
from memfeed.schema.fields import Field, Schema, display
from memfeed.schema.infer import Inferred
from memfeed.schema.tree import Flattener
from memfeed.store.manifest import Fingerprint

Stored = Callable[[int, int], Any]
"""(sample index, field number) -> the value that the store has."""

_IN_INIT = (
    ". If the dataset draws values when it is made (a random split, noise, a shuffle in __init__), every process draws "
    "others: seed it there"
)


def refuse(path: Path, what: str, hint: str = "") -> StaleStoreError:
    """The error for a store that is stale in this way."""
    return StaleStoreError(
        f"{path}: found that the dataset no longer matches what was stored: {what}{hint}. To make the store anew, pass "
        f"overwrite=True; to use it as it is, check=False or memfeed.open({str(path)!r})"
    )


def check(
    path: Path,
    stored: Schema,
    old: Fingerprint,
    new: Fingerprint,
    found: Inferred,
    probed: Probed,
    value: Stored | None,
) -> None:
    """Raises StaleStoreError unless the samples read now are those that were stored; warns of a changed class source.

    ``found`` and ``probed`` are what was read now, ``value`` gives what is stored, for the message.
    """
    if old.length != new.length:
        raise refuse(path, f"found {new.length} samples, expected {old.length}")
    # few samples may not show what the store was made from many: they are taken apart as those were
    same_paths = [field.path for field in found.schema] == [field.path for field in stored]
    flattener = Flattener(stored.structure if found.structure == found.schema.structure else found.structure)
    try:
        leaves = [flattener(sample) for sample in probed.samples]
    except SchemaError as error:
        raise refuse(path, schema_difference(found.schema, stored) or str(error)) from None
    problem = schema_difference(found.schema, stored) if same_paths else ""
    if problem:
        raise refuse(path, problem)
    wanted = {one.index: one.hashes for one in old.probes}
    for index, row in zip(probed.indices, leaves, strict=True):
        if index not in wanted:
            continue
        for number, (field, leaf) in enumerate(zip(stored.fields, row, strict=True)):
            try:
                packed = codec.pack(field, [leaf], cast=number in found.casts)
            except SchemaError as error:
                raise refuse(path, f"field {field.name}, sample {index}: {error}") from None
            if probe.hash_packed(field, packed) != wanted[index][number]:
                expected = value(index, number) if value is not None else None
                what = f"field {field.name}, sample {index}: {_difference(leaf, expected)}"
                raise refuse(path, what, _IN_INIT)
    for one in new.probes:  # of columns all are hashed though few are read as samples
        for field, hashed, then in zip(stored.fields, one.hashes, wanted.get(one.index, one.hashes), strict=True):
            if hashed != then:
                raise refuse(path, f"field {field.name}, sample {one.index}: found another value than was stored")
    if old.source != new.source and old.source_name == new.source_name:
        warnings.warn(
            f"{path}: the source of {new.source_name} has changed since this store was made, but the samples compared "
            "are the same; if the change matters for others, make the store anew with overwrite=True",
            stacklevel=4,
        )


def check_count(path: Path, found: int, probed: int, rows: int) -> None:
    """Raises StaleStoreError for an iterable that ended before the samples that were probed, or goes on after all."""
    if found < probed:
        raise refuse(path, f"found an iterable of {found} samples, expected {rows}")
    if rows == probed < found:
        raise refuse(path, f"found more than {rows} samples in the iterable, expected {rows}")


def schema_difference(found: Schema, stored: Schema) -> str:
    """How samples read now differ in kind from what was stored; empty if they fit."""
    have, want = [f.path for f in found.fields], [f.path for f in stored.fields]
    if have != want:
        gone = [display(path) for path in want if path not in have]
        new = [display(path) for path in have if path not in want]
        if gone or new:
            return f"found the fields {', '.join(map(display, have))}; expected {', '.join(map(display, want))}"
        return "found the fields in another order"
    for now, then in zip(found.fields, stored.fields, strict=True):
        if (now.dtype, now.form, now.rank) != (then.dtype, then.form, then.rank) or not _fits(now, then):
            return f"field {then.name}: found {now.describe()}, expected {then.describe()}"
    return ""


def _fits(now: Field, then: Field) -> bool:
    """Whether a few samples of kind ``now`` can be rows of a column of kind ``then``."""
    if then.kind in ("str", "bytes", "json") or now.kind in ("str", "bytes", "json"):
        return now.kind == then.kind
    return all(dim is None or dim == have for have, dim in zip(now.shape, then.shape, strict=True))


def _difference(found: Any, expected: Any) -> str:
    """Two values side by side, briefly: for tensors the first element that differs."""
    if expected is None:
        return f"found {_brief(found)}, expected another value"
    one, other = values.as_tensor(found), values.as_tensor(expected)
    if one is None or other is None or one.shape != other.shape:
        return f"found {_brief(found)}, expected {_brief(expected)}"
    if one.dtype != other.dtype:
        one = one.to(other.dtype)
    differs = (one != other) & ~((one != one) & (other != other))
    if not bool(differs.any()):
        return f"found other bytes in a value that is equal ({_brief(found)})"
    at = tuple(int(i) for i in torch.nonzero(differs)[0])
    return f"found {one[at].item()} at {list(at)}, expected {other[at].item()} ({int(differs.sum())} elements differ)"


def _brief(value: Any) -> str:
    tensor = values.as_tensor(value)
    if tensor is not None and tensor.ndim:
        return f"{str(tensor.dtype)[6:]} {list(tensor.shape)}"
    text = repr(tensor.item() if tensor is not None else value)
    return text if len(text) <= 60 else text[:57] + "..."
