"""Open a directory that `TensorDict.memmap()` wrote as the fields and columns of a store, in place.

`DirectoryReader` turns it into entries such as `Tensor` and `Group`, and compares every file's size with its shape and
dtype. It imports no class by name, reads no pickle, follows no symbolic link and maps nothing. tensordict's own reader
does not serve for data of strangers: it imports the classes that the metadata names, and fills up a file that was cut
with zeros, on the disk. The rare forms are copied: an archive (``.tdz``) is unpacked into a temporary directory, and
the pieces of a lazy stack are read into memory.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from memfeed.errors import CorruptStoreError, StoreError
from memfeed.schema.fields import DEEPEST, DTYPES
from memfeed.schema.names import encode_key
from memfeed.store.format import LARGEST_JSON, metadata_limit
from memfeed.store.manifest import LARGEST_FILE, MOST_EMPTY_ROWS, MOST_ROWS
from memfeed.store.tensordict_entries import (
    DESCRIPTIONS,
    Contents,
    Entry,
    Group,
    LeftOut,
    Nested,
    PerRow,
    Shared,
    Tensor,
    check_batch,
    contents_of,
    merge,
)
from memfeed.system.messages import format_bytes, say_once
from memfeed.system.temporary import TemporaryDirectory

METADATA = "meta.json"
VERSION = 1  # of tensordict's layout; directories without a version are 0
MOST_ENTRIES = 1 << 22
MOST_SIZE_BYTES = 1 << 30  # of the files with the sizes of nested rows
DEEPEST_JSON = 200  # Python prints, compares and copies nested values by recursion

_CLASS = re.compile(r"<class '([\w.<>]+)(\[[\w.<>\[\], |]+\])?'>")  # the part in brackets is that of MetaData[str]


def read(root: Path) -> tuple[Contents, str]:
    """Return the contents of a directory written by `TensorDict.memmap()` or that of a tensorclass, and their digest.

    Raises StoreError for contents that are refused (symbolic links, the layout older than meta.json, a lazy stack along
    another dim than the first, a dtype that no column can have), CorruptStoreError for files that are shorter than the
    metadata says. Pickles are left out.
    """
    reader = DirectoryReader(root)
    top = reader.directory(root, 0)
    if not isinstance(top, Group):
        raise StoreError(f"{root}: found {DESCRIPTIONS[type(top)]}; expected a TensorDict: save it inside one")
    try:
        contents = contents_of(top)
    except StoreError as error:
        raise StoreError(f"{root}: {error}") from None
    rows = contents.row_count or 0
    if rows > MOST_EMPTY_ROWS and not any(column.nbytes for column in contents.columns):
        raise StoreError(
            f"{root}: found {rows:,} rows in no byte at all; expected at most {MOST_EMPTY_ROWS:,} of those"
        )
    return contents, reader.hash.hexdigest()


def unpack(archive: Path) -> TemporaryDirectory:
    """Return a temporary directory with the files of an archive. Raises StoreError for one that is compressed."""
    directory = TemporaryDirectory()
    size = archive.stat().st_size
    try:
        with zipfile.ZipFile(archive) as opened:
            if sum(entry.file_size for entry in opened.infolist()) > size:
                raise StoreError(
                    f"{archive}: found compressed files in it; expected an archive that tensordict wrote, which is not "
                    "compressed: unzip it and open the directory"
                )
            opened.extractall(directory.path)
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, EOFError, RuntimeError) as error:
        raise CorruptStoreError(f"{archive}: found an archive that cannot be read ({error}): save it again") from None
    say_once(
        f"memfeed: {archive} was unpacked into a temporary directory ({format_bytes(size)}); unzip it and open the "
        "directory, which is not copied"
    )
    return directory


def _entry_paths(reader: DirectoryReader, directory: Path, entries: dict[str, dict[str, Any]]) -> dict[str, Path]:
    """Return the path of each key's file or directory.

    tensordict 0.8 named them as the keys, newer versions encode the names. So a key is looked up encoded, then as it
    is if that is safe. In an older directory the encoded name may be that of another key ("a%20b" beside "a b"). The
    directory is an older one if a key with a % has a file of its plain name but none of its encoded name.
    """
    paths: dict[str, Path] = {}
    older: dict[str, Path] = {}
    for key, entry in entries.items():
        suffix = "" if "type" in entry else ".memmap"
        encoded = encode_key(key)
        paths[key] = directory / (encoded + suffix)
        if encoded != key and key + suffix not in ("", ".", "..") and not re.search(r"[\x00/\\]", key):
            older[key] = directory / (key + suffix)
    older = {key: path for key, path in older.items() if reader.is_there(path)}
    only_older = {key: path for key, path in older.items() if not reader.is_there(paths[key])}
    return paths | (older if any("%" in key for key in only_older) else only_older)


def _is_deep(value: Any) -> bool:
    """Return True if a JSON value nests deeper than `DEEPEST_JSON`."""
    level = [value]
    for _ in range(DEEPEST_JSON + 1):
        nested = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = [part for parts in nested for part in parts]
    return bool(level)


def _dims(value: Any, where: str) -> tuple[int, ...]:
    """Return a shape from JSON. Raises StoreError unless every dim is an int that a file can have."""
    is_shape = isinstance(value, list) and len(value) <= DEEPEST
    if not is_shape or not all(type(dim) is int and 0 <= dim <= MOST_ROWS for dim in value):
        raise StoreError(f"{where}: found the shape {str(value)[:200]}; expected a list of sizes: it is damaged")
    return tuple(value)


def _dim_names(names: Any, dims: int) -> tuple[str | None, ...]:
    """Return the names of the dims of a batch_size; () if there are none. Before tensordict 0.15 none were saved."""
    known = isinstance(names, list) and len(names) == dims and all(isinstance(name, str | None) for name in names)
    return tuple(names) if known else ()


def _tensor_bytes(shape: Sequence[int], dtype: str, where: str) -> int:
    """Return the bytes of a tensor. Raises StoreError if they exceed a file (dims of 0 hide no other dim)."""
    if math.prod(dim for dim in shape if dim) * DTYPES[dtype].itemsize > LARGEST_FILE:
        raise StoreError(f"{where}: found the shape {list(shape)}; expected one that a file can hold: it is damaged")
    return math.prod(shape) * DTYPES[dtype].itemsize


class DirectoryReader:
    """Reads the metadata of a directory and of all below it, and hashes the bytes that it reads."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._bytes = self._size_bytes = self._entries = 0
        self._limit = LARGEST_JSON
        self.hash = xxhash.xxh3_128()

    def _status(self, path: Path) -> os.stat_result | None:
        """Return the status of the file at a path, or None. The path of the directory itself may be a link."""
        try:
            found = path.stat() if path == self._root else os.lstat(path)
        except (OSError, ValueError):  # nothing there, or a name that no file can have
            return None
        if stat.S_ISLNK(found.st_mode):
            raise CorruptStoreError(
                f"{path}: found a symbolic link; expected a plain file or directory: put a copy there"
            )
        return found

    def _file_size(self, path: Path) -> int | None:
        """Return the bytes of a file, None if nothing is there. Raises CorruptStoreError for anything but a file."""
        found = self._status(path)
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise CorruptStoreError(f"{path}: found no plain file there; expected a file: save it again")
        return None if found is None else found.st_size

    def _is_directory(self, path: Path) -> bool:
        found = self._status(path)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def is_there(self, path: Path) -> bool:
        """Return True if a file or directory is at the path. Raises CorruptStoreError for a link or a pipe."""
        return self._is_directory(path) or self._file_size(path) is not None

    def read(self, path: Path) -> bytes:
        """Read a JSON file. Raises StoreError if all of them together are more than the files beside them justify."""
        self._bytes += self._size(path)
        if self._bytes > self._limit:
            self._limit = metadata_limit(self._root, self._bytes)
        if self._bytes > self._limit:
            raise StoreError(
                f"{path}: found {self._bytes:,} bytes of metadata up to here; expected at most {self._limit:,} beside "
                "so few files: keep large values as tensors"
            )
        return self._hashed(path)

    def _read_sizes(self, path: Path) -> bytes:
        """Read the sizes of nested rows, which take as much memory as the file. Raises StoreError if that is a lot."""
        self._size_bytes += self._size(path)
        if self._size_bytes > MOST_SIZE_BYTES:
            raise StoreError(
                f"{path}: found {self._size_bytes:,} bytes of sizes up to here; expected at most {MOST_SIZE_BYTES:,}"
            )
        return self._hashed(path)

    def _hashed(self, path: Path) -> bytes:
        data = path.read_bytes()
        self.hash.update(os.fsencode(path.relative_to(self._root)) + b"\0%d\0" % len(data) + data)
        return data

    def _size(self, path: Path) -> int:
        size = self._file_size(path)
        if size is None:
            raise CorruptStoreError(
                f"{path}: found nothing there; expected the file that the metadata names: save it again"
            )
        return size

    def _require_bytes(self, path: Path, size: int, why: str) -> Path:
        """Return the path of a tensor's file. The file may be longer, as tensordict leaves it if fewer rows are saved.

        Raises CorruptStoreError if it is shorter.
        """
        have = self._size(path)
        if have < size:
            raise CorruptStoreError(
                f"{path}: found {have:,} bytes; expected {size:,} for {why}: "
                "the file was cut or swapped; restore it from a copy or save it again"
            )
        return path

    def _metadata(self, directory: Path) -> dict[str, Any]:
        path = directory / METADATA
        if self._file_size(path) is None:
            old = next((name for name in os.listdir(directory) if name.endswith("meta.pt")), None)
            if old is not None:
                raise StoreError(
                    f"{directory / old}: found the layout older than {METADATA}, kept in pickles; expected the newer: "
                    "load it with the tensordict that wrote it and save it again with a newer one"
                )
        data = self.read(path)
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{path}: found bytes that cannot be read ({error}); expected JSON: damaged") from None
        if _is_deep(found):
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
        if not self._is_directory(path):
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
                # other.pickle may lie beside it, but keeps other facts: each is in one of the two
                return Shared(meta["data"]) if "data" in meta else LeftOut("a pickle")
            if name in ("LazyStackedTensorDict", "NonTensorStack"):
                return self._stack(path, meta, depth)
        if self._is_directory(path / "_tensordict"):
            return self._tensorclass(path, name, meta, depth)
        raise StoreError(f"{path}: found a {match[1]}; expected a TensorDict, tensorclass or lazy stack: convert it")

    def _tensordict(self, path: Path, meta: dict[str, Any], depth: int) -> Group:
        batch = _dims(meta["shape"], f"{path / METADATA}: batch_size")
        # items that are not dicts describe the directory itself: shape, device, names
        entries = {key: entry for key, entry in meta.items() if isinstance(entry, dict)}
        self._entries += len(entries)
        if self._entries > MOST_ENTRIES:
            raise StoreError(f"{path / METADATA}: found more than {MOST_ENTRIES:,} entries; expected fewer")
        children: dict[str, Entry] = {}
        for key, entry_path in _entry_paths(self, path, entries).items():
            where = f"{path / METADATA}: entry {key!r}"
            if "type" in entries[key]:
                children[key] = self.directory(entry_path, depth + 1)
            else:
                children[key] = self._tensor(entry_path, entries[key], where)
            check_batch(children[key], batch, where)
        return Group("tensordict", "", batch, children, _dim_names(meta.get("_names"), len(batch)))

    def _tensor(self, file: Path, entry: dict[str, Any], where: str) -> Tensor | Nested:
        dtype = str(entry.get("dtype")).removeprefix("torch.")
        if dtype not in DTYPES:
            raise StoreError(f"{where}: found dtype {dtype[:200]}; expected one of {', '.join(DTYPES)}: cast it")
        shape = _dims(entry.get("shape"), where)
        if entry.get("is_nested"):
            return self._nested(file, dtype, shape, where)
        size = _tensor_bytes(shape, dtype, where)
        if not size:  # tensordict writes no file for a tensor without elements
            return Tensor(file, dtype, shape)
        return Tensor(self._require_bytes(file, size, f"{dtype} {list(shape)}"), dtype, shape)

    def _nested(self, file: Path, dtype: str, shape: tuple[int, ...], where: str) -> Nested:
        if len(shape) != 2 or not 1 <= shape[1] <= DEEPEST:
            raise StoreError(f"{where}: found a nested tensor whose sizes are {list(shape)}; expected [rows, dims]")
        sizes = file.with_suffix(".shape.memmap")
        size = _tensor_bytes(shape, "int64", where)
        if size:
            self._require_bytes(sizes, size, f"the sizes of {shape[0]:,} nested rows")
        dims = np.frombuffer(bytearray(self._read_sizes(sizes)[:size] if size else b""), np.int64).reshape(shape)
        largest = np.maximum(dims, 1).astype(np.float64).prod(axis=1).sum()
        if (dims < 0).any() or largest * DTYPES[dtype].itemsize > LARGEST_FILE:
            raise CorruptStoreError(f"{sizes}: found sizes that are negative or too large; the file is damaged")
        size = int(dims.prod(axis=1).sum()) * DTYPES[dtype].itemsize
        if not size:
            return Nested(file, dtype, dims)
        return Nested(self._require_bytes(file, size, f"{len(dims):,} nested rows of {dtype}"), dtype, dims)

    def _tensorclass(self, path: Path, name: str, meta: dict[str, Any], depth: int) -> Group:
        inner = self.directory(path / "_tensordict", depth + 1)
        if not isinstance(inner, Group) or not name.isidentifier():
            raise StoreError(f"{path}: found {DESCRIPTIONS[type(inner)]} in {name!r}; expected a TensorDict")
        # older versions keep values that are not tensors here; None is a field without a value
        values: dict[str, Entry] = {k: Shared(v) for k, v in meta.items() if not k.startswith("_") and v is not None}
        if values.keys() & inner.children.keys():
            raise StoreError(f"{path}: found {sorted(values.keys() & inner.children.keys())[0]!r} twice; it is damaged")
        pickled: dict[str, Entry]
        pickled = {"other.pickle": LeftOut("a pickle")} if self._file_size(path / "other.pickle") is not None else {}
        return inner._replace(kind="tensorclass", name=name, children=inner.children | values | pickled)

    def _stack(self, path: Path, meta: dict[str, Any], depth: int) -> Entry:
        if "data" in meta:
            if meta["data"] == "pickle.pkl":
                return LeftOut("a pickle")
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
        merged = merge([self.directory(path / str(row), depth + 1) for row in rows], str(path))
        stack_name = meta.get("stack_dim_name")
        if isinstance(merged, Group) and isinstance(stack_name, str):
            inner = merged.dim_names[1:] or (None,) * (len(merged.batch) - 1)
            return merged._replace(dim_names=(stack_name, *inner))
        return merged
