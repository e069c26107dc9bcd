"""Parquet files, Arrow datasets and HDF5 files as columns that are read run by run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfeed.errors import SchemaError
from memfeed.system.files import local_path
from memfeed.tables.arrow import table_columns
from memfeed.tables.table_column import TableColumn

_SUFFIXES = (".parquet", ".pq")


def is_parquet(data: Any) -> bool:
    """Return True for the path of a Parquet file, for a directory that holds such files, and for a list of paths.

    Raises StoreError for a path with a scheme (``s3://``).
    """
    if isinstance(data, list):
        return bool(data) and all(isinstance(one, str | os.PathLike) and str(one).endswith(_SUFFIXES) for one in data)
    if not isinstance(data, str | os.PathLike):
        return False
    path = local_path(data)
    return path.name.endswith(_SUFFIXES) or (path.is_dir() and next(path.rglob("*.parquet"), None) is not None)


def parquet(data: Any) -> dict[str, Any]:
    """Return the columns of Parquet files, which are read one row group at a time. Raises SchemaError."""
    try:
        from pyarrow.dataset import dataset
    except ImportError:
        raise SchemaError(
            "found Parquet files without pyarrow, which reads them; expected it installed: pip install pyarrow"
        ) from None
    paths = [str(local_path(path)) for path in data] if isinstance(data, list) else str(local_path(data))
    try:
        found = dataset(paths, format="parquet", partitioning=None if isinstance(data, list) else "hive")
    except (OSError, ValueError) as error:
        raise SchemaError(f"found no Parquet file that can be read at {paths!s:.120}: {error!s:.160}") from error
    return arrow_dataset(found, "parquet")


def arrow_dataset(dataset: Any, library: str = "pyarrow") -> dict[str, Any]:
    """Return the columns of a pyarrow Dataset, read one fragment (of Parquet: one row group) at a time.

    Raises SchemaError, also for a dataset with a filter.
    """
    parts, lengths = [], []
    try:
        fragments = list(dataset.get_fragments())
    except ValueError:
        raise SchemaError(
            "found a pyarrow dataset with a filter; expected one without, or its rows in memory: dataset.to_table()"
        ) from None
    for fragment in fragments:
        if hasattr(fragment, "split_by_row_group"):
            groups = fragment.split_by_row_group()
            parts += groups
            lengths += [group.row_groups[0].num_rows for group in groups]
        else:
            parts.append(fragment)
            lengths.append(fragment.count_rows())
    names = dataset.schema.names

    def chunks_of(index: int) -> tuple[list[int], Callable[[int], Any]]:
        def load(chunk: int) -> Any:
            table = parts[chunk].to_table(schema=dataset.schema, columns=[names[index]])
            return table.column(0).combine_chunks()

        return lengths, load

    if not parts:
        return table_columns(library, dataset.schema, lambda i: ([0], lambda _: None), is_lazy=True)
    return table_columns(library, dataset.schema, chunks_of, is_lazy=True)


def hdf5_columns(item: Any) -> Any:
    """Return an h5py File or Group as a dict of the columns below it, an h5py Dataset as one column."""
    import h5py

    if not isinstance(item, h5py.Dataset):
        if not len(item):
            raise SchemaError(f"found {item.name} in {item.file.filename} without a dataset; expected one or more")
        return {name: hdf5_columns(item[name]) for name in item}
    return Hdf5Column(item)


class Hdf5Column(TableColumn):
    """An h5py Dataset, read in the process that opened it."""

    def __init__(self, dataset: Any) -> None:
        import h5py

        name = f"{Path(dataset.file.filename).name}:{dataset.name}"
        if not dataset.ndim:
            raise SchemaError(
                f"column {name}: found a single value without rows; expected one row per sample: "
                "{name: d for name, d in file.items() if d.ndim}"
            )
        text, kind = h5py.check_string_dtype(dataset.dtype), dataset.dtype.kind
        if text is None and (kind not in "biufc"):
            raise SchemaError(
                f"column {name}: found the dtype {dataset.dtype}; expected numbers or strings: "
                "{name: file[name] for name in names_of_numbers}"
            )
        if text is not None and dataset.ndim > 1:
            raise SchemaError(
                f"column {name}: found strings of {dataset.ndim} dims; expected one string per row: "
                f"memfeed.cache({{**columns, 'text': file[{dataset.name!r}][:, 0].tolist()}}, path)"
            )
        super().__init__(name, [len(dataset)], lambda _: dataset, _identity, is_plain=text is None, is_lazy=True)
        self._dataset = dataset if text is None else dataset.asstr()

    def read(self, start: int, stop: int) -> Any:
        """Return rows ``start`` to ``stop``: an array, of strings a list."""
        part = self._dataset[start:stop]
        return part if self.is_plain else part.tolist()


def _identity(part: Any) -> Any:
    return part
