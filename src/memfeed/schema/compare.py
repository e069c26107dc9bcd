"""Compare values, packed rows and schemas: the one place that says what is equal, and how two things differ.

Two values are equal if they are nested in containers of the same classes, keys and lengths, and if each leaf has the
same class, dtype and shape and the same bits. In detail:

- The order of the keys of a dict does not count. A TensorDict counts its batch size.
- Tensors count the bits of every element: NaN equals a NaN of the same bits, and 0.0 does not equal -0.0. The bits of a
  bool are its truth. Those of other classes than torch.Tensor count their attributes too (the format of boxes). Tensors
  that are neither dense nor nested equal only themselves.
- Arrays count bits as tensors do, images of Pillow their mode, size, pixels and palette.
- Numbers of Python count their class: 1, 1.0 and True all differ, and so do 0.0 and -0.0. Any NaN equals any other.
- All other leaves are equal if ``==`` says so.

With ``as_stored`` a value equals what a store returns for it: arrays and images equal the tensor of their numbers,
devices and classes of tensors do not count, and classes of namedtuples, TensorDicts and graphs count by their names.
`tensors_equal` and `rows_equal` can also allow for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec
import numpy as np
import optree
import torch

from memfeed.errors import SchemaError, brief, listed
from memfeed.schema.codec import Packed, decoded_row
from memfeed.schema.containers import NAMESPACE, open_any
from memfeed.schema.fields import HEAP_OF_BYTES, Field, Path, Schema, display
from memfeed.schema.graphs import is_graph
from memfeed.schema.infer import Inferred
from memfeed.schema.kept_tensors import kept_name, open_kept, part_names
from memfeed.schema.tensordicts import is_a, is_tensor_collection
from memfeed.schema.tree import Flattener, open_container
from memfeed.schema.values import SCALAR_DTYPES, as_tensor, bytes_of, class_of, is_pil


class Difference(NamedTuple):
    """The first place where two values differ.

    Args:
        path: of keys, positions and field names; () for the values as a whole.
        found: what the one has there.
        expected: what the other has there.
    """

    path: Path
    found: Any
    expected: Any

    def __str__(self) -> str:
        where = f"field {display(self.path)}" if self.path else "the sample"
        return f"{where}: {describe_difference(self.found, self.expected)}"


def equal(one: Any, other: Any, *, as_stored: bool = False) -> bool:
    """Return True if two values are equal; see the rule of this module."""
    return difference(one, other, as_stored=as_stored) is None


def difference(found: Any, expected: Any, *, as_stored: bool = False) -> Difference | None:
    """Return the first place where two values differ, None if they are equal; see the rule of this module.

    A list of numbers is one leaf.
    """
    if found is expected:
        return None
    one, other = (_as_returned(found), _as_returned(expected)) if as_stored else (found, expected)
    if _kind(one, as_stored) != _kind(other, as_stored):
        return Difference((), found, expected)
    mine = _content(one)
    theirs = None if mine is None else _content(other)
    if mine is None or theirs is None:
        is_same = mine is theirs and _same_leaf(one, other, as_stored)
        return None if is_same else Difference((), found, expected)
    if mine.keys() != theirs.keys():
        return Difference((), found, expected)
    for key, part in mine.items():
        inner = difference(part, theirs[key], as_stored=as_stored)
        if inner is not None:
            return inner._replace(path=(key, *inner.path))
    return None


def _kind(value: Any, as_stored: bool) -> Any:
    """Return the class, or its name, that two values share if their contents are to be compared."""
    cls: Any = class_of(value)
    if issubclass(cls, torch.Tensor):
        return kept_name(value) or (torch.Tensor if as_stored else cls)
    if cls in SCALAR_DTYPES or cls in (str, list, dict):
        return cls
    if is_tensor_collection(value):
        return cls.__name__ if as_stored else cls, value.batch_size
    return cls.__name__ if as_stored and (hasattr(cls, "_fields") or is_graph(value)) else cls


def _content(value: Any) -> Mapping[Any, Any] | None:
    """Return the content of a container by key, position or field name; None for a leaf."""
    if name := kept_name(value):
        return dict(zip(part_names(name), open_kept(value), strict=True))
    if isinstance(value, torch.Tensor | np.ndarray | np.generic | str | bytes | int | float | complex) or value is None:
        return None
    if isinstance(value, tuple):
        return dict(zip(getattr(type(value), "_fields", range(len(value))), value, strict=True))
    if class_of(value) is list:
        return None if value and SCALAR_DTYPES.keys() >= set(map(type, value)) else dict(enumerate(value))
    if is_tensor_collection(value):  # a TensorDict is a Mapping too
        if is_a(value, "tensordict", "NonTensorStack"):
            return dict(enumerate(value.tolist()))
        contained = open_container(value)
        assert contained is not None
        return dict(zip(contained[0].keys, contained[1], strict=True))
    if isinstance(value, Mapping):
        return value
    if is_pil(value):
        return None
    opened = open_any(value)
    if opened is not None:
        return opened[0] if isinstance(opened[0], dict) else dict(enumerate(opened[0]))
    if optree.tree_is_leaf(value, none_is_leaf=True, namespace=NAMESPACE):
        return None
    return dict(enumerate(optree.tree_flatten_one_level(value, none_is_leaf=True, namespace=NAMESPACE)[0]))


def _as_returned(value: Any) -> Any:
    """Return an array or image as the tensor that a store returns for it; all else as it is."""
    if isinstance(value, np.ndarray | np.generic) or is_pil(value):
        tensor = _numbers(value)
        return value if tensor is None else tensor
    return value


def _same_leaf(one: Any, other: Any, as_stored: bool) -> bool:
    if isinstance(one, torch.Tensor):
        return _same_tensors(one, other, as_stored)
    if isinstance(one, np.ndarray | np.generic):
        left, right = np.asarray(one), np.asarray(other)
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        if left.dtype.hasobject:
            return equal(left.ravel().tolist(), right.ravel().tolist(), as_stored=as_stored)
        return left.tobytes() == right.tobytes()
    if is_pil(one):
        mine, theirs = ((image.mode, image.size, image.tobytes(), image.getpalette()) for image in (one, other))
        return mine == theirs
    if isinstance(one, float):
        return float.__repr__(one) == float.__repr__(other)
    if isinstance(one, complex):
        return complex.__repr__(one) == complex.__repr__(other)
    if isinstance(one, list):
        return len(one) == len(other) and all(
            type(a) is type(b) and _same_leaf(a, b, as_stored) for a, b in zip(one, other, strict=True)
        )
    try:
        return bool(one == other)
    except Exception:  # of an object that no store holds, which compares tensors in it: that is said later
        return False


def _same_tensors(one: torch.Tensor, other: torch.Tensor, as_stored: bool) -> bool:
    if one.is_nested or other.is_nested:
        is_alike = one.is_nested and other.is_nested and len(one) == len(other)
        return is_alike and all(_same_tensors(*pair, as_stored) for pair in zip(one.unbind(), other.unbind()))  # noqa: B905
    if any(part.layout != torch.strided or part.is_quantized or part.is_meta for part in (one, other)):
        return False
    if not as_stored and (one.device != other.device or not equal(vars(one), vars(other))):
        return False
    return tensors_equal(_dense(one), _dense(other))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)
    return plain.detach().cpu().resolve_conj().resolve_neg()


def tensors_equal(one: torch.Tensor, other: torch.Tensor, rounding: float = 0.0) -> bool:
    """Return True if two dense CPU tensors have one dtype, one shape and the same bits.

    Floats may differ by `rounding`, a fraction of the largest finite value.
    """
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype is torch.bool:  # some libraries write 255 for True
        one, other = (part.contiguous().view(torch.uint8) != 0 for part in (one, other))
    if not (one.dtype.is_floating_point or one.dtype.is_complex):
        # of any strides: images are often channels last, slow to copy. torch would divide them among threads, which
        # wait for each other on busy cores
        return np.array_equal(one.numpy(), other.numpy())
    same_bytes = np.array_equal(bytes_of(one), bytes_of(other))
    if same_bytes or not rounding:
        return same_bytes
    one, other = one.to(torch.complex128), other.to(torch.complex128)
    largest = float(one.abs().nan_to_num(0.0, posinf=0.0).max())
    return torch.allclose(one, other, rtol=rounding, atol=rounding * largest, equal_nan=True)


def rows_equal(field: Field, one: Packed, other: Packed, rounding: float = 0.0) -> bool:
    """Return True if two packed rows of a field are equal, as `tensors_equal` compares them; coded rows are decoded."""
    field, one, other = field.decoded, decoded_row(field, one), decoded_row(field, other)
    if one.dims is not None and not np.array_equal(one.dims, other.dims):  # type: ignore[arg-type]
        return False
    a, b = (np.concatenate([*row.buffers, np.empty(0, np.uint8)]) for row in (one, other))
    if not rounding or np.array_equal(a, b):
        return np.array_equal(a, b)
    left, right = (torch.from_numpy(part).view(field.torch_dtype) for part in (a, b))
    return tensors_equal(left, right, rounding)


def describe_difference(found: Any, expected: Any) -> str:
    """Return a phrase with two leaves that differ in short form; of tensors and long text, where they differ."""
    if isinstance(found, str | bytes) and type(found) is type(expected):
        alike = (one == other for one, other in zip(found, expected, strict=False))
        start = len(list(takewhile(bool, alike))) - 15  # a few characters before the first one that differs
        if start > 0 and max(len(found), len(expected)) > 50:
            return f"found {brief(found[start:])} from character {start} on, expected {brief(expected[start:])}"
    one, other = _numbers(found), _numbers(expected)
    if one is None or other is None or one.shape != other.shape:
        texts = describe_value(found), describe_value(expected)
        if texts[0] == texts[1]:  # of two classes
            texts = (f"{texts[0]} ({type(found).__name__})", f"{texts[1]} ({type(expected).__name__})")
        return f"found {texts[0]}, expected {texts[1]}"
    dtypes, one = (one.dtype, other.dtype), one.to(other.dtype)
    if one.dtype.is_floating_point and one.itemsize == 1:  # float8 has no comparison
        one, other = one.float(), other.float()
    differs = (one != other) & ~((one != one) & (other != other))
    if not bool(differs.any()) and dtypes[0] != dtypes[1]:
        return f"found {str(dtypes[0])[6:]}, expected {str(dtypes[1])[6:]} (of equal values)"
    if not bool(differs.any()):
        return f"found other bytes in a value that is equal ({describe_value(found)})"
    at = tuple(int(i) for i in torch.nonzero(differs)[0])
    return f"found {one[at].item()} at {list(at)}, expected {other[at].item()} ({int(differs.sum())} elements differ)"


def describe_value(value: Any) -> str:
    """Return dtype and shape of a tensor, an array or an image; of other values, and of one number, the value."""
    tensor = _numbers(value)
    if tensor is not None and tensor.ndim:
        return f"{str(tensor.dtype)[6:]} {list(tensor.shape)}"
    return brief(value if tensor is None else tensor.item())


def _numbers(value: Any) -> torch.Tensor | None:
    """Return a tensor, array or image as a tensor of its numbers; None for other values, and where no column has it."""
    try:
        return as_tensor(value)
    except SchemaError:
        return None


# --- schemas


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
        is_other = (now.kind, now.shape, _coded_as(now)) != (then.kind, then.shape, _coded_as(then))
        if not _fits(now, then) or (exact and is_other):
            one, other = now.describe(), then.describe()
            if one == other:
                one, other = f"{one} ({now.form})", f"{other} ({then.form})"
            is_rounded = then.dtype in ("float16", "bfloat16") and now.dtype in ("float32", "float64")
            hint = f", as cache(..., forms={{float: torch.{then.dtype}}}) gives" if is_rounded else ""
            return f"field {then.name}: found {one}, expected {other}{hint}"
    if exact and found.structure != stored.structure:
        return "found other containers around the same fields (dict, tuple, tensorclass, ...), expected the same"
    return ""


def _coded_as(field: Field) -> Any:
    """Return what a coded row needs to be decoded, beside its bytes; None for a field without codec."""
    coding = field.coding
    if coding is None:
        return None
    parameters = {name: value for name, value in coding.parameters.items() if name == "layout"}
    return coding.codec, parameters, coding.kind, coding.dtype, coding.shape


def _fits(now: Field, then: Field) -> bool:
    """Return True if samples of field `now` can be rows of column `then`."""
    if {now.kind, then.kind} & HEAP_OF_BYTES:
        return then.kind in (now.kind, "json")  # any value may be one of JSON
    return (now.dtype, now.form, now.rank) == (then.dtype, then.form, then.rank) and all(
        dim is None or dim == have for have, dim in zip(now.shape, then.shape, strict=True)
    )
