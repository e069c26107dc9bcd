"""Lossless codecs, zstd and LZ4, for rows of any dtype. Integers are narrowed first.

A blob describes itself:

| bytes | |
|---|---|
| 1 | the code of the row's dtype, see `DTYPE_CODES` |
| 1 | the code of the dtype that is stored: of integers, the smallest one that has all values of the row |
| 1 | the code of the filter, see below: the one after which the row is smallest |
| 1 | the number of dims |
| 4 each | uint32, little endian: the dims |
| the rest | the bytes that the filter gives, compressed; nothing if there are no elements |

Compressed is one frame of zstd that says its content size, or one block of LZ4.

Filters: changes of a row that can be undone exactly, after which it compresses better.

| code | filter | rows | what is compressed |
|---|---|---|---|
| 0 | none | any | the elements in C order |
| 1 | channels | uint8 `[3, h, w]` | channel 0 minus channel 1, channel 1, channel 2 minus channel 1, modulo 256 |
| 2 | bytes | elements of 2 bytes and more | the lowest byte of all elements, then the second one, up to the highest |

The parts of a complex number are two elements.
"""

from __future__ import annotations

import functools
import math
import struct
import threading
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from memfeed.codecs.contract import Array, Blob, Codec, Shape, corrupt
from memfeed.errors import SchemaError, brief

NONE, CHANNELS, BYTES = 0, 1, 2


def filters_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> list[int]:
    """Return the codes of the filters that rows of this dtype and shape can have, `NONE` first."""
    if dtype == np.uint8 and len(shape) == 3 and shape[0] == 3:
        return [NONE, CHANNELS]
    return [NONE, BYTES] if dtype.itemsize > 1 else [NONE]


def apply(code: int, row: Array) -> Array:
    """Return the bytes to compress, a contiguous array of uint8, of a C-contiguous row that has this filter."""
    if code == CHANNELS:
        differences = row.copy()
        differences[0] -= row[1]
        differences[2] -= row[1]
        data: Array = differences.reshape(-1)
    elif code == BYTES:
        data = np.ascontiguousarray(row.reshape(-1).view(np.uint8).reshape(-1, _width(row.dtype)).T).reshape(-1)
    else:
        data = row.reshape(-1).view(np.uint8)
    return data


def undo(code: int, data: Array, out: Array) -> None:
    """Write the row whose filtered bytes are `data` to `out`, an array of its dtype and shape, of any strides."""
    if code == CHANNELS:
        first, second, third = data.reshape(out.shape)
        np.copyto(out[1], second)
        np.add(first, second, out=out[0])
        np.add(third, second, out=out[2])
    elif code == BYTES:
        # shifts of whole elements: twice as fast as writing each byte to its place
        planes = data.reshape(_width(out.dtype), -1)
        elements = planes[-1].astype(f"u{len(planes)}")
        for plane in planes[-2::-1]:
            elements <<= elements.dtype.type(8)
            elements |= plane
        np.copyto(out, elements.view(out.dtype).reshape(out.shape))
    else:
        np.copyto(out, data.view(out.dtype).reshape(out.shape))


def _width(dtype: np.dtype[Any]) -> int:
    """Return the bytes of an element, half of them for a complex number."""
    return dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize


DTYPE_CODES: dict[str, int] = {
    name: code
    for code, name in enumerate(
        [
            *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        ]
    )
}
"""The number of each dtype in a blob. bfloat16 and the dtypes of 8 bits are stored as uint16 and uint8."""

_DTYPES = [np.dtype(name) for name in DTYPE_CODES]
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_HEADER = 4  # bytes before the dims
MOST_DIMS = 64


_INTEGERS = [dtype for dtype in _DTYPES if dtype.kind in "iu"]
_NARROWER = {
    dtype: [one for one in _INTEGERS if one.itemsize < dtype.itemsize and np.can_cast(one, dtype, "safe")]
    for dtype in _INTEGERS
}
"""For each dtype of integers the smaller ones whose values all fit into it, the smallest first."""


def narrow(row: Array) -> Array:
    """Return integers in the smallest dtype that has all of their values, other rows as they are."""
    candidates = _NARROWER.get(row.dtype)
    if not candidates or not row.size:
        return row
    least, largest = int(row.min()), int(row.max())
    for dtype in candidates:
        limits = np.iinfo(dtype)
        if limits.min <= least and largest <= limits.max:
            return row.astype(dtype)
    return row


class _Header(NamedTuple):
    dtype: np.dtype[Any]
    stored: np.dtype[Any]
    filter: int
    shape: tuple[int, ...]
    size: int  # bytes of the header


def _read_header(blob: Blob) -> _Header:
    """Return the header of a blob; raise CorruptStoreError if it is none."""
    if len(blob) < _HEADER:
        raise corrupt(f"{len(blob)} bytes", "a header")
    row_code, stored_code, filter_code, rank = blob[:_HEADER].tolist()
    size = _HEADER + 4 * rank
    if max(row_code, stored_code) >= len(_DTYPES) or rank > MOST_DIMS or size > len(blob):
        raise corrupt(f"the header {blob[:_HEADER].tolist()} in {len(blob)} bytes", "known dtypes, and dims")
    dtype, stored = _DTYPES[row_code], _DTYPES[stored_code]
    if stored != dtype and stored not in _NARROWER.get(dtype, ()):
        raise corrupt(f"{stored} for a row of {dtype}", "a dtype whose values it has")
    shape = struct.unpack(f"<{rank}I", blob[_HEADER:size].tobytes())
    if filter_code not in filters_of(stored, shape):
        raise corrupt(f"the filter {filter_code} for a row of {stored} {brief(list(shape))}", "one that it can have")
    return _Header(dtype, stored, filter_code, shape, size)


class Lossless(Codec):
    """The blob of a lossless codec. A derived class compresses bytes, and decompresses a number of bytes it is told."""

    lossless: ClassVar[bool] = True

    @abstractmethod
    def _compress(self, data: memoryview) -> bytes: ...

    @abstractmethod
    def _decompress(self, data: memoryview, size: int) -> bytes:
        """Return exactly `size` bytes, or raise ValueError. Takes no more memory than that."""

    def accepts(self, dtype: np.dtype[Any], shape: Shape) -> str:
        """Return why rows cannot be encoded; empty if they can: see `Codec`."""
        if dtype not in _CODES or not dtype.isnative:
            return f"{self.name} has no dtype {dtype}; it has {', '.join(DTYPE_CODES)}"
        if len(shape) > MOST_DIMS:
            return f"{self.name} has rows of up to {MOST_DIMS} dims; this one has {len(shape)}"
        return ""

    def encode(self, row: Array) -> bytes:
        """Return the blob of one row: see `Codec`."""
        if reason := self.accepts(row.dtype, row.shape):
            raise SchemaError(reason)
        if max(row.shape, default=0) >= 2**32:
            raise SchemaError(f"found dims {list(row.shape)}; expected each below 2**32: use no codec for this field")
        stored = np.ascontiguousarray(narrow(row)).reshape(row.shape)
        code, payload = NONE, b""
        if row.size:
            payloads = [
                (code, self._compress(apply(code, stored).data)) for code in filters_of(stored.dtype, stored.shape)
            ]
            code, payload = min(payloads, key=lambda item: len(item[1]))
        codes = (_CODES[row.dtype], _CODES[stored.dtype], code, row.ndim)
        return struct.pack(f"<4B{row.ndim}I", *codes, *row.shape) + payload

    def shape(self, blob: Blob) -> tuple[int, ...]:
        """Return the shape of a row from the header of its blob: see `Codec`."""
        return _read_header(blob).shape

    def decode(self, blob: Blob, out: Array) -> None:
        """Fill `out` with the row: see `Codec`."""
        header = _read_header(blob)
        if header.shape != out.shape or header.dtype != out.dtype:
            raise corrupt(f"{header.dtype} {brief(list(header.shape))}", f"{out.dtype} {list(out.shape)}")
        size = math.prod(header.shape) * header.stored.itemsize
        payload = blob.data[header.size :]
        if not size:
            if len(payload):
                raise corrupt(f"{len(payload)} bytes of a row without elements", "none")
            return
        try:
            data = self._decompress(payload, size)
        except ValueError as error:
            raise corrupt(f"a payload that {self.name} cannot decompress ({error})", f"{size} bytes in it") from None
        if header.stored == header.dtype:
            undo(header.filter, np.frombuffer(data, np.uint8), out)
            return
        row = np.empty(header.shape, header.stored)
        undo(header.filter, np.frombuffer(data, np.uint8), row)
        np.copyto(out, row, casting="safe")


@dataclass(frozen=True)
class Zstd(Lossless):
    """zstd: half the bytes of LZ4, at a fifth of its speed. Levels from 1 (fastest) to 19 (smallest)."""

    name: ClassVar[str] = "zstd"
    module: ClassVar[str] = "zstandard"
    level: int = 1

    def __post_init__(self) -> None:
        if type(self.level) is not int or not 1 <= self.level <= 19:
            raise ValueError(f"found level={brief(self.level)}; expected an int from 1 to 19")

    def parameters(self) -> Mapping[str, int | str]:
        """Return the level."""
        return {"level": self.level}

    def _compress(self, data: memoryview) -> bytes:
        return bytes(_zstd().compressor(self.level).compress(data))

    def _decompress(self, data: memoryview, size: int) -> bytes:
        zstandard = _zstd()
        try:
            declared = zstandard.library.frame_content_size(data)  # reads the header only
            if declared != size:
                raise ValueError(f"a frame of {declared} bytes")
            return bytes(zstandard.decompressor.decompress(data, max_output_size=size, allow_extra_data=False))
        except zstandard.library.ZstdError as error:
            raise ValueError(error) from None


class _ZstdOfThread(threading.local):
    """The contexts of zstd in one thread: they are not for two threads at a time, and take long to make."""

    def __init__(self) -> None:
        import zstandard

        self.library = zstandard
        self.decompressor = zstandard.ZstdDecompressor()
        self._compressors: dict[int, Any] = {}

    def compressor(self, level: int) -> Any:
        if level not in self._compressors:
            self._compressors[level] = self.library.ZstdCompressor(level=level, write_content_size=True)
        return self._compressors[level]


@functools.cache
def _zstd() -> _ZstdOfThread:
    Zstd.require()
    return _ZstdOfThread()


@dataclass(frozen=True)
class Lz4(Lossless):
    """LZ4: decompressed about as fast as memory is copied."""

    name: ClassVar[str] = "lz4"
    module: ClassVar[str] = "lz4"

    def parameters(self) -> Mapping[str, int | str]:
        """Return nothing: it has no parameters."""
        return {}

    def _compress(self, data: memoryview) -> bytes:
        return bytes(_lz4().compress(data, store_size=False))

    def _decompress(self, data: memoryview, size: int) -> bytes:
        library = _lz4()
        try:
            found: bytes = library.decompress(data, uncompressed_size=size)
        except library.LZ4BlockError as error:
            raise ValueError(error) from None
        if len(found) != size:
            raise ValueError(f"a block of {len(found)} bytes")
        return found


@functools.cache
def _lz4() -> Any:
    Lz4.require()
    import lz4.block

    return lz4.block
