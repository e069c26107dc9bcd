"""Leaf values <-> the bytes of a column.

A value is described once when probed (``describe``), and packed column by column when written (``pack``): a whole run
of rows at a time, so that a million Python ints cost one array, not a million.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase, is_tensorclass

from memfeed.errors import CorruptStoreError, SchemaError
from memfeed.schema.fields import DTYPES, HEAP_OF_BYTES, Field, Form, dtype_name

Bytes = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]
_SMALL = 1 << 16
_SCALARS: dict[type, str] = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
_NATIVE = {name: np.dtype(name) for name in DTYPES if not name.startswith(("bfloat", "float8"))}


class Leaf(NamedTuple):
    """What one value is: how it comes back, and its dtype and shape (``kind`` is "array", "str", "bytes" or "json")."""

    kind: str
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()
    form: Form = "tensor"

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}" if self.kind == "array" else self.kind


class Drift(Exception):  # noqa: N818
    """A row whose dims differ from a fixed or jagged column's, at equal rank and dtype: the column can be promoted."""

    def __init__(self, at: int, leaf: Leaf) -> None:
        super().__init__(at, leaf)
        self.at, self.leaf = at, leaf


def _is_pil(value: Any) -> bool:
    image = sys.modules.get("PIL.Image")  # noticed, never imported
    return image is not None and isinstance(value, image.Image)


def _pil_array(image: Any) -> npt.NDArray[Any]:
    """[c, h, w]; uint8 for the 8-bit modes (a palette image keeps its indices), as torchvision's pil_to_tensor."""
    array = np.asarray(image)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def as_tensor(value: Any) -> torch.Tensor | None:
    """A leaf as a dense CPU tensor (a copy only where needed), or None where it is none. Raises SchemaError."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_nested or value.is_quantized or value.is_meta:
            odd = ("nested", value.is_nested), ("quantized", value.is_quantized), ("meta", value.is_meta)
            kind = next((name for name, is_it in odd if is_it), str(value.layout))
            raise SchemaError(
                f"found a {kind} tensor; expected a dense one with data: "
                "return a dense tensor per sample (rows may have different lengths)"
            )
        plain = value if type(value) is torch.Tensor else value.as_subclass(torch.Tensor)
        return plain.detach().cpu().resolve_conj().resolve_neg()
    if isinstance(value, str | bytes):  # numpy has its own of both
        return None
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.newbyteorder("=") not in _NATIVE.values():
            raise SchemaError(
                f"found a numpy value of dtype {array.dtype}; expected a bool or a number (no object, str or time): "
                "convert it in the dataset"
            )
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        if any(stride < 0 for stride in array.strides):
            array = array.copy()
        if array.flags.writeable:
            return torch.from_numpy(array)
        if array.nbytes < _SMALL:
            return torch.from_numpy(array.copy())
        with warnings.catch_warnings():  # nothing here writes to it, and it may be a map larger than memory
            warnings.simplefilter("ignore")
            return torch.from_numpy(array)
    if _is_pil(value):
        return torch.from_numpy(np.array(_pil_array(value), order="C"))
    return None


def _is_number_list(value: Any) -> str | None:
    """The dtype of a list of Python numbers all of one type; None for any other value."""
    if type(value) is not list or not value:
        return None
    kinds = {type(item) for item in value}
    return _SCALARS.get(kinds.pop()) if len(kinds) == 1 else None


def describe(value: Any) -> Leaf | None:
    """What a value is as a leaf of its own; None for a container (and None itself). Raises SchemaError."""
    if type(value) in _SCALARS:
        name = _SCALARS[type(value)]
        if name == "int64" and not -(2**63) <= value < 2**63:
            raise SchemaError(f"found the int {value}; expected one that fits int64: return a tensor or a float")
        return Leaf("array", name, (), "scalar")
    if isinstance(value, str):
        return Leaf("str")
    if isinstance(value, bytes | bytearray):
        return Leaf("bytes")
    tensor = as_tensor(value)
    if tensor is not None:
        return Leaf("array", dtype_name(tensor.dtype), tuple(tensor.shape))
    return None


def describe_list(value: Any) -> Leaf | None:
    """A list of Python numbers of one type as a ragged leaf; None for anything else."""
    if value == [] and type(value) is list:
        return Leaf("array", "", (0,), "list")
    name = _is_number_list(value)
    return None if name is None else Leaf("array", name, (len(value),), "list")


def encode_json(value: Any) -> bytes:
    """A JSON value as UTF-8 text; raises SchemaError unless decoding gives back an equal value.

    That refuses NaN, infinities, tuples, sets, int keys and lone surrogates, which JSON would silently change.
    """
    try:
        text = msgspec.json.encode(value)
        same = msgspec.json.decode(text) == value
    except (TypeError, ValueError, UnicodeError, RecursionError) as error:
        raise SchemaError(f"found {type(value).__name__}, which is no JSON value ({error})") from None
    if not same:
        raise SchemaError(
            f"found a {type(value).__name__} that JSON would change (NaN, a tuple, an int key); "
            "expected None, bool, int, finite float, str, list, and dict with str keys"
        )
    return text


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """The memory of a dense tensor as bytes, without a copy where it is contiguous."""
    flat = tensor.contiguous().reshape(-1)
    array: Bytes = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return array


def cast_exactly(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in another dtype; raises SchemaError where a value would change."""
    cast = tensor.to(dtype)
    back = cast.to(tensor.dtype)
    same = back == tensor
    if _is_integer(dtype) and _is_integer(tensor.dtype):
        # there and back is no test between signed and unsigned: -1 becomes 255 and -1 again
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        numbers = tensor.numpy()  # which compares with Python ints of any size exactly
        same &= torch.from_numpy(np.asarray((numbers >= low) & (numbers <= high)))
    if tensor.is_floating_point() or tensor.is_complex():
        same |= torch.isnan(back) & torch.isnan(tensor)
    if not bool(same.all()):
        bad = tensor.reshape(-1)[int((~same).reshape(-1).to(torch.uint8).argmax())]
        raise SchemaError(
            f"found the value {bad.item()}, which {dtype_name(dtype)} would change (a lossy cast); "
            "choose a wider dtype in dtypes=, or cast in the dataset"
        )
    return cast


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def own(leaf: Any) -> Any:
    """A leaf in memory of its own: whoever made it may use theirs again."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    if isinstance(leaf, TensorDictBase) or is_tensorclass(type(leaf)):
        return leaf.clone()
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return copy.deepcopy(leaf) if isinstance(leaf, list | dict | bytearray) or _is_pil(leaf) else leaf


class Packed(NamedTuple):
    """A run of rows of one column, ready to be written: its bytes, and for a ragged column each row's dims.

    ``dims`` is int64 [rows, rank]; -1 in the first dim marks None.
    """

    buffers: list[Bytes]
    dims: npt.NDArray[np.int64] | None


def _value_tensor(field: Field, value: Any) -> torch.Tensor:
    if type(value) in _SCALARS:
        tensor = torch.tensor(value, dtype=DTYPES[_SCALARS[type(value)]])
    elif type(value) is list:
        dtype = _is_number_list(value) or ("" if value else field.dtype)
        if not dtype:
            kinds = " and ".join(sorted({type(item).__name__ for item in value}))
            raise SchemaError(f"found a list of {kinds}; expected {field.describe()}: numbers of one type")
        tensor = torch.tensor(value, dtype=DTYPES[dtype])
    else:
        found = as_tensor(value)
        if found is None:
            raise SchemaError(f"found {type(value).__name__}; expected {field.describe()}")
        tensor = found
    return tensor


def _row(field: Field, value: Any, cast: bool, at: int) -> torch.Tensor:
    """One value as a tensor of the field's dtype whose shape the field admits; raises Drift or SchemaError."""
    tensor = _value_tensor(field, value)
    if tensor.dtype != field.torch_dtype:
        if not cast:
            raise SchemaError(
                f"found dtype {str(tensor.dtype)[6:]}; expected {field.dtype}, as in the samples probed: "
                "return one dtype, or name it in dtypes="
            )
        tensor = cast_exactly(tensor, field.torch_dtype)
    if tensor.ndim != len(field.shape):
        raise SchemaError(
            f"found {tensor.ndim} dims {list(tensor.shape)}; expected {len(field.shape)} ({field.describe()}): "
            "a column keeps one number of dims"
        )
    if any(want is not None and have != want for have, want in zip(tensor.shape, field.shape, strict=True)):
        raise Drift(at, Leaf("array", field.dtype, tuple(tensor.shape)))
    return tensor


def _text(field: Field, value: Any) -> bytes:
    if field.kind == "json":
        return encode_json(value)
    if field.kind == "bytes" and isinstance(value, bytes | bytearray):
        return bytes(value)
    if field.kind == "str" and isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise SchemaError(
                f"found a str that is no valid text ({error}); expected one that UTF-8 can keep"
            ) from None
    raise SchemaError(f"found {type(value).__name__}; expected {field.kind}, as in the samples probed")


def pack(field: Field, values: Sequence[Any], *, cast: bool = False) -> Packed:
    """The bytes of a run of rows. Raises Drift or SchemaError carrying, in ``at``, which of the values it was."""
    if field.form == "scalar" and field.kind == "fixed" and not cast:
        wanted = next(cls for cls, name in _SCALARS.items() if name == field.dtype)
        if all(type(value) is wanted for value in values):
            try:
                return Packed([np.array(values, _NATIVE[field.dtype]).view(np.uint8)], None)
            except OverflowError:
                pass  # one by one, to say which
    at = 0
    try:
        if field.kind in HEAP_OF_BYTES:
            texts: list[bytes | None] = []
            for at, value in enumerate(values):  # noqa: B007
                texts.append(None if value is None and field.optional else _text(field, value))
            dims = np.array([[-1 if text is None else len(text)] for text in texts], np.int64).reshape(-1, 1)
            return Packed([np.frombuffer(text, np.uint8) for text in texts if text], dims)
        buffers, shapes = [], []
        for at, value in enumerate(values):
            if value is None and field.optional:
                shapes.append((-1,) * max(field.rank, 1))
                continue
            tensor = _row(field, value, cast, at)
            buffers.append(_bytes_of(tensor))
            shapes.append(tuple(tensor.shape) or (1,))
        if field.kind == "fixed":
            return Packed(buffers, None)
        return Packed(buffers, np.array(shapes, np.int64).reshape(len(shapes), max(field.rank, 1)))
    except SchemaError as error:
        error.at = at  # type: ignore[attr-defined]
        raise
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        found = values[at]
        text = f"the int {found}" if type(found) is int else f"a {type(found).__name__}"
        refused = SchemaError(f"found {text}; expected {field.describe()} ({error})")
        refused.at = at  # type: ignore[attr-defined]
        raise refused from error


def unpack(field: Field, tensor: torch.Tensor) -> Any:
    """One row, as it was in the sample: a Python number, a list of numbers, or the tensor itself."""
    if field.form == "scalar":
        return tensor.item()
    return tensor.tolist() if field.form == "list" else tensor


def decode_bytes(field: Field, data: bytes) -> Any:
    """One row of a str, bytes or json column; raises CorruptStoreError for bytes that are none."""
    if field.kind == "bytes":
        return data
    try:
        return data.decode() if field.kind == "str" else msgspec.json.decode(data)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise CorruptStoreError(
            f"field {field.name}: found bytes that are no {field.kind} ({error}); the store is damaged, run verify()"
        ) from None


def bytes_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes: NaN equals NaN, and 0.0 does not equal -0.0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(np.array_equal(_bytes_of(one), _bytes_of(other)))


def pack_column(field: Field, rows: Any, *, cast: bool = False) -> Packed:
    """Many rows of a fixed column at once, a tensor or array of [k, *shape]; copied only where it must be."""
    tensor = as_tensor(rows)
    assert tensor is not None
    if cast and tensor.dtype != field.torch_dtype:
        tensor = cast_exactly(tensor, field.torch_dtype)
    return Packed([_bytes_of(tensor)], None)
