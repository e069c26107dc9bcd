"""Hash the plain data in the attributes of a dataset, alike in every process.

Only numbers, text, arrays, tensors, columns of tables, and lists, tuples, dicts and sets of them are read, never the
`repr` or the pickle of another object: those differ from run to run although nothing has changed.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from memfeed.convert.plain_data import (
    DEEPEST,
    WIDEST,
    Column,
    Kind,
    Leaf,
    content_of,
    is_arrow,
    is_column,
    is_record,
    is_table,
    names_of,
    ordered,
)
from memfeed.schema.tensordicts import is_a
from memfeed.schema.values import bytes_of
from memfeed.system.signals import is_of_handler

MOST_BYTES = 256 << 20  # of one attribute; of a larger one, parts are hashed
MOST_VALUES = 400_000  # Python objects of one attribute that are visited one by one, about half a second
MOST_SECONDS = 3.0  # for all attributes, the smallest first
SOME = 4096  # values, or blocks of bytes, that stand for a larger attribute
BLOCK_BYTES = 4096
GROUPS = 64  # of records, which have a hash each
MOST_DIGESTS = 1000
PARTIAL = "~"  # before the digest of an attribute of which some values were hashed

# the arrays of lists of one type, and the text before their bytes
_ARRAYS: dict[Any, tuple[Any, str]] = {
    kind: (dtype, np.dtype(dtype).str) for kind, dtype in ((int, np.int64), (bool, np.bool_), (float, np.float64))
}


class Digest(NamedTuple):
    """The hash of one attribute, and the seconds that it took. Two that start differently cannot be compared."""

    text: str
    kind: Kind
    seconds: float = 0.0


def digest_attributes(leaves: Sequence[Leaf], some: Callable[[str], int] = lambda path: 0) -> dict[str, Digest]:
    """Return the `Digest` of each attribute by its path, the smallest first. What takes too long is left out.

    Of those for which `some` returns a number, so many values are hashed.
    """
    found: dict[str, Digest] = {}
    started = time.monotonic()
    for leaf in sorted((leaf for leaf in leaves if leaf.kind != "place"), key=lambda leaf: _size_of(leaf.value)):
        begun = time.monotonic()
        if begun - started > MOST_SECONDS:
            break
        text = hash_value(leaf.value, some(leaf.path))
        if text is not None:
            add(found, leaf.path, Digest(text, leaf.kind, time.monotonic() - begun))
    return found


def add(found: dict[str, Digest], path: str, digest: Digest) -> None:
    """Put a digest among others; those of one path, of many datasets, become one."""
    old = found.get(path)
    if old is not None:
        pairs = [(old.text, digest.text)]
        if digest.kind == "records":  # group by group
            pairs = list(zip_longest(old.text.split(","), digest.text.split(","), fillvalue=""))
        text = ",".join(xxhash.xxh3_64_hexdigest(f"{one} {other}".encode()) for one, other in pairs)
        mark = PARTIAL if PARTIAL in (old.text[:1], digest.text[:1]) else ""
        digest = Digest(mark + text, digest.kind, old.seconds + digest.seconds)
    if old is not None or len(found) < MOST_DIGESTS:
        found[path] = digest


def differ_in_all(one: str, other: str) -> bool:
    """Return True if two digests in groups differ in all of them, as the times of copied files do."""
    groups = [text.split(",") for text in (one, other)]
    return len(groups[0]) == len(groups[1]) and all(a != b for a, b in zip(*groups, strict=True))


# --- the hash


class _TooLargeError(Exception):
    """There is more than can be hashed in time."""


class _Budget:
    def __init__(self, *, reads_records: bool = False) -> None:
        self.values, self.bytes, self.reads_records = MOST_VALUES, MOST_BYTES, reads_records
        self.seen: set[int] = set()  # records, so that a cycle ends

    def take(self, values: float, byte_count: int = 0) -> None:
        self.values -= int(values) + 1
        self.bytes -= byte_count
        if self.values < 0 or self.bytes < 0:
            raise _TooLargeError


def hash_value(value: Any, some: int = 0) -> str | None:
    """Return the digest of plain data, or of ``some`` of its values, if that is not 0; None if it cannot be read."""
    try:
        if not some:
            try:
                return _hash(value)
            except _TooLargeError:
                pass
        return PARTIAL + _hash(some_of(value, some or SOME))
    except Exception as error:  # data that cannot be read now: a class of the user's, the memory of another device
        if is_of_handler(error):
            raise
        return None


def _hash(value: Any) -> str:
    if isinstance(value, Column):
        return _hash_groups(list(value))
    hashed = xxhash.xxh3_64()
    _feed(hashed, value, _Budget(), 0)
    return hashed.hexdigest()


def _hash_groups(values: list[Any]) -> str:
    """Return the hashes of up to `GROUPS` groups of values, of records inside them too.

    An edit of some can be told by them from what is another value for every object in every run: a time, a random name.
    """
    texts, budget = [], _Budget(reads_records=True)
    for group in range(min(GROUPS, len(values))):
        hashed = xxhash.xxh3_64()
        budget.seen = set()
        _feed_list(hashed, values[group::GROUPS], budget, 0)
        texts.append(hashed.hexdigest()[:8])
    return ",".join(texts)


def _feed(hashed: Any, value: Any, budget: _Budget, depth: int) -> None:
    """Hash one value. An object of another class counts as being there, whatever it is, but for records in columns."""
    budget.take(1)
    kind = type(value)
    if depth > DEEPEST:
        raise _TooLargeError
    if value is None or kind in (bool, int, float, complex):
        hashed.update(f"{kind.__name__} {value!r};".encode())
    elif isinstance(value, np.generic):
        _feed_array(hashed, np.asarray(value), budget, depth)
    elif isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        hashed.update(_encoded(os.path.basename(text) if isinstance(text, str) and os.path.isabs(text) else text))
    elif isinstance(value, bytes | bytearray):
        budget.take(1, len(value))
        hashed.update(bytes(value))
    elif isinstance(value, list | tuple):
        _feed_list(hashed, list(value), budget, depth)
    elif isinstance(value, dict):
        keys = ordered(value)
        _feed_list(hashed, keys, budget, depth)
        _feed_list(hashed, [value[key] for key in keys], budget, depth)
    elif isinstance(value, set | frozenset):
        _feed_list(hashed, _ordered_set(value), budget, depth)
    elif isinstance(value, torch.Tensor):
        _feed_array(hashed, _as_bytes(value), budget, depth, f"{value.dtype}{list(value.shape)}")
    elif isinstance(value, np.ndarray):
        _feed_array(hashed, value, budget, depth)
    elif is_column(value):
        array = value.to_numpy(zero_copy_only=False) if is_a(value, "pyarrow", "Array") else value.to_numpy()
        _feed_array(hashed, np.asarray(array), budget, depth)
    elif (content := content_of(value)) is not None:
        hashed.update(kind.__name__.encode())
        _feed_list(hashed, content, budget, depth)
    elif budget.reads_records and id(value) not in budget.seen and is_record(value):
        budget.seen.add(id(value))
        for name in names_of([value]):
            inner = getattr(value, name)
            hashed.update(name.encode() + b"?" * is_record(inner))
            if not is_record(inner):  # else it may be a tool
                _feed(hashed, inner, budget, depth + 1)
    else:
        hashed.update(b"?")


def _feed_list(hashed: Any, values: list[Any], budget: _Budget, depth: int) -> None:
    """Hash a list; of values of one type at once, of records column by column."""
    types = set(map(type, values))
    if tuple in types:
        types = types - {tuple} | {list}
    budget.take(len(values) / 50)
    hashed.update(f"[{len(values)}]".encode())
    kind = next(iter(types)) if len(types) == 1 else None
    if kind in _ARRAYS:
        dtype, described = _ARRAYS[kind]
        try:
            array = np.array(values, dtype)
            budget.take(1, array.nbytes)
            hashed.update(f"{described}({len(values)},)".encode())  # as `_feed_array`, in a third of its time
            hashed.update(array)
            return
        except OverflowError:  # ints beyond 64 bits
            pass
    if kind is not None and issubclass(kind, np.generic):
        _feed_array(hashed, np.array(values), budget, depth)
        return
    if types and types <= {int, float, bool, complex, type(None)}:
        budget.take(len(values) / 10)
        hashed.update("\n".join(map(repr, values)).encode())
    elif types and all(issubclass(one, str | os.PathLike) for one in types):
        _feed_text(hashed, list(map(os.fspath, values)), budget)
    elif kind is list and len(sizes := set(map(len, values))) == 1 and 0 < min(sizes) <= WIDEST:
        for position in range(sizes.pop()):
            _feed_list(hashed, list(map(itemgetter(position), values)), budget, depth + 1)
    elif kind is dict and values[0] and all(map(values[0].keys().__eq__, map(dict.keys, values))):
        for key in ordered(values[0]):
            hashed.update((f"{key!r}" if type(key) in (int, str) else "?").encode())
            _feed_list(hashed, list(map(itemgetter(key), values)), budget, depth + 1)
    elif kind is torch.Tensor and depth < DEEPEST:
        _feed_tensors(hashed, values, budget, depth)
    elif kind is not None and content_of(values[0]) is not None:
        hashed.update(kind.__name__.encode())
        _feed_list(hashed, list(map(content_of, values)), budget, depth + 1)
    elif kind is not None and not budget.reads_records and is_record(values[0]):
        hashed.update(b"?" * len(values))
    else:
        for value in values:
            _feed(hashed, value, budget, depth + 1)


def _feed_tensors(hashed: Any, values: list[torch.Tensor], budget: _Budget, depth: int) -> None:
    """Hash tensors as `_feed` does, in a third of its time: a dataset may hold one for each sample."""
    for value in values:
        try:
            array = value.numpy()
        except (RuntimeError, TypeError):  # it needs a gradient, is sparse, or is on another device
            array = None
        if array is None or array.size < 2 or not array.flags.c_contiguous:
            _feed(hashed, value, budget, depth + 1)
        else:
            budget.take(3, array.nbytes)
            hashed.update(f"{value.dtype}{list(value.shape)}".encode())
            hashed.update(array)


def _feed_text(hashed: Any, values: list[str], budget: _Budget) -> None:
    """Hash strings. Paths are hashed without the directory that all of them are in, which may have another place."""
    # relative paths of files too, which may become absolute; other words may have a slash as well
    if values[0][:1] in ("/", ".", "~") or ("/" in values[0] and os.path.exists(values[0])):
        first, last = min(values), max(values)
        alike = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
        begin = first.rfind("/", 0, alike) + 1
        values = [value[begin:] for value in values] if begin else values
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    budget.take(len(values) / 50, int(lengths.sum()))
    hashed.update(lengths.tobytes())
    hashed.update(_encoded("".join(values)))


def _feed_array(hashed: Any, array: Any, budget: _Budget, depth: int, described: str = "") -> None:
    if isinstance(array, np.ma.MaskedArray):
        _feed_array(hashed, np.ma.getmaskarray(array), budget, depth)
        array = array.data
    if array.dtype.hasobject:
        hashed.update(str(array.shape).encode())
        _feed_list(hashed, array.ravel().tolist(), budget, depth + 1)
        return
    if array.dtype.kind == "U":
        hashed.update(str(array.shape).encode())
        _feed_text(hashed, array.ravel().tolist() or [""], budget)
        return
    budget.take(1, array.nbytes)
    hashed.update((described or f"{array.dtype.str}{array.shape}").encode())
    hashed.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b"")


def _as_bytes(tensor: torch.Tensor) -> Any:
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise TypeError("no plain values")
    if type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return bytes_of(tensor.cpu())


def _ordered_set(values: Any) -> list[Any]:
    """Return the values of a set in an order that is the same in every process."""
    if _is_simple(values):
        return sorted(values)  # in a fifth of the time

    def key(value: Any) -> tuple[str, Any]:
        if type(value) in (int, str, float):
            return type(value).__name__, value
        return type(value).__name__, "" if _is_steady(value) else rank(value)

    def rank(value: Any) -> str:
        if isinstance(value, tuple) and all(type(one) in (int, float, bool, str, type(None)) for one in value):
            return repr(value)
        if len(values) > MOST_VALUES // 10:
            raise _TooLargeError
        return _hash(Column([value]))

    return sorted(values, key=key)


def _is_simple(values: Any) -> bool:
    """Return True for whole numbers alone and for text alone, which have one order."""
    return set(map(type, values)) in ({int}, {str})


def _is_steady(value: Any) -> bool:
    """Return True for numbers, and tuples and sets of them: their hashes do not differ between processes."""
    if isinstance(value, tuple | frozenset):
        return all(map(_is_steady, value))
    return isinstance(value, int | float | complex | np.number)


def _encoded(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


# --- parts of what is large


@lru_cache
def chosen(count: int, most: int = SOME) -> Sequence[int]:
    """Return up to `most` positions of `count`, ascending, the same in every process: chosen by a hash."""
    if count <= most:
        return list(range(count))
    return sorted({0, count - 1} | {xxhash.xxh3_64_intdigest(i.to_bytes(8, "little")) % count for i in range(most - 2)})


def some_of(value: Any, most: int) -> Any:
    """Return the length of plain data and `most` of its values, to be hashed in its place."""
    if isinstance(value, dict):
        keys = list(value)  # pairs of all would take a second for millions
        return [len(keys), [(keys[i], value[keys[i]]) for i in chosen(len(keys), most)]]
    if isinstance(value, set | frozenset):
        if _is_simple(value):
            return [len(value), heapq.nsmallest(most, value)]  # to sort millions would take seconds
        value = _ordered_set(value)
    if isinstance(value, np.ndarray | torch.Tensor):
        return _blocks_of(value, most)
    if is_table(value) or is_column(value):
        rows = chosen(len(value), most)
        taken = value.iloc[rows] if is_a(value, "pandas", "Series") else value.take(rows) if is_arrow(value) else None
        return [len(value), value[rows] if taken is None else taken]
    if isinstance(value, bytes):
        return _blocks_of(np.frombuffer(value, np.uint8), most)
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return value
    if isinstance(value, Column):
        return Column([value[i] for i in chosen(len(value), most)])
    return [len(value), [value[i] for i in chosen(len(value), most)]]


def _blocks_of(value: Any, most: int) -> Any:
    if isinstance(value, np.ma.MaskedArray):
        return [_blocks_of(one, most) for one in (value.data, np.ma.getmaskarray(value))]
    described = [str(value.dtype), list(value.shape)]
    is_flat = isinstance(value, torch.Tensor) or (not value.dtype.hasobject and value.flags.c_contiguous)
    if not is_flat:
        return [described, value[chosen(len(value), most)]]
    data = _as_bytes(value) if isinstance(value, torch.Tensor) else value.reshape(-1).view(np.uint8)
    if len(data) <= most * BLOCK_BYTES:
        return [described, data]
    blocks = chosen(len(data) // BLOCK_BYTES, most)
    return [described, [data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] for i in blocks], data[-BLOCK_BYTES:]]


def _size_of(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return 50 * len(value) if hasattr(value, "__len__") else 0
