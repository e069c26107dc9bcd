"""Lossless codecs, zstd and LZ4, for rows of any dtype. Integers are narrowed first.

A blob describes itself:

| bytes | |
|---|---|
| 1 | the code of the row's dtype, see `DTYPE_CODES` |
| 1 | the code of the dtype that is stored: of integers, the smallest one that has all values of the row |
| 1 | the code of the filter, see `filters`: the one after which the row is smallest |
| 1 | the number of dims |
| 4 each | uint32, little endian: the dims |
| the rest | the bytes that the filter gives, compressed; nothing if there are no elements |

Compressed is one frame of zstd that says its content size, or one block of LZ4.
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

from memfeed.codecs import filters
from memfeed.codecs.contract import Array, Blob, Codec, Shape
from memfeed.errors import CorruptStoreError, SchemaError, brief
from memfeed.system import extras

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


def _narrower(dtype: np.dtype[Any]) -> list[np.dtype[Any]]:
    """Return the smaller dtypes whose values all fit into this integer dtype, the smallest first."""
    if dtype.kind not in "iu":
        return []
    return [
        other
        for other in _DTYPES
        if other.kind in "iu" and other.itemsize < dtype.itemsize and np.can_cast(other, dtype, "safe")
    ]


_NARROWER = {dtype: _narrower(dtype) for dtype in _DTYPES}


def narrow(row: Array) -> Array:
    """Return integers in the smallest dtype that has all of their values, other rows as they are."""
    candidates = _NARROWER[row.dtype]
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
        raise _corrupt(f"{len(blob)} bytes", "a header")
    row_code, stored_code, filter_code, rank = blob[:_HEADER].tolist()
    size = _HEADER + 4 * rank
    if max(row_code, stored_code) >= len(_DTYPES) or rank > MOST_DIMS or size > len(blob):
        raise _corrupt(f"the header {blob[:_HEADER].tolist()} in {len(blob)} bytes", "known dtypes, and dims")
    dtype, stored = _DTYPES[row_code], _DTYPES[stored_code]
    if stored != dtype and stored not in _NARROWER[dtype]:
        raise _corrupt(f"{stored} for a row of {dtype}", "a dtype whose values it has")
    shape = struct.unpack(f"<{rank}I", blob[_HEADER:size].tobytes())
    if filter_code not in filters.filters_of(stored, shape):
        raise _corrupt(f"the filter {filter_code} for a row of {stored} {brief(list(shape))}", "one that it can have")
    return _Header(dtype, stored, filter_code, shape, size)


def _corrupt(found: str, expected: str) -> CorruptStoreError:
    return CorruptStoreError(f"a coded row: found {found}; expected {expected}: the store is damaged, run verify()")


class Lossless(Codec):
    """The blob of a lossless codec. A derived class compresses bytes, and decompresses a number of bytes it is told."""

    lossless: ClassVar[bool] = True
    module: ClassVar[str]

    @classmethod
    def require(cls) -> None:
        """Raise ModuleNotFoundError with the line to install if the codec's library is missing."""
        extras.require("codecs", cls.module)

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
        code, payload = filters.NONE, b""
        if row.size:
            payloads = [
                (code, self._compress(filters.apply(code, stored).data))
                for code in filters.filters_of(stored.dtype, stored.shape)
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
            raise _corrupt(f"{header.dtype} {brief(list(header.shape))}", f"{out.dtype} {list(out.shape)}")
        size = math.prod(header.shape) * header.stored.itemsize
        payload = blob.data[header.size :]
        if not size:
            if len(payload):
                raise _corrupt(f"{len(payload)} bytes of a row without elements", "none")
            return
        try:
            data = self._decompress(payload, size)
        except ValueError as error:
            raise _corrupt(f"a payload that {self.name} cannot decompress ({error})", f"{size} bytes in it") from None
        if header.stored == header.dtype:
            filters.undo(header.filter, np.frombuffer(data, np.uint8), out)
            return
        row = np.empty(header.shape, header.stored)
        filters.undo(header.filter, np.frombuffer(data, np.uint8), row)
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
            return bytes(zstandard.decompressor().decompress(data, max_output_size=size, allow_extra_data=False))
        except zstandard.library.ZstdError as error:
            raise ValueError(error) from None


class _ZstdOfThread(threading.local):
    """The contexts of zstd in one thread: they are not for two threads at a time, and take long to make."""

    def __init__(self) -> None:
        import zstandard

        self.library = zstandard
        self._compressors: dict[int, Any] = {}
        self._decompressor: Any = None

    def compressor(self, level: int) -> Any:
        if level not in self._compressors:
            self._compressors[level] = self.library.ZstdCompressor(level=level, write_content_size=True)
        return self._compressors[level]

    def decompressor(self) -> Any:
        if self._decompressor is None:
            self._decompressor = self.library.ZstdDecompressor()
        return self._decompressor


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
