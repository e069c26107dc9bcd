"""The rows of a directory of memoized results: a key and a blob each, in two columns of bytes. See docs/format.md.

A blob is the bytes of the leaves of a result, each from a multiple of 64 bytes, then its layout as JSON, then a footer.
Its size is a multiple of 64.
"""

from __future__ import annotations

import json
import math
import os
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from memfeed.errors import CorruptStoreError
from memfeed.schema.fields import DTYPES, Field, Node, Schema

MARKER = "memo.json"
VERSION = 1
ALIGN = 64
KEY = Field(path=("key",), name="key", stem="key", kind="bytes", dtype="uint8")
BLOB = Field(path=("blob",), name="blob", stem="blob", kind="bytes", dtype="uint8")
SCHEMA = Schema(
    fields=(KEY, BLOB), structure=Node(kind="dict", keys=("key", "blob"), children=(Node(kind="leaf"),) * 2)
)
_FOOTER = struct.Struct(
    "<16sfIQ"
)  # digest of the key, seconds that the call took, size of the layout, hash of the rest
_LARGEST_CACHED = 4096  # bytes of a layout; longer ones have values of their own in them

Bytes = npt.NDArray[np.uint8]


class Leaf(NamedTuple):
    """The bytes of one leaf in its blob: ``nbytes`` from byte ``offset``."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Layout(NamedTuple):
    """The structure of a result, as nested lists, and its leaves."""

    tree: Any
    leaves: tuple[Leaf, ...]


class Blob(NamedTuple):
    """A blob that was read: its layout, the digest of its key, and the seconds that the call took."""

    layout: Layout
    digest: bytes
    seconds: float


def is_memo(path: Path) -> bool:
    """Return True for a directory of memoized results."""
    return os.path.isfile(path / MARKER)  # False in a directory that may not be read, where a Path raises


def make_blob(
    digest: bytes, seconds: float, tree: Any, leaves: list[tuple[str, tuple[int, ...], Bytes]]
) -> list[Bytes]:
    """Return the parts of a blob, one after another; a leaf is its dtype, shape and bytes, which are shared."""
    parts, table, at = list[Bytes](), [], 0
    for dtype, shape, data in leaves:
        table.append([dtype, list(shape), at])
        parts += [data, np.zeros(-len(data) % ALIGN, np.uint8)]
        at += len(data) + len(parts[-1])
    layout = json.dumps({"tree": tree, "leaves": table}, separators=(",", ":")).encode()
    padding = bytes(-(at + len(layout) + _FOOTER.size) % ALIGN)
    hashed = xxhash.xxh3_64()
    parts.append(np.frombuffer(padding + layout, np.uint8))
    for part in parts:
        hashed.update(part.data)
    head = _FOOTER.pack(digest, seconds, len(layout), 0)[:-8]
    hashed.update(head)
    parts.append(np.frombuffer(head + hashed.intdigest().to_bytes(8, "little"), np.uint8))
    return parts


def is_right(blob: Bytes) -> bool:
    """Return True if a blob is as it was written, by its hash."""
    if len(blob) < _FOOTER.size:
        return False
    return xxhash.xxh3_64_intdigest(blob[:-8].data) == int.from_bytes(blob[-8:].tobytes(), "little")


def read_footer(end: Bytes, size: int, where: object) -> Blob:
    """Decode the last bytes of a blob of ``size`` bytes; ``end`` is the whole blob, or at least footer and layout.

    Raises CorruptStoreError, which names ``where``, for a layout that does not fit into the blob.
    """
    try:
        data, at = end.data, len(end) - _FOOTER.size
        digest, seconds, length, _ = _FOOTER.unpack_from(data, at)
        room = size - _FOOTER.size - length
        if room < 0 or at < length:
            raise ValueError(f"a layout of {length:,} bytes")
        text = data[at - length : at].tobytes()
        layout = (_cached_layout if length <= _LARGEST_CACHED else _parse)(text)
        for leaf in layout.leaves:
            if leaf.offset + leaf.nbytes > room:
                raise ValueError(f"a leaf of {leaf.nbytes:,} bytes at byte {leaf.offset:,}")
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise CorruptStoreError(
            f"{where}: found a result that cannot be read ({error!s:.200}), of {size:,} bytes; expected its leaves and "
            "their layout: the directory is damaged; remove it, and the results are computed again"
        ) from None
    return Blob(layout, digest, seconds)


def layout_bytes(end: Bytes) -> int:
    """Return how many bytes at the end of a blob footer and layout take."""
    return int(_FOOTER.unpack(end[-_FOOTER.size :].tobytes())[2]) + _FOOTER.size


FOOTER_BYTES = _FOOTER.size


def _parse(text: bytes) -> Layout:
    found = json.loads(text)
    leaves = []
    for dtype, shape, offset in found["leaves"]:
        if not isinstance(offset, int) or offset < 0 or offset % ALIGN:
            raise ValueError(f"a leaf at byte {offset}")
        if not all(isinstance(dim, int) and 0 <= dim < 1 << 62 for dim in shape):
            raise ValueError(f"a leaf of shape {shape}")
        leaves.append(Leaf(dtype, tuple(shape), offset, math.prod(shape) * DTYPES[dtype].itemsize))
    return Layout(found["tree"], tuple(leaves))


_cached_layout = lru_cache(1024)(_parse)
