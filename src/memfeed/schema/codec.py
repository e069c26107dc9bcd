"""Leaf values to the bytes of a column, and back.

``pack`` takes many rows of one column at a time, so that a million Python ints become one array, not a million.

Rows of a coded field become arrays that its codec takes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from memfeed.codecs import Codec, codec_of
from memfeed.errors import CorruptStoreError, SchemaError
from memfeed.schema.fields import DTYPES, HEAP_OF_BYTES, NO_VALUE, Field, shown_dims
from memfeed.schema.values import (
    NUMPY_DTYPES,
    SCALAR_DTYPES,
    Bytes,
    as_tensor,
    bytes_of,
    cast_exactly,
    is_contiguous,
    number_list_dtype,
    scalar_dtype,
)

ROW_BYTES = 1 << 32  # a decoded row has fewer


@lru_cache(64)
def _codec(name: str, parameters: str) -> Codec:
    return codec_of(name, json.loads(parameters))


def codec_of_field(field: Field) -> Codec:
    """Return the codec of a coded field.

    Raises StoreError for a codec or parameters that are not known, ModuleNotFoundError without its library.
    """
    assert field.coding is not None
    return _codec(field.coding.codec, json.dumps(field.coding.parameters, sort_keys=True))


def array_dtype(field: Field) -> np.dtype[Any]:
    """Return the dtype of the arrays that a codec gets for rows of this decoded field: integers for bfloat16."""
    if field.dtype.startswith("float8"):
        return np.dtype(np.uint8)
    return np.dtype("uint16" if field.dtype == "bfloat16" else field.dtype)


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a contiguous tensor of the CPU as an array of the dtype that codecs get; they share memory."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "bfloat16":
        tensor = tensor.view(torch.uint16)
    elif name.startswith("float8"):
        tensor = tensor.view(torch.uint8)
    array: npt.NDArray[Any] = tensor.numpy()
    return array


Int64Array = npt.NDArray[np.int64]


class ShapeMismatchError(SchemaError):
    """A row of the column's dtype and rank has other dims than the column admits; promoting the column admits them."""

    position = 0  # index of the value among those to be packed; see `pack`

    def __init__(self, field: Field, shape: tuple[int, ...]) -> None:
        super().__init__(f"found {shown_dims(shape)}; expected {field.describe()}")
        self.shape = shape


class Packed(NamedTuple):
    """Consecutive rows of one column as bytes, and for a ragged column the dims of each row.

    ``dims`` is int64 [rows, rank]; -1 in the first dim means None.
    """

    buffers: list[Bytes]
    dims: Int64Array | None


def encode_json(value: Any) -> bytes:
    """Return a JSON value as UTF-8 text; raise SchemaError unless decoding gives an equal value.

    This refuses NaN, infinities, tuples, sets, int keys and lone surrogates, which JSON would change silently.
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


def _to_tensor(field: Field, value: Any) -> torch.Tensor:
    if (name := scalar_dtype(value)) is not None:
        return torch.tensor(value, dtype=DTYPES[name], device="cpu")
    if type(value) is list:
        dtype = number_list_dtype(value) or ("" if value else field.dtype)
        if not dtype:
            types = " and ".join(sorted({type(item).__name__ for item in value}))
            raise SchemaError(f"found a list of {types}; expected {field.describe()}: numbers of one type")
        return torch.tensor(value, dtype=DTYPES[dtype], device="cpu")
    tensor = as_tensor(value)
    if value is None:
        instead = (
            "return a tensor in its place, as of NaN or without entries"
            if field.form == "tensor"
            else f'return a value in its place, or keep None with memfeed.cache(..., fields={{{field.name!r}: "json"}})'
        )
        raise SchemaError(f"found None; expected {field.describe()}: {instead}")
    if tensor is None:
        raise SchemaError(f"found {type(value).__name__}; expected {field.describe()}")
    return tensor


def _row_tensor(field: Field, value: Any, cast: bool) -> torch.Tensor:
    """Return one value as a tensor of the field's dtype; raise SchemaError or ShapeMismatchError if it does not fit."""
    tensor = _to_tensor(field, value)
    if tensor.dtype != field.torch_dtype:
        if not cast:
            raise SchemaError(
                f"found dtype {str(tensor.dtype)[6:]}; expected {field.dtype}, as in the samples probed: "
                "return one dtype, or name it in forms="
            )
        tensor = cast_exactly(tensor, field.torch_dtype)
    if tensor.ndim != len(field.shape):
        raise SchemaError(
            f"found {tensor.ndim} dims {list(tensor.shape)}; expected {len(field.shape)} ({field.describe()}): "
            "return the same number of dims in every sample"
        )
    if any(expected is not None and dim != expected for dim, expected in zip(tensor.shape, field.shape, strict=True)):
        raise ShapeMismatchError(field, tuple(tensor.shape))
    return tensor


def _to_text(field: Field, value: Any) -> bytes:
    if field.kind == "json":
        return encode_json(value)
    if field.kind == "bytes" and isinstance(value, bytes | bytearray):
        return bytes(value)
    if field.kind == "str" and isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise SchemaError(
                f"found a str that is no valid text ({error}); expected one that UTF-8 can encode"
            ) from None
    raise SchemaError(f"found {type(value).__name__}; expected {field.kind}, as in the samples probed")


def _compressed(field: Field, codec: Codec, value: Any, cast: bool) -> bytes:
    """Return one row of a coded column as its blob."""
    row = as_array(_row_tensor(field.decoded, value, cast).contiguous())
    if row.nbytes >= ROW_BYTES:
        raise SchemaError(f"found a row of {row.nbytes:,} bytes; expected less than 4 GiB in a compressed field")
    return codec.encode(row)


def pack(field: Field, values: Sequence[Any], *, cast: bool = False) -> Packed:
    """Return consecutive rows of one column as bytes.

    Raises SchemaError (ShapeMismatchError if promoting the column would help); its ``position`` is the index of the
    value in ``values``.
    """
    codec = None if field.coding is None else codec_of_field(field)
    if field.form == "scalar" and field.kind == "fixed" and not cast:
        expected = next(cls for cls, name in SCALAR_DTYPES.items() if name == field.dtype)
        if all(type(value) is expected for value in values):
            try:
                return Packed([np.array(values, NUMPY_DTYPES[field.dtype]).view(np.uint8)], None)
            except OverflowError:
                pass  # pack one by one, to find which value is too large
    position = 0
    try:
        if field.kind in HEAP_OF_BYTES:
            texts: list[bytes | None] = []
            for position, value in enumerate(values):  # noqa: B007
                if value is None and field.kind in ("str", "bytes") and not field.optional:
                    raise ShapeMismatchError(field, NO_VALUE)
                if value is None and field.optional:
                    texts.append(None)
                else:
                    texts.append(_to_text(field, value) if codec is None else _compressed(field, codec, value, cast))
            dims = np.array([[-1 if text is None else len(text)] for text in texts], np.int64).reshape(-1, 1)
            return Packed([np.frombuffer(text, np.uint8) for text in texts if text], dims)
        buffers, shapes = [], []
        for position, value in enumerate(values):  # noqa: B007
            if value is None and field.kind == "list" and not field.optional:
                raise ShapeMismatchError(field, NO_VALUE)
            if value is None and field.optional:
                shapes.append((-1,) * max(field.rank, 1))
                continue
            tensor = _row_tensor(field, value, cast)
            buffers.append(bytes_of(tensor))
            shapes.append(tuple(tensor.shape) or (1,))
        if field.kind == "fixed":
            return Packed(buffers, None)
        return Packed(buffers, np.array(shapes, np.int64).reshape(len(shapes), max(field.rank, 1)))
    except SchemaError as error:
        error.position = position  # type: ignore[attr-defined]
        raise
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        found = values[position]
        text = f"the int {found}" if type(found) is int else f"a {type(found).__name__}"
        refused = SchemaError(f"found {text}; expected {field.describe()} ({error})")
        refused.position = position  # type: ignore[attr-defined]
        raise refused from error


def decoded_row(field: Field, packed: Packed) -> Packed:
    """Return one row of a field as it is before it is coded; a row of a field that is not coded as it is."""
    if field.coding is None:
        return packed
    decoded, codec = field.decoded, codec_of_field(field)
    assert packed.dims is not None
    if packed.dims[0, 0] < 0:
        return Packed([], np.full((1, max(decoded.rank, 1)), -1, np.int64))
    blob = np.concatenate([*packed.buffers, np.empty(0, np.uint8)])
    row = np.empty(codec.shape(blob), array_dtype(decoded))
    codec.decode(blob, row)
    dims = None if decoded.kind == "fixed" else np.array([row.shape or (1,)], np.int64)
    return Packed([row.reshape(-1).view(np.uint8)], dims)


def pack_sample(fields: Iterable[Field], leaves: Iterable[Any], casts: Collection[int], index: int) -> list[Packed]:
    """Return the leaves of sample `index`, each packed by itself. Raise SchemaError with the index and the field."""
    packed = []
    for field_index, (field, leaf) in enumerate(zip(fields, leaves, strict=True)):
        try:
            packed.append(pack(field, [leaf], cast=field_index in casts))
        except SchemaError as error:
            raise SchemaError(f"sample {index}, field {field.name}: {error}") from None
    return packed


def pack_column(field: Field, rows: Any, *, cast: bool = False) -> Packed:
    """Return many rows of a fixed or coded column, a tensor or array [rows, *shape], as bytes.

    Copy only where necessary.
    """
    tensor = as_tensor(rows)
    assert tensor is not None
    if field.coding is not None:
        return pack(field, list(tensor), cast=cast)
    if cast and tensor.dtype != field.torch_dtype:
        tensor = cast_exactly(tensor, field.torch_dtype)
    return Packed([bytes_of(tensor)], None)


def pack_rows(field: Field, column: Any, rows: Iterable[int], *, cast: bool = False) -> Iterator[Packed]:
    """Yield single rows of a fixed column, a tensor or array [n, *shape], as bytes; copy only where necessary."""
    whole = as_tensor(column) if is_contiguous(column) else None
    if whole is not None and whole.dtype == field.torch_dtype:
        data, size = bytes_of(whole), field.row_bytes
        for row in rows:
            yield Packed([data[row * size : (row + 1) * size]], None)
        return
    for row in rows:  # slices: torch 2.6 has no indexing with a list for uint16, uint32 and uint64
        yield pack_column(field, column[row : row + 1], cast=cast)


def unpack(field: Field, tensor: torch.Tensor) -> Any:
    """Return one row as it was in the sample: a Python number, a list of numbers, or the tensor itself."""
    if field.form == "scalar":
        return tensor.item()
    return tensor.tolist() if field.form == "list" else tensor


def decode_bytes(field: Field, data: bytes) -> Any:
    """Return one row of a str, bytes or json column; raise CorruptStoreError for bytes that cannot be decoded."""
    if field.kind == "bytes":
        return data
    try:
        return data.decode() if field.kind == "str" else msgspec.json.decode(data)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise CorruptStoreError(
            f"field {field.name}: found bytes that are no {field.kind} ({error}); the store is damaged, run verify()"
        ) from None
