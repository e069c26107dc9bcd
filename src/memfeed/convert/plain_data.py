"""Find the plain data in the attributes of a dataset, and of the datasets inside it."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import random
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from datetime import date, timedelta
from datetime import time as clock
from decimal import Decimal
from enum import Enum
from multiprocessing.sharedctypes import SynchronizedBase
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from memfeed.convert.module_data import attributes_of, folders_in_code, is_folder, values_read
from memfeed.schema.tensordicts import is_a
from memfeed.store.store import Store

OF_MODULE = "module "  # before the path of what methods find by name in their modules
LONG_TEXT = 10_000  # characters: samples are parts of such a text, and it names no file
SETTINGS = 100  # a list or dict with fewer entries, and not one for each sample, is a setting
MOST_PARTS = 16  # arrays or datasets in a list or dict that have a digest each
DEEPEST = 16
DEEPEST_OBJECT = 3  # of other classes, within one dataset
WIDEST = 64  # values of a record
SEEN = 32  # records at the beginning of a list, and as many in all of it, whose attributes are those of all
DEEPEST_RECORD = 3  # of a record, in a record, in a list

Kind = Literal["data", "setting", "place", "times", "records"]

_VALUES = (int, float, complex, Enum, range, slice, date, timedelta, clock, Decimal)  # also of derived classes
_PLAIN = (str, bytes, bytearray, os.PathLike, list, tuple, dict, set, frozenset, np.generic, *_VALUES)
_CONTAINERS = (list, tuple, dict, set, frozenset, bytes, bytearray, array, deque, types.MappingProxyType)
_TOOLS = (Dataset, Store, torch.nn.Module, random.Random, types.ModuleType, io.IOBase, logging.Logger, logging.Handler)


class Leaf(NamedTuple):
    """One attribute with plain data.

    Args:
        path: the expression that reaches it from the dataset, without "dataset." in front.
        value: what it holds.
        kind: "data" if it has an entry for each sample, or so many that it can be no setting. "place" for a path that
            is another one on another machine: not hashed, but its file may be. "records" if it is a `Column`.
        folders: directories that the attributes beside it name, and that methods write.
    """

    path: str
    value: Any
    kind: Kind
    folders: tuple[str, ...]


class Column(Sequence[Any]):
    """One attribute of all objects in a list, say. Values are taken out when they are read: to find it costs little."""

    def __init__(self, records: Any, get: Callable[[Any], Any] = lambda record: record) -> None:
        self._records, self._get = records, get

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        return self._get(self._records[index])


def leaves_of(dataset: Any, *, is_cut: bool = False) -> list[Leaf]:
    """Return the plain data in a dataset's attributes, and in those of the datasets inside it.

    ``is_cut`` says that its random steps are applied to batches: what attributes that can be called hold is a setting,
    because no row may depend on it.
    """
    return list(_Walk(is_cut).of_value(dataset, "", None, (), 0))


def is_array(value: Any) -> bool:
    """Return True for an array, a tensor, or a column or table of pandas, polars or Arrow."""
    return isinstance(value, np.ndarray | torch.Tensor) or is_column(value) or is_table(value)


class _Walk:
    """Finds attributes. One object is found once: torchvision's ``imgs`` is its ``samples``."""

    def __init__(self, is_cut: bool) -> None:
        self._is_cut = is_cut
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # so that no id is used again

    def of_value(
        self, value: Any, path: str, owner_length: int | None, folders: tuple[str, ...], depth: int, objects: int = 0
    ) -> Iterator[Leaf]:
        if value is None or isinstance(value, type | Store | torch.nn.Module) or depth > DEEPEST:
            return
        if isinstance(value, int | float | complex | str | os.PathLike | np.generic) or content_of(value) is not None:
            is_text = isinstance(value, str | os.PathLike)
            is_place = isinstance(value, str | os.PathLike) and (os.path.isabs(value) or is_folder(value))
            if not objects or is_text:
                kind: Kind = "data" if _is_long_text(value) else "place" if is_place or objects else "setting"
                yield Leaf(path, value, kind, folders)
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, dict) and _is_sparse(value):
            value = value.tocoo()  # type: ignore[attr-defined]  # a dok_matrix, which iterates over matrices of one row
        if (memory := _memory(value)) is not None:
            is_data = len(memory) == owner_length or len(memory) >= SETTINGS
            yield Leaf(path, memory, "data" if is_data else "setting", folders)
        elif is_table(value):
            for name, column in _columns_of(value):
                yield Leaf(f"{path}[{name!r}]", column, "data", folders)
        elif is_array(value):
            yield Leaf(path, value, "data", folders)
            if isinstance(value, np.ndarray) and value.dtype == object:
                yield from _of_records(value.ravel().tolist(), path, folders)
        elif isinstance(value, _CONTAINERS):
            value = dict(value) if isinstance(value, types.MappingProxyType) else value
            is_odd = isinstance(value, tuple) and len(value) != tuple.__len__(value)  # pyfaidx: the bases of a record
            as_list = is_odd or isinstance(value, deque)
            value = np.array(value) if isinstance(value, array) else list(value) if as_list else value
            with contextlib.suppress(Exception):  # of a class of the user's that cannot be read now
                yield from list(self._of_container(value, path, owner_length, folders, depth, objects))
        elif is_owner(value, path):
            yield from self._of_owner(value, path, depth)
        elif (file := _open_file(value)) is not None:
            yield Leaf(_joined(path, "filename"), file, "place", folders)
        elif objects < DEEPEST_OBJECT and not callable(value) and not isinstance(value, _TOOLS):  # annotations of COCO
            for name, one in attributes_of(value):
                yield from self.of_value(one, _joined(path, name), owner_length, folders, depth + 1, objects + 1)

    def _of_owner(self, owner: Any, path: str, depth: int) -> Iterator[Leaf]:
        attributes, named = attributes_of(owner), values_read(owner)
        own = [os.fspath(one) for _, one in attributes if is_folder(one)]
        folders = tuple(dict.fromkeys([*own, *folders_in_code(owner, named)]))
        try:
            length = len(owner)
        except Exception:  # of the user's, or of an iterable without one
            length = None
        for name, value in [*attributes, *_of_class(owner, {name for name, _ in attributes}, length)]:
            yield from self.of_value(value, _joined(path, name), length, folders, depth + 1)
        listed: list[str] = []
        for name, value in named.items():
            is_part = any(name.startswith((f"{one}[", f"{one}.")) for one in listed)
            if not is_part and _is_data_of_module(value, length or SETTINGS):
                listed.append(name)
                where = _joined(path, name[1:]) if name[0] == "." else OF_MODULE + name
                for leaf in self.of_value(value, where, length, folders, depth + 1):
                    yield leaf._replace(kind="setting") if self._is_cut and name[0] == "." else leaf

    def _of_container(
        self, value: Any, path: str, owner_length: int | None, folders: tuple[str, ...], depth: int, objects: int
    ) -> Iterator[Leaf]:
        items = list(value.items() if isinstance(value, dict) else enumerate(value)) if _has_parts(value) else []
        are_datasets = bool(items) and all(isinstance(one, Dataset) for _, one in items)
        if items and (are_datasets or len(items) <= MOST_PARTS):
            for key, one in items:
                shown = "*" if len(items) > MOST_PARTS else repr(key) if type(key) in (int, str) else "?"
                yield from self.of_value(one, f"{path}[{shown}]", owner_length, folders, depth + 1, objects)
        elif len(value):
            is_data = len(value) == owner_length or len(value) >= SETTINGS or not path or _has_long_text(value)
            if is_data or not objects:
                yield Leaf(path, value, "data" if is_data else "setting", folders)
            if is_data and isinstance(value, list | tuple | dict):
                yield from _of_records(value, path, folders)


def is_owner(value: Any, path: str = "") -> bool:
    """Return True for a dataset whose attributes count: of torch, at the top, or called ``dataset``."""
    is_inner = path.rpartition(".")[2] == "dataset" and hasattr(value, "__getitem__")
    return not path or is_inner or isinstance(value, Dataset)


def _of_class(owner: Any, own: set[str], length: int | None) -> list[tuple[str, Any]]:
    """Return the lists and arrays of an owner's classes with an entry for each sample.

    What else a class has may be filled by other datasets: a dict is often a cache.
    """
    classes = [vars(cls) for cls in reversed(type(owner).__mro__) if cls.__module__.partition(".")[0] != "torch"]
    found = {name: value for one in classes for name, value in one.items()}
    return [
        (name, value)
        for name, value in found.items()
        if name not in own and name[:2] != "__" and length and _length_of_data(value) == length
    ]


def _is_data_of_module(value: Any, length: int) -> bool:
    """Return True for a dataset, a long text, and a container with so many entries.

    A list in which some are None may be filled when samples are read.
    """
    if isinstance(value, type | types.FunctionType | types.ModuleType):  # most values that code names
        return False
    with contextlib.suppress(Exception):  # a class of the user's may raise when it is asked for anything
        count = len(value) if isinstance(value, _CONTAINERS) else _length_of_data(value) or 0
        is_filled = isinstance(value, list) and any(one is None for one in value)
        return isinstance(value, Dataset) or _has_long_text(value) or (count >= length and not is_filled)
    return False


def _length_of_data(value: Any) -> int | None:
    is_data = isinstance(value, list | tuple) or is_array(value)
    with contextlib.suppress(TypeError):  # an array of no dims
        return len(value) if is_data else None
    return None


def _memory(value: Any) -> Any:
    """Return a memoryview, ctypes, a BytesIO, or what `multiprocessing` shares, as an array with a row for each entry.

    None for other values.
    """
    value = value.get_obj() if isinstance(value, SynchronizedBase) else value
    value = memoryview(value.getvalue()) if isinstance(value, io.BytesIO) else value
    if not isinstance(value, memoryview | ctypes.Array | ctypes._SimpleCData):
        return None
    try:
        data: Any = np.frombuffer(memoryview(value).cast("B"), np.uint8)
        return data.reshape(len(value) if hasattr(value, "__len__") else 1, -1)
    except (TypeError, ValueError):  # it was released, or is empty or not contiguous
        return None


def _open_file(value: Any) -> str | None:
    """Return the name of the file that an object of Python or h5py has open, only to read it."""
    try:
        if is_a(value, "h5py", "Group", "Dataset"):
            return str(value.file.filename) if value.file.mode == "r" else None
        if isinstance(value, io.IOBase) and value.readable() and not value.writable():
            name = getattr(value, "name", None)
            return name if isinstance(name, str) else None
    except (OSError, ValueError):  # it is closed
        return None
    return None


# --- records: objects of other classes, in lists


def is_record(value: Any) -> bool:
    """Return True for an object whose attributes may be data, and not a tool: a model, a handle, a generator."""
    if value is None or callable(value) or isinstance(value, _PLAIN + _TOOLS) or is_array(value):
        return False
    return bool(attributes_of(value))


def content_of(value: Any) -> Any:
    """Return what a range, a date, a member of an Enum and the like hold, as plain data; None for other values."""
    if isinstance(value, Enum):
        return [value.name, value.value]
    if isinstance(value, range | slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, date | timedelta | clock | Decimal):
        return [str(value)]
    is_derived = type(value) not in (bool, int, float, complex)
    kind = next((one for one in (int, float, complex) if is_derived and isinstance(value, one)), None)
    return None if kind is None or isinstance(value, np.generic) else [kind(value)]


def names_of(records: Iterable[Any]) -> list[str]:
    """Return the names of the attributes of records. A hash that one keeps of itself is another in each process."""
    names = dict.fromkeys(name for one in records for name, _ in attributes_of(one))
    return [name for name in names if not (name[:1] == "_" and "hash" in name)][:WIDEST]


def _of_records(value: Any, path: str, folders: tuple[str, ...]) -> Iterator[Leaf]:
    with contextlib.suppress(Exception):  # of records that are not alike, or cannot be read now
        columns = _columns_of_records(value)
        yield from [Leaf(f"{path}[*]{name}", column, "records", folders) for name, column in columns]


def _columns_of_records(value: Any) -> list[tuple[str, Column]]:
    """Return the attributes of the records in a list or dict; of tuples and dicts in it, the parts with records."""
    records = list(value.values()) if isinstance(value, dict) else value
    parts = _parts_of([*records[:SEEN], *records[:: max(1, len(records) // SEEN)]], len(records) > 1, 0)[:WIDEST]
    if parts and isinstance(value, dict):
        records = [value[key] for key in ordered(value)]
    return [(name, Column(records, get)) for name, get in parts]


def _parts_of(values: Sequence[Any], are_many: bool, depth: int) -> list[tuple[str, Callable[[Any], Any]]]:
    """Return the parts of values that have or are records: how to show one, and what gets it from a value.

    An object that all of many records share is a tool of the program.
    """
    some = [one for one in values if one is not None]
    if not some or depth > DEEPEST_RECORD:
        return []
    first, gets = some[0], list[tuple[str, Callable[[Any], Any]]]()
    if all(map(is_record, some)):
        if not are_many or len(set(map(id, some))) > 1:
            gets = [(f".{name}", _attribute(name)) for name in names_of(some)]
    elif isinstance(first, list | tuple | dict) and len(first) <= WIDEST and len(set(map(type, some))) == 1:
        items = first.items() if isinstance(first, dict) else enumerate(first)
        gets = [(f"[{key!r}]", itemgetter(key)) for key, one in items if _has_records(one) and type(key) in (int, str)]
    found = []
    for name, get in gets:
        inner = list(map(get, some))
        if any(map(is_record, inner)):
            found += [(name + more, _joined_gets(get, last)) for more, last in _parts_of(inner, are_many, depth + 1)]
        else:
            found.append((name, get))
    return found


def _joined_gets(get: Callable[[Any], Any], last: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def joined(record: Any) -> Any:
        inner = get(record)
        return None if inner is None else last(inner)

    return joined


def _attribute(name: str) -> Callable[[Any], Any]:
    return lambda record: getattr(record, name, None)


def _has_records(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        value = next(iter(value.values() if isinstance(value, dict) else value), None)
    return is_record(value)


def ordered(keys: Any) -> list[Any]:
    """Return keys in an order that does not depend on hashes of text, which differ from process to process."""
    kinds = set(map(type, keys))
    if len(kinds) == 1 and kinds <= {int, str, float}:
        return sorted(keys)
    return sorted(keys, key=lambda key: (type(key).__name__, key if type(key) in (int, str, float) else 0))


def _is_long_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) >= LONG_TEXT


def _has_long_text(value: Any) -> bool:
    """Return True for a long text, and for a short container of some: the chromosomes of a genome."""
    parts = value if isinstance(value, dict | list | tuple) else [value]
    return len(parts) < SETTINGS and any(map(_is_long_text, parts.values() if isinstance(parts, dict) else parts))


def _has_parts(value: Any) -> bool:
    """Return True for a container of arrays, datasets, or other containers that are data themselves."""
    if not isinstance(value, list | tuple | dict):
        return False
    parts = value.values() if isinstance(value, dict) else value
    if len(value) <= MOST_PARTS:
        are_long = (
            is_array(one) or _is_sparse(one) or (isinstance(one, Sized) and len(one) >= SETTINGS) for one in parts
        )
        return any(isinstance(one, Dataset) for one in parts) or any(are_long)
    return all(isinstance(one, Dataset) for one in parts)


def _is_sparse(value: Any) -> bool:
    return is_a(value, "scipy.sparse", "spmatrix", "sparray")  # len of it raises


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# --- tables, by libraries that are loaded already


def is_table(value: Any) -> bool:
    """Return True for a table of pandas, polars or Arrow. No library is imported to know it."""
    return any(is_a(value, library, "DataFrame") for library in ("pandas", "polars")) or is_a(
        value, "pyarrow", "Table", "RecordBatch"
    )


def is_arrow(value: Any) -> bool:
    """Return True for a column of Arrow."""
    return is_a(value, "pyarrow", "Array", "ChunkedArray")


def is_column(value: Any) -> bool:
    """Return True for a column of pandas, polars or Arrow."""
    return any(is_a(value, library, "Series") for library in ("pandas", "polars")) or is_arrow(value)


def _columns_of(table: Any) -> list[tuple[Any, Any]]:
    if is_a(table, "pandas", "DataFrame"):
        return [*table.items(), ("(index)", table.index.to_series())]
    names = table.columns if is_a(table, "polars", "DataFrame") else table.schema.names
    return [(name, table[name]) for name in names]
