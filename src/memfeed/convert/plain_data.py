"""Find the plain data in the attributes of a dataset, and of the datasets inside it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from memfeed.store.store import Store
from memfeed.tables.table_column import is_a

SETTINGS = 100  # a list or dict with fewer entries, and not one for each sample, is a setting
MOST_PARTS = 16  # arrays or datasets in a list or dict that have a digest each
DEEPEST = 16
DEEPEST_OBJECT = 3  # of other classes, within one dataset

Kind = Literal["data", "setting", "place", "times"]


class Leaf(NamedTuple):
    """One attribute with plain data.

    Args:
        path: the expression that reaches it from the dataset, without "dataset." in front.
        value: what it holds.
        kind: "data" if it has an entry for each sample, or so many that it can be no setting. "place" for a path that
            is another one on another machine: not hashed, but its file may be.
        folders: directories that the attributes beside it name.
    """

    path: str
    value: Any
    kind: Kind
    folders: tuple[str, ...]


def leaves_of(dataset: Any) -> list[Leaf]:
    """Return the plain data in a dataset's attributes, and in those of the datasets inside it."""
    return list(_Walk().of_value(dataset, "", None, (), 0))


def is_array(value: Any) -> bool:
    """Return True for an array, a tensor, or a column or table of pandas, polars or Arrow."""
    return isinstance(value, np.ndarray | torch.Tensor) or is_column(value) or is_table(value)


class _Walk:
    """Finds attributes. One object is found once: torchvision's ``imgs`` is its ``samples``."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # so that no id is used again

    def of_value(
        self, value: Any, path: str, owner_length: int | None, folders: tuple[str, ...], depth: int, objects: int = 0
    ) -> Iterator[Leaf]:
        if value is None or isinstance(value, type | Store | torch.nn.Module) or depth > DEEPEST:
            return
        if isinstance(value, bool | int | float | complex | str | os.PathLike | np.generic):
            is_text = isinstance(value, str | os.PathLike)
            is_place = isinstance(value, str | os.PathLike) and (os.path.isabs(value) or is_folder(value))
            if not objects or is_text:
                yield Leaf(path, value, "place" if is_place or objects else "setting", folders)
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if is_table(value):
            for name, column in _columns_of(value):
                yield Leaf(f"{path}[{name!r}]", column, "data", folders)
        elif is_array(value):
            yield Leaf(path, value, "data", folders)
        elif isinstance(value, list | tuple | dict | set | frozenset | bytes):
            with contextlib.suppress(Exception):  # of a class of the user's that cannot be read now
                yield from list(self._of_container(value, path, owner_length, folders, depth, objects))
        elif is_owner(value, path):
            yield from self._of_owner(value, path, depth)
        elif not callable(value) and objects < DEEPEST_OBJECT:  # annotations of COCO, for example
            for name, one in list(getattr(value, "__dict__", {}).items()):
                yield from self.of_value(one, _joined(path, name), owner_length, folders, depth + 1, objects + 1)

    def _of_owner(self, owner: Any, path: str, depth: int) -> Iterator[Leaf]:
        attributes = list(getattr(owner, "__dict__", {}).items())
        folders = tuple(os.fspath(one) for _, one in attributes if is_folder(one))
        try:
            length = len(owner)
        except Exception:  # of the user's, or of an iterable without one
            length = None
        for name, value in attributes:
            yield from self.of_value(value, _joined(path, name), length, folders, depth + 1)

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
            is_data = len(value) == owner_length or len(value) >= SETTINGS or not path
            if is_data or not objects:
                yield Leaf(path, value, "data" if is_data else "setting", folders)


def is_owner(value: Any, path: str = "") -> bool:
    """Return True for a dataset whose attributes count: of torch, at the top, or called ``dataset``."""
    is_inner = path.rpartition(".")[2] == "dataset" and hasattr(value, "__getitem__")
    return not path or is_inner or isinstance(value, Dataset)


def is_folder(value: Any) -> bool:
    """Return True for the path of a directory. A word without a separator is no path."""
    is_path = isinstance(value, os.PathLike) or (isinstance(value, str) and (os.sep in value or value[:1] in ".~"))
    try:
        return is_path and os.path.isdir(value)
    except ValueError:
        return False


def _has_parts(value: Any) -> bool:
    """Return True for a container of arrays, datasets, or other containers that are data themselves."""
    if not isinstance(value, list | tuple | dict):
        return False
    parts = value.values() if isinstance(value, dict) else value
    if len(value) <= MOST_PARTS:
        return any(
            is_array(one) or isinstance(one, Dataset) or (hasattr(one, "__len__") and len(one) >= SETTINGS)
            for one in parts
        )
    return all(isinstance(one, Dataset) for one in parts)


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
