"""Columns in memory: tensors or arrays, tables, a tuple or dict of them, a TensorDataset, a TensorDict."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from memfeed.errors import SchemaError
from memfeed.schema import values
from memfeed.schema.containers import map_leaves, reads_as
from memfeed.schema.fields import Kind, Node, Path, Schema, display
from memfeed.schema.infer import infer
from memfeed.schema.tensordicts import is_a, is_tensordict
from memfeed.schema.tree import Flattener, is_unbatched, open_container, record_names, types_of
from memfeed.store.columns import InMemoryColumn
from memfeed.tables.open_table import open_table
from memfeed.tables.table_column import TableColumn


class Columns:
    """Columns in memory as a map-style dataset: ``len`` rows, each a sample of the columns' own structure.

    ``parts`` are the columns in their containers, in the memory that was given; nothing is copied. ``tables`` are the
    columns of tables among them, by path.
    """

    def __init__(self, parts: Any, row_count: int, tables: Mapping[Path, TableColumn]) -> None:
        self.parts, self._row_count, self.tables = parts, row_count, tables

    def __len__(self) -> int:
        return self._row_count

    def __getitem__(self, row: int) -> Any:
        return take_row(self.parts, row)

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """Return the samples of some rows; those of a run are read from tables together."""
        first, last = rows[0], rows[-1]
        if last - first != len(rows) - 1:
            return [self[row] for row in rows]
        run = _map_columns(self.parts, lambda column: column[first : last + 1])
        return [take_row(run, row) for row in range(len(rows))]

    @property
    def is_plain(self) -> bool:
        """True if every column can be copied whole: rows of numbers, of one dtype and shape."""
        return all(column.is_plain for column in self.tables.values())

    @property
    def kinds(self) -> dict[Path, Kind]:
        """The kinds of the fields that tables know, and that a few rows may not show."""
        return {path: column.kind for path, column in self.tables.items() if column.kind is not None}

    def telling_rows(self) -> list[int]:
        """Return rows that show what others may not: for each column of a table, one with a value and one without."""
        return sorted({row for column in self.tables.values() for row in column.find_telling_rows()})

    @property
    def types(self) -> tuple[type, ...]:
        """The record classes among the columns' containers."""
        return types_of([self.parts])

    def leaves(self, structure: Node) -> list[Any]:
        """Return the columns, tensors or arrays of [n, ...], in the order of the leaves of ``structure``."""
        return Flattener(structure)(self.parts)

    def leaves_of_tables(self, structure: Node) -> list[Any] | None:
        """Return `leaves` if there is a table; None without one, or if its values are containers with leaves."""
        try:
            return self.leaves(structure) if self.tables else None
        except SchemaError:
            return None

    def in_memory(self) -> tuple[Schema, list[InMemoryColumn]]:
        """Return the schema of these data and their columns, for a loader to read; copies nothing.

        Only a column of a table that is in several pieces, or of bools in Arrow, is copied. Raises SchemaError for a
        column that a loader cannot read in place.
        """
        for path, column in self.tables.items():
            if column.is_lazy or not column.is_plain:
                what = "a column of a file" if column.is_lazy else "values that are no numbers of one shape"
                raise SchemaError(
                    f"column {display(path)}: found {what}; expected columns in memory, of numbers: make a store "
                    "first, memfeed.Loader(memfeed.cache(data, path))"
                )
        data = _map_columns(self.parts, lambda column: column[:] if isinstance(column, TableColumn) else column)
        found = infer([self[0] if len(self) else map_leaves(_zero_row, data)])
        leaves = Flattener(found.structure)(data)
        tensors = [tensor for leaf in leaves if (tensor := values.as_tensor(leaf)) is not None]
        columns = [InMemoryColumn(field, tensor) for field, tensor in zip(found.schema.fields, tensors, strict=True)]
        return found.schema, columns


def _zero_row(column: Any) -> Any:
    """Return a row of zeros of a column without rows: it shows the schema."""
    if isinstance(column, torch.Tensor):
        return column.new_zeros(column.shape[1:])
    if isinstance(column, np.ndarray):
        return np.zeros(column.shape[1:], column.dtype)
    return column.apply(_zero_row, batch_size=column.batch_size[1:])


def _map_columns(data: Any, function: Callable[[Any], Any]) -> Any:
    """Return ``data`` with ``function`` of each column in place of it. A list is one column, and so is a TensorDict."""
    if data is None:  # of a sample that has None there: no column
        return None
    if isinstance(data, np.ndarray | torch.Tensor) or hasattr(data, "batch_dims"):  # a TensorDict or tensorclass
        return function(data)
    if isinstance(data, tuple):
        parts = [_map_columns(part, function) for part in data]
        return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)
    if isinstance(data, Mapping):
        return {key: _map_columns(part, function) for key, part in data.items()}
    if names := record_names(type(data)):
        return type(data)(*(_map_columns(getattr(data, name), function) for name in names))
    return function(data)


def take_row(value: Any, row: int) -> Any:
    """Return one row of columns, or of a batch of dataclass instances, as a sample."""
    return _map_columns(value, lambda column: column[row])


def as_columns(data: Any) -> Columns | None:
    """Return ``data`` as columns, or None if it is a dataset of samples. Raises SchemaError for unequal lengths."""
    _refuse_weights(data)
    if reads_as(data, TensorDataset):
        data = tuple(data.tensors)
    data = open_table(data)
    lengths: dict[str, int] = {}
    tables: dict[Path, TableColumn] = {}
    if not _collect_lengths(data, (), lengths, tables):
        return None
    if not lengths:
        raise SchemaError("found columns without any tensor in them; expected at least one")
    if len(set(lengths.values())) > 1:
        (first, length), *others = lengths.items()
        other = next((name, size) for name, size in others if size != length)
        found = f"{first}: {length}, {other[0]}: {other[1]}"
        raise SchemaError(f"found columns of different lengths ({found}); expected one length: one row per sample")
    return Columns(data, next(iter(lengths.values())), tables)


def _refuse_weights(data: Any) -> None:
    """Raise SchemaError for a module, its state_dict, or a TensorDict of its parameters, whose tensors have no rows."""
    is_without_rows = is_tensordict(data) and data.batch_dims == 0 and not len(data)
    leaves = data.values(include_nested=True, leaves_only=True) if is_without_rows else ()
    if any(isinstance(leaf, torch.nn.Parameter) for leaf in leaves):  # as `TensorDict.from_module` makes one
        line = "td.data.memmap(path); memfeed.open(path).into(model.state_dict())"
    elif isinstance(data, torch.nn.Module):
        line = "TensorDict.from_module(model).memmap(path); memfeed.open(path).into(model.state_dict())"
    elif isinstance(data, Mapping) and hasattr(data, "_metadata"):
        line = "TensorDict(state_dict).memmap(path); memfeed.open(path).into(model.state_dict())"
    else:
        return
    raise SchemaError(
        f"found the weights of a model ({type(data).__name__}), which have no rows; expected a dataset. To save and "
        f"load weights: {line}"
    )


def _collect_lengths(value: Any, path: Path, lengths: dict[str, int], tables: dict[Path, TableColumn]) -> bool:
    """Add the length of each column below ``value`` to ``lengths``, and each column of a table to ``tables``.

    Returns False if some part is no column.
    """
    if is_unbatched(value):
        raise _no_rows(path)
    if isinstance(value, TableColumn):
        lengths[display(path)], tables[path] = len(value), value
        return True
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.ndim == 0 or (isinstance(value, torch.Tensor) and (value.is_nested or value.layout != torch.strided)):
            return False
        values.check_class(value, f"column {display(path)}: ")
        lengths[display(path)] = len(value)
        return True
    is_collection = is_tensordict(value)
    if is_collection:
        if is_a(value, "tensordict", "LazyStackedTensorDict") or value.batch_dims == 0:
            return False
    elif not isinstance(value, Mapping | tuple):
        return False  # a list is a dataset of samples
    for key in value.keys() if is_a(value, "tensordict", "TensorDictBase") else ():
        if is_unbatched(value.get(key)):  # older versions of tensordict unwrap it in value[key]
            raise _no_rows((*path, key))
    opened = open_container(value)
    assert opened is not None
    parts = list(zip(opened[0].keys or range(len(opened[1])), opened[1], strict=True))
    are_columns = [_collect_lengths(part, (*path, key), lengths, tables) for key, part in parts]
    if any(are_columns) and not all(are_columns) and not is_collection:
        key, odd = parts[are_columns.index(False)]
        raise SchemaError(
            f"found columns of which {display((*path, key))} is a {type(odd).__name__}; expected tensors or "
            "arrays with one row per sample (samples themselves come as a list or a dataset)"
        )
    return bool(parts) and all(are_columns)


def _no_rows(path: tuple[str | int, ...]) -> SchemaError:
    return SchemaError(
        f"found the UnbatchedTensor {display(path)}, which belongs to no row; expected one row per sample in every "
        f"column: cache(td.exclude({display(path)!r}), path), and keep it beside the store"
    )


def existing_path(data: Any) -> str | None:
    """Return the directory of data that is memory-mapped from disk, or None for any other data."""
    if not is_tensordict(data):
        return None
    prefix = getattr(data, "saved_path", None) if data.is_memmap() else None
    if prefix is not None:
        return str(prefix)
    file = next(_files(data), None)
    if file is None:
        return None
    above = [os.path.dirname(file)]
    while os.path.exists(os.path.join(os.path.dirname(above[-1]), "meta.json")):
        above.append(os.path.dirname(above[-1]))
    return above[-1]


def _files(value: Any) -> Iterator[str]:
    """Yield the files that tensors are mapped from. A map without a name is memory (`memmap_()` without a path)."""
    if is_a(value, "tensordict", "LazyStackedTensorDict"):  # its tensors may not stack
        for piece in value.tensordicts:
            yield from _files(piece)
    elif is_tensordict(value):
        for key in value.keys():  # noqa: SIM118
            yield from _files(value.get(key))
    elif isinstance(value, torch.Tensor):
        try:
            name = getattr(value, "filename", None)
        except RuntimeError:  # MemoryMappedTensor raises it where there is none
            return
        if name:
            yield str(name)
