"""Compare two values: leaves, samples, and rows as bytes. Say which leaf differs, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from memfeed.errors import SchemaError, brief, listed
from memfeed.schema.codec import Packed
from memfeed.schema.fields import HEAP_OF_BYTES, Field, Schema, display
from memfeed.schema.infer import Inferred, infer
from memfeed.schema.tree import Flattener
from memfeed.schema.values import as_tensor, bytes_of


def tensors_equal(one: torch.Tensor, other: torch.Tensor, rounding: float = 0.0) -> bool:
    """Return True if two dense CPU tensors have one dtype, one shape and the same bits: NaN equals NaN, 0.0 not -0.0.

    Floats may differ by `rounding`, a fraction of the largest finite value.
    """
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not (one.dtype.is_floating_point or one.dtype.is_complex):
        return torch.equal(one, other)  # of any strides: images are often channels last, slow to copy
    same_bytes = np.array_equal(bytes_of(one), bytes_of(other))
    if same_bytes or not rounding:
        return same_bytes
    one, other = one.to(torch.complex128), other.to(torch.complex128)
    largest = float(one.abs().nan_to_num(0.0, posinf=0.0).max())
    return torch.allclose(one, other, rtol=rounding, atol=rounding * largest, equal_nan=True)


def differing(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return which elements of two tensors of one dtype and shape differ, bool [*shape]; NaN does not from NaN."""
    if one.dtype.is_floating_point and one.itemsize == 1:  # float8 has no comparison
        one, other = one.float(), other.float()
    return (one != other) & ~((one != one) & (other != other))


def rows_equal(field: Field, one: Packed, other: Packed, rounding: float = 0.0) -> bool:
    """Return True if two packed rows of a field are equal, as `tensors_equal` compares them."""
    if one.dims is not None and not np.array_equal(one.dims, other.dims):  # type: ignore[arg-type]
        return False
    a, b = (np.concatenate([*row.buffers, np.empty(0, np.uint8)]) for row in (one, other))
    if not rounding or np.array_equal(a, b):
        return np.array_equal(a, b)
    left, right = (torch.from_numpy(part).view(field.torch_dtype) for part in (a, b))
    return tensors_equal(left, right, rounding)


def leaves_equal(one: Any, other: Any) -> bool:
    """Return True if two leaves are equal: floats, tensors, arrays and images bit by bit, other values of one class."""
    if isinstance(one, int | str):  # before others: a list may have many
        return type(one) is type(other) and bool(one == other)
    if isinstance(one, float | complex):
        return type(one) is type(other) and np.array(one).tobytes() == np.array(other).tobytes()
    left, right = as_tensor(one), as_tensor(other)
    if left is not None and right is not None:
        return tensors_equal(left, right)
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(leaves_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(leaves_equal(value, other[key]) for key, value in one.items())
    return bool(one == other)


def differing_leaf(one: Any, other: Any) -> str | None:
    """Return the displayed path of the first leaf in which two samples differ, None if they are equal."""
    try:
        structure = infer([one]).structure
    except SchemaError:
        return None  # no store can hold this sample: the conversion says so later, with more detail
    try:
        structure = infer([one, other]).structure
    except SchemaError:
        return "(its structure)"
    flattener = Flattener(structure)
    for path, a, b in zip(structure.leaves(), flattener(one), flattener(other), strict=True):
        if not leaves_equal(a, b):
            return display(path)
    return None


def describe_difference(found: Any, expected: Any) -> str:
    """Return a phrase with two leaves that differ in short form; of tensors, the first elements that differ."""
    one, other = as_tensor(found), as_tensor(expected)
    if one is None or other is None or one.shape != other.shape:
        return f"found {describe_value(found)}, expected {describe_value(expected)}"
    differs = differing(one.to(other.dtype), other)
    if not bool(differs.any()):
        return f"found other bytes in a value that is equal ({describe_value(found)})"
    at = tuple(int(i) for i in torch.nonzero(differs)[0])
    return f"found {one[at].item()} at {list(at)}, expected {other[at].item()} ({int(differs.sum())} elements differ)"


def describe_value(value: Any) -> str:
    """Return dtype and shape of a tensor, an array or an image; of other values, and of one number, the value."""
    tensor = as_tensor(value)
    if tensor is not None and tensor.ndim:
        return f"{str(tensor.dtype)[6:]} {list(tensor.shape)}"
    return brief(value if tensor is None else tensor.item())


def leaves_like(samples: Sequence[Any], found: Inferred, stored: Schema) -> list[list[Any]]:
    """Return the leaves of samples, one for each field that is stored. Raise SchemaError if their fields are others."""
    difference, structure = schema_difference(found.schema, stored), found.structure_like(stored)
    has_paths = [field.path for field in found.schema] == [field.path for field in stored]
    try:
        if difference and (has_paths or structure is found.structure):
            raise SchemaError(difference)
        return list(map(Flattener(structure), samples))
    except SchemaError as error:
        raise SchemaError(difference or str(error)) from None


def common_schema(schemas: Sequence[tuple[object, Schema]]) -> Schema:
    """Return the schema of the rows of several stores, given by path and schema. Raise SchemaError if two differ.

    A field is optional if it is in one of them, and keeps ``lengths_of`` if all agree.
    """
    (path, first), *others = schemas
    for other, schema in others:
        difference = schema_difference(schema, first, exact=True)
        if difference:
            raise SchemaError(f"{other}: found another schema than that of {path}: {difference}")
    fields = [
        msgspec.structs.replace(
            group[0],
            optional=any(field.optional for field in group),
            lengths_of=group[0].lengths_of if len({field.lengths_of for field in group}) == 1 else None,
        )
        for group in zip(*(schema for _, schema in schemas), strict=True)
    ]
    return Schema(fields=tuple(fields), structure=first.structure)


def schema_difference(found: Schema, stored: Schema, *, exact: bool = False) -> str:
    """Return a phrase that says how the fields of samples differ from those stored, or an empty string.

    With ``exact``, rows of one are to be rows of the other as they are: names, kinds and containers count too.
    """
    have, want = [field.path for field in found], [field.path for field in stored]
    if set(have) != set(want):
        new = listed([display(path) for path in have if path not in set(want)], 50)
        gone = listed([display(path) for path in want if path not in set(have)], 50)
        return f"found {f'the fields {new}' if new else 'fewer fields'}; expected {gone or 'none beside the others'}"
    if have != want:
        return "found the fields in another order"
    for now, then in zip(found, stored, strict=True):
        if exact and now.name != then.name:
            return f"field {then.name}: found the name {now.name!r}; expected the same"
        if not _fits(now, then) or (exact and (now.kind, now.shape) != (then.kind, then.shape)):
            one, other = now.describe(), then.describe()
            if one == other:
                one, other = f"{one} ({now.form})", f"{other} ({then.form})"
            is_rounded = then.dtype in ("float16", "bfloat16") and now.dtype in ("float32", "float64")
            hint = f", as cache(..., dtypes={{float: torch.{then.dtype}}}) gives" if is_rounded else ""
            return f"field {then.name}: found {one}, expected {other}{hint}"
    if exact and found.structure != stored.structure:
        return "found other containers around the same fields (dict, tuple, tensorclass, ...), expected the same"
    return ""


def _fits(now: Field, then: Field) -> bool:
    """Return True if samples of field `now` can be rows of column `then`."""
    if {now.kind, then.kind} & HEAP_OF_BYTES:
        return then.kind in (now.kind, "json")  # any value may be one of JSON
    return (now.dtype, now.form, now.rank) == (then.dtype, then.form, then.rank) and all(
        dim is None or dim == have for have, dim in zip(now.shape, then.shape, strict=True)
    )
