"""Read and check the layout of a directory that `TensorDict.memmap()` wrote.

``Reader`` turns a directory into entries, such as `Tensor` and `Group`, and compares every file's size with its shape
and dtype. It imports no class by name, reads no pickle, follows no symbolic link and maps nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash

from memfeed.errors import CorruptStoreError, StoreError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import DEEPEST, DTYPES, NodeKind, display
from memfeed.schema.fields import Path as FieldPath
from memfeed.store.format import LARGEST_MANIFEST
from memfeed.store.manifest import LARGEST_FILE, MOST_ROWS

METADATA = "meta.json"
VERSION = 1  # of tensordict's layout; directories without a version are 0
MOST_ENTRIES = 1 << 22
DEEPEST_JSON = 200  # Python prints, compares and copies nested values by recursion

_CLASS = re.compile(r"<class '([\w.<>]+)'>")
# characters that tensordict writes as %XX in a file's name
_ENCODED = re.compile(r'[\x00-\x20\x7f/<>:"|?*\\%]')


class Tensor(NamedTuple):
    """A dense tensor in a file of its own."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class Nested(NamedTuple):
    """A strided nested tensor: its rows one after another in a file, ``dims`` int64 [n, rank]."""

    file: Path
    dtype: str
    dims: Int64Array


class TensorStack(NamedTuple):
    """One tensor per row, each from one element of a lazy stack."""

    tensors: list[Tensor]


class Shared(NamedTuple):
    """A value that is not a tensor, the same for every row."""

    value: Any


class PerRow(NamedTuple):
    """Values that are not tensors, one per row."""

    values: list[Any]


class Group(NamedTuple):
    """A TensorDict or tensorclass. A dim of ``batch`` is None if the elements of a lazy stack differ in it."""

    kind: NodeKind
    name: str
    batch: tuple[int | None, ...]
    children: dict[str, Entry]


LeafEntry: TypeAlias = Tensor | Nested | TensorStack | PerRow
Entry: TypeAlias = LeafEntry | Shared | Group


DESCRIPTIONS: dict[type, str] = {
    Tensor: "a tensor",
    Nested: "a nested tensor",
    TensorStack: "a lazy stack",
    Shared: "a value that is no tensor (NonTensorData)",
    PerRow: "values that are no tensors (NonTensorStack)",
    Group: "a TensorDict or tensorclass",
}


def check_batch(entry: Entry, batch: tuple[int, ...], where: str) -> None:
    """Raise StoreError unless an entry's shape begins with the batch_size of the TensorDict that contains it."""
    shape: tuple[int | None, ...] = batch
    if isinstance(entry, Tensor):
        shape = entry.shape
    elif isinstance(entry, Group):
        shape = entry.batch
    elif isinstance(entry, PerRow) and batch:
        shape = (len(entry.values), *batch[1:])
    elif isinstance(entry, Nested) and batch:
        same = entry.dims.shape[1] >= len(batch) - 1 and (entry.dims[:, : len(batch) - 1] == batch[1:]).all()
        shape = (len(entry.dims), *(batch[1:] if same else ()))
    if shape[: len(batch)] != batch:
        raise StoreError(
            f"{where}: found {DESCRIPTIONS[type(entry)]} of shape {list(shape)}; expected it to begin with the "
            f"batch_size {list(batch)} of the TensorDict around it: save it with its own batch_size in order"
        )


def merge(elements: Sequence[Entry], where: Path, at: FieldPath = ()) -> Entry:
    """Merge the elements of a lazy stack into one entry with one row per element. ``at`` is their path in the stack."""
    first = elements[0]
    for row, element in enumerate(elements):
        difference = _difference(first, element)
        if difference:
            raise StoreError(
                f"{where / str(row)}: found {difference}, at {display(at) if at else 'its top'}; "
                "expected the same keys, dtypes and numbers of dims as in piece 0 of the lazy stack"
            )
    if isinstance(first, Shared):
        return PerRow([element.value for element in elements])  # type: ignore[union-attr]
    if isinstance(first, PerRow):
        return PerRow([element.values for element in elements])  # type: ignore[union-attr]
    if isinstance(first, Tensor):
        return TensorStack(list(elements))  # type: ignore[arg-type]
    if isinstance(first, Group):
        batches = zip(*(element.batch for element in elements), strict=True)  # type: ignore[union-attr]
        common = tuple(dims[0] if len(set(dims)) == 1 else None for dims in batches)
        children = {
            key: merge([element.children[key] for element in elements], where, (*at, key))  # type: ignore[union-attr]
            for key in first.children
        }
        return first._replace(batch=(len(elements), *common), children=children)
    raise StoreError(
        f"{where}: found {DESCRIPTIONS[type(first)]} at {display(at)} inside a lazy stack; expected tensors in its "
        "pieces: call .contiguous() (or .densify() where shapes differ) on the inner one and save that"
    )


def _difference(first: Entry, other: Entry) -> str:
    """Return a phrase that says how an element differs from the first, or an empty string."""
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        same = first.dtype == other.dtype and len(first.shape) == len(other.shape)
        return "" if same else f"{other.dtype} {list(other.shape)}, not {first.dtype} {list(first.shape)}"
    if isinstance(first, Group) and isinstance(other, Group):
        odd = sorted(first.children.keys() ^ other.children.keys())
        if odd:
            return f"the key {odd[0]!r} {'more' if odd[0] in other.children else 'missing'}"
        same = first[:2] == other[:2] and len(first.batch) == len(other.batch)
        return "" if same else f"a {other.name or other.kind} of batch_size {list(other.batch)}"
    return "" if type(first) is type(other) else f"{DESCRIPTIONS[type(other)]}, not {DESCRIPTIONS[type(first)]}"


def _status(path: Path) -> os.stat_result | None:
    """Return the status of ``path``, None if nothing is there. Raises CorruptStoreError for a symbolic link."""
    try:
        found = os.lstat(path)
    except (OSError, ValueError):  # nothing there, or a name that no file can have
        return None
    if stat.S_ISLNK(found.st_mode):
        raise CorruptStoreError(f"{path}: found a symbolic link; expected a plain file or directory: put a copy there")
    return found


def _file_bytes(path: Path) -> int:
    found = _status(path)
    if found is None or not stat.S_ISREG(found.st_mode):
        what = "nothing" if found is None else "no plain file"
        raise CorruptStoreError(f"{path}: found {what} there; expected the file that the metadata names: save it again")
    return found.st_size


def _check_bytes(path: Path, size: int, why: str) -> None:
    have = _file_bytes(path)
    if have != size:
        raise CorruptStoreError(
            f"{path}: found {have:,} bytes; expected {size:,} for {why}: "
            "the file was cut, grown or swapped; restore it from a copy or save it again"
        )


def _encode(key: str) -> str:
    if key in ("", ".", ".."):
        return "%2E" * len(key) or "%"
    return _ENCODED.sub(lambda match: f"%{ord(match[0]):02X}", key)


def _entry_paths(directory: Path, entries: dict[str, dict[str, Any]]) -> dict[str, Path]:
    """Return the path of each key's file or directory.

    tensordict 0.8 named them as the keys, newer versions encode the names. So a key is looked up encoded, then as it
    is if that is safe. In an older directory the encoded name may be that of another key ("a%20b" beside "a b"). The
    directory is an older one if a key with a % has a file of its plain name but none of its encoded name.
    """
    paths: dict[str, Path] = {}
    older: dict[str, Path] = {}
    for key, entry in entries.items():
        suffix = "" if "type" in entry else ".memmap"
        encoded = _encode(key)
        paths[key] = directory / (encoded + suffix)
        if encoded != key and key + suffix not in ("", ".", "..") and not re.search(r"[\x00/\\]", key):
            older[key] = directory / (key + suffix)
    older = {key: path for key, path in older.items() if _status(path) is not None}
    only_older = {key: path for key, path in older.items() if _status(paths[key]) is None}
    return paths | (older if any("%" in key for key in only_older) else only_older)


def _is_deeper(value: Any, levels: int) -> bool:
    """Return True if a JSON value nests deeper than ``levels``."""
    level = [value]
    for _ in range(levels + 1):
        nested = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = [part for parts in nested for part in parts]
    return bool(level)


def _dims(value: Any, where: str) -> tuple[int, ...]:
    """Return a shape from JSON. Raises StoreError unless every dim is an int that a file can have."""
    is_shape = isinstance(value, list) and len(value) <= DEEPEST
    if not is_shape or not all(type(dim) is int and 0 <= dim <= MOST_ROWS for dim in value):
        raise StoreError(f"{where}: found the shape {str(value)[:200]}; expected a list of sizes: it is damaged")
    return tuple(value)


def _tensor_bytes(shape: Sequence[int], dtype: str, where: str) -> int:
    """Return the bytes of a tensor. Raises StoreError if they exceed a file (dims of 0 hide no other dim)."""
    if math.prod(dim for dim in shape if dim) * DTYPES[dtype].itemsize > LARGEST_FILE:
        raise StoreError(f"{where}: found the shape {list(shape)}; expected one that a file can hold: it is damaged")
    return math.prod(shape) * DTYPES[dtype].itemsize


class Reader:
    """Reads the metadata of a directory and of all below it, and hashes the bytes that it reads."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._bytes = self._entries = 0
        self.hash = xxhash.xxh3_128()

    def _read(self, path: Path) -> bytes:
        """Read a metadata file. Raises StoreError if all of them together are too large."""
        self._bytes += _file_bytes(path)
        if self._bytes > LARGEST_MANIFEST:
            raise StoreError(
                f"{path}: found {self._bytes:,} bytes of metadata up to here; expected at most {LARGEST_MANIFEST:,}: "
                "keep large values as tensors"
            )
        data = path.read_bytes()
        self.hash.update(os.fsencode(path.relative_to(self._root)) + b"\0%d\0" % len(data) + data)
        return data

    def _metadata(self, directory: Path) -> dict[str, Any]:
        path = directory / METADATA
        if _status(path) is None:
            old = next((name for name in sorted(os.listdir(directory)) if name.endswith("meta.pt")), None)
            if old is not None:
                raise StoreError(
                    f"{directory / old}: found the layout older than {METADATA}, kept in pickles; expected the newer: "
                    "load it with the tensordict that wrote it and save it again with a newer one"
                )
        try:
            found = json.loads(self._read(path))
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{path}: found bytes that cannot be read ({error}); expected JSON: damaged") from None
        if _is_deeper(found, DEEPEST_JSON):
            raise StoreError(f"{path}: found JSON nested deeper than {DEEPEST_JSON}; expected a flatter value")
        if not isinstance(found, dict):
            raise StoreError(f"{path}: found a JSON {type(found).__name__}; expected an object: it is damaged")
        version = found.get("_format_version", 0)
        if isinstance(version, int) and version > VERSION:
            raise StoreError(
                f"{path}: found tensordict's format version {version}; expected at most {VERSION}: upgrade memfeed"
            )
        return found

    def directory(self, path: Path, depth: int) -> Entry:
        """Read the entry of one directory."""
        if depth > DEEPEST:
            raise StoreError(f"{path}: found TensorDicts nested deeper than {DEEPEST}; expected a flatter one")
        found = path.stat() if depth == 0 else _status(path)  # the root itself may be a link
        if found is None or not stat.S_ISDIR(found.st_mode):
            raise CorruptStoreError(f"{path}: found no such directory; expected one, as the metadata above it says")
        meta = self._metadata(path)
        match = _CLASS.fullmatch(str(meta.get("_type")))
        if match is None:
            raise StoreError(
                f"{path / METADATA}: found _type {str(meta.get('_type'))[:99]}; expected a class's name: it is damaged"
            )
        name = match[1].rpartition(".")[2]
        if isinstance(meta.get("shape"), list):
            return self._tensordict(path, meta, depth)
        if match[1].startswith("tensordict."):
            if name in ("NonTensorData", "MetaData"):
                self._refuse_pickle(path, path / "other.pickle", "data" not in meta)
                return Shared(meta.get("data"))
            if name in ("LazyStackedTensorDict", "NonTensorStack"):
                return self._stack(path, meta, depth)
        if _status(path / "_tensordict") is not None:
            return self._tensorclass(path, name, meta, depth)
        raise StoreError(f"{path}: found a {match[1]}; expected a TensorDict, tensorclass or lazy stack: convert it")

    def _refuse_pickle(self, path: Path, file: Path, missing: bool = False) -> None:
        if missing or _status(file) is not None:
            raise StoreError(
                f"{file}: found the entry {display(path.relative_to(self._root).parts)} as a pickle, which can run "
                "code when it is read; expected a JSON value: save it as one, or delete that entry"
            )

    def _tensordict(self, path: Path, meta: dict[str, Any], depth: int) -> Group:
        batch = _dims(meta["shape"], f"{path / METADATA}: batch_size")
        # items that are not dicts describe the directory itself: shape, device, names
        entries = {key: entry for key, entry in meta.items() if isinstance(entry, dict)}
        self._entries += len(entries)
        if self._entries > MOST_ENTRIES:
            raise StoreError(f"{path / METADATA}: found more than {MOST_ENTRIES:,} entries; expected fewer")
        children: dict[str, Entry] = {}
        for key, entry_path in _entry_paths(path, entries).items():
            where = f"{path / METADATA}: entry {key!r}"
            if "type" in entries[key]:
                children[key] = self.directory(entry_path, depth + 1)
            else:
                children[key] = self._tensor(entry_path, entries[key], where)
            check_batch(children[key], batch, where)
        return Group("tensordict", "", batch, children)

    def _tensor(self, file: Path, entry: dict[str, Any], where: str) -> Tensor | Nested:
        dtype = str(entry.get("dtype")).removeprefix("torch.")
        if dtype not in DTYPES:
            raise StoreError(f"{where}: found dtype {dtype[:200]}; expected one of {', '.join(DTYPES)}: cast it")
        shape = _dims(entry.get("shape"), where)
        if entry.get("is_nested"):
            return self._nested(file, dtype, shape, where)
        size = _tensor_bytes(shape, dtype, where)
        if size or _status(file) is not None:  # tensordict writes no file for a tensor without elements
            _check_bytes(file, size, f"{dtype} {list(shape)}")
        return Tensor(file, dtype, shape)

    def _nested(self, file: Path, dtype: str, shape: tuple[int, ...], where: str) -> Nested:
        if len(shape) != 2 or not 1 <= shape[1] <= DEEPEST:
            raise StoreError(f"{where}: found a nested tensor whose sizes are {list(shape)}; expected [rows, dims]")
        sizes = file.with_suffix(".shape.memmap")
        _check_bytes(sizes, _tensor_bytes(shape, "int64", where), f"the sizes of {shape[0]:,} nested rows")
        dims = np.frombuffer(bytearray(self._read(sizes) if shape[0] else b""), np.int64).reshape(shape)
        largest = np.maximum(dims, 1).astype(np.float64).prod(axis=1).sum()
        if (dims < 0).any() or largest * DTYPES[dtype].itemsize > LARGEST_FILE:
            raise CorruptStoreError(f"{sizes}: found sizes that are negative or too large; the file is damaged")
        size = int(dims.prod(axis=1).sum()) * DTYPES[dtype].itemsize
        _check_bytes(file, size, f"{len(dims):,} nested rows of {dtype}")
        return Nested(file, dtype, dims)

    def _tensorclass(self, path: Path, name: str, meta: dict[str, Any], depth: int) -> Group:
        self._refuse_pickle(path, path / "other.pickle")
        inner = self.directory(path / "_tensordict", depth + 1)
        if not isinstance(inner, Group) or not name.isidentifier():
            raise StoreError(f"{path}: found {DESCRIPTIONS[type(inner)]} in {name!r}; expected a TensorDict")
        # older versions keep values that are not tensors here; None is a field without a value
        values: dict[str, Entry] = {k: Shared(v) for k, v in meta.items() if not k.startswith("_") and v is not None}
        if values.keys() & inner.children.keys():
            raise StoreError(f"{path}: found {sorted(values.keys() & inner.children.keys())[0]!r} twice; it is damaged")
        return inner._replace(kind="tensorclass", name=name, children=inner.children | values)

    def _stack(self, path: Path, meta: dict[str, Any], depth: int) -> Entry:
        if "data" in meta:
            self._refuse_pickle(path, path / "pickle.pkl", meta["data"] == "pickle.pkl")
            if not isinstance(meta["data"], list):
                raise StoreError(f"{path / METADATA}: found {type(meta['data']).__name__} as data; expected a list")
            return PerRow(meta["data"])
        if meta.get("stack_dim") != 0:
            raise StoreError(
                f"{path}: found a lazy stack along dim {str(meta.get('stack_dim'))[:20]}; expected dim 0, one piece "
                "per row: call .contiguous() (or .densify() where shapes differ) and save that"
            )
        rows = sorted(int(name) for name in os.listdir(path) if re.fullmatch(r"0|[1-9]\d{0,8}", name, re.ASCII))
        if not rows or rows[-1] != len(rows) - 1:
            missing = next((row for row, found in enumerate(rows) if row != found), 0)
            raise CorruptStoreError(f"{path / str(missing)}: found no such piece; expected one per row of the stack")
        return merge([self.directory(path / str(row), depth + 1) for row in rows], path)
