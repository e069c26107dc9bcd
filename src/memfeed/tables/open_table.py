"""Recognise the tables that users have, by the library that they come from. No library is imported for it.

Parquet files, Arrow datasets and HDF5 files become columns that are read run by run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memfeed.errors import SchemaError
from memfeed.schema.tensordicts import is_a
from memfeed.system.files import local_path
from memfeed.tables.arrow import TablePlace, arrow_array, arrow_table, table_columns
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
    """Return an h5py File or Group as a dict of the columns below it, an h5py Dataset as one column.

    It is read in the process that opened it.
    """
    import h5py

    if not isinstance(item, h5py.Dataset):
        if not len(item):
            raise SchemaError(f"found {item.name} in {item.file.filename} without a dataset; expected one or more")
        return {name: hdf5_columns(item[name]) for name in item}
    name = f"{Path(item.file.filename).name}:{item.name}"
    if not item.ndim:
        raise SchemaError(
            f"column {name}: found a single value without rows; expected one row per sample: "
            "{name: d for name, d in file.items() if d.ndim}"
        )
    if h5py.check_string_dtype(item.dtype) is None:
        if item.dtype.kind not in "biufc":
            raise SchemaError(
                f"column {name}: found the dtype {item.dtype}; expected numbers or strings: "
                "{name: file[name] for name in names_of_numbers}"
            )
        return TableColumn(name, [len(item)], lambda _: item, lambda run: run, is_plain=True, is_lazy=True)
    if item.ndim > 1:
        raise SchemaError(
            f"column {name}: found strings of {item.ndim} dims; expected one string per row: "
            f"memfeed.cache({{**columns, 'text': file[{item.name!r}][:, 0].tolist()}}, path)"
        )
    text = item.asstr()
    return TableColumn(name, [len(item)], lambda _: text, lambda run: run.tolist(), is_plain=False, is_lazy=True)


def open_table(data: Any) -> Any:
    """Return ``data`` with every table in it replaced by its columns; ``data`` itself if there is none.

    Tables are looked for in tuples and dicts of any depth. A table becomes a dict of columns by name, a series one
    column: an array or a `TableColumn`. Raises SchemaError for a table, or a column of one, that no store can hold.
    """
    opened = _open(data)
    if opened is not None:
        return opened
    if type(data) is dict:
        return {key: _open_column(str(key), part) for key, part in data.items()}
    if not isinstance(data, tuple):
        return data
    new: list[Any] = [_samples(part) if is_a(part, "datasets", "Dataset") else open_table(part) for part in data]
    if all(one is other for one, other in zip(new, data, strict=True)):
        return data
    return type(data)(*new) if hasattr(data, "_fields") else tuple(new)


def _open_column(name: str, part: Any) -> Any:
    """Return one value of a dict as a column, or as several. In a tuple, lists stay: they may be samples."""
    if is_a(part, "datasets", "Dataset"):
        return _samples(part)
    opened = open_table(part)
    return TableColumn(name, [len(opened)], lambda _: opened, list, is_plain=False) if type(opened) is list else opened


def _open(data: Any) -> Any:
    """Return one table as columns; None for anything else."""
    if is_a(data, "pandas", "DataFrame"):
        return pandas_frame(data)
    if is_a(data, "pandas", "Series"):
        return _pandas_column(TablePlace("series", str(data.name or "value")), data)
    if is_a(data, "polars", "DataFrame", "LazyFrame"):
        return polars_frame(data)
    if is_a(data, "polars", "Series"):
        place = TablePlace("polars series", data.name or "value")
        _refuse_objects(place, data.dtype)
        return arrow_array(place, _to_arrow(data))
    if is_a(data, "pyarrow", "RecordBatchReader"):
        return arrow_table("pyarrow", data.read_all())
    if is_a(data, "pyarrow", "Table", "RecordBatch"):
        return arrow_table("pyarrow", data)
    if is_a(data, "pyarrow", "Array", "ChunkedArray"):
        return arrow_array(TablePlace("array", "value"), data)
    if is_a(data, "pyarrow.dataset", "Dataset"):
        return arrow_dataset(data)
    if is_parquet(data):
        return parquet(data)
    if is_a(data, "h5py", "Group", "Dataset"):  # a File is a Group
        return hdf5_columns(data)
    if isinstance(data, np.ndarray) and data.dtype.hasobject and data.dtype.names is None and data.ndim:
        return list(data)
    if isinstance(data, np.ndarray) and data.dtype.names is not None and data.ndim:
        return {name: _structured_field(name, data[name]) for name in data.dtype.names}
    if is_a(data, "scipy.sparse", "spmatrix", "sparray"):
        raise SchemaError(
            f"found a {type(data).__name__} of scipy.sparse, shape {data.shape}; expected a dense array: "
            "memfeed.cache(matrix.toarray(), path)"
        )
    if isinstance(data, torch.Tensor) and data.layout not in (torch.strided, torch.jagged):
        raise SchemaError(
            f"found a sparse tensor ({str(data.layout).removeprefix('torch.')}), shape {list(data.shape)}; expected a "
            "dense one: memfeed.cache(tensor.to_dense(), path)"
        )
    return None


def _structured_field(name: str, field: Any) -> Any:
    if field.dtype.names is not None:
        return {inner: _structured_field(f"{name}.{inner}", field[inner]) for inner in field.dtype.names}
    if field.dtype.kind not in "biufc":
        raise SchemaError(
            f"column {name}: found a field of dtype {field.dtype} in a structured array; expected numbers: "
            f"columns = {{name: array[name] for name in array.dtype.names if name != {name!r}}}"
        )
    if any(stride % field.itemsize for stride in field.strides):  # torch cannot read such a view in place
        return TableColumn(name, [len(field)], lambda _: field, np.ascontiguousarray, is_plain=True)
    return field


def _samples(dataset: Any) -> TableColumn:
    """Return a Hugging Face dataset beside other columns: one column of whole samples."""
    rows = range(len(dataset))
    return TableColumn("", [len(rows)], lambda _: rows, lambda run: dataset.__getitems__(list(run)), is_plain=False)


def pandas_frame(frame: Any) -> dict[Any, Any]:
    """Return the columns of a DataFrame by name. Its index is left out. Raises SchemaError."""
    names = list(frame.columns)
    odd = next((name for name in names if type(name) not in (str, int)), None)
    if odd is not None:
        raise SchemaError(
            f"found the column name {odd!r:.60} of type {type(odd).__name__}; expected names that are str: "
            "df.columns = [str(name) for name in df.columns]"
        )
    if len(set(names)) < len(names):
        raise SchemaError(
            "found several columns of one name; expected one of each name: df = df.loc[:, ~df.columns.duplicated()]"
        )
    return {name: _pandas_column(TablePlace("pandas", name, i), frame.iloc[:, i]) for i, name in enumerate(names)}


def _pandas_column(place: TablePlace, series: Any) -> Any:
    """Return a Series as a column: an array if it has plain numbers. Raises SchemaError."""
    import pandas as pd

    dtype = series.dtype
    if isinstance(dtype, np.dtype) and dtype.kind in "biufc":
        return series.to_numpy()
    if isinstance(dtype, pd.CategoricalDtype):
        return _pandas_column(place, series.astype(dtype.categories.dtype))
    if isinstance(dtype, pd.DatetimeTZDtype) or (isinstance(dtype, np.dtype) and dtype.kind in "mM"):
        _require_values(place, series)
        try:
            return series.array.as_unit("ns").asi8
        except pd.errors.OutOfBoundsDatetime:
            raise place.refuse(f"a time that int64 nanoseconds since 1970 cannot hold, in {dtype}", "as_int") from None
    if isinstance(dtype, pd.ArrowDtype):
        return arrow_array(place, series.array.__arrow_array__())
    if getattr(dtype, "numpy_dtype", None) is not None and hasattr(series.array, "_mask"):  # Int64, boolean
        if dtype.kind == "f":
            return series.to_numpy(dtype.numpy_dtype, na_value=np.nan)
        _require_values(place, series)
        return series.to_numpy(dtype.numpy_dtype)
    if isinstance(dtype, pd.StringDtype) or (isinstance(dtype, np.dtype) and dtype.kind == "O"):
        return _objects(place, series)
    raise place.refuse(f"the dtype {dtype}")


def _require_values(place: TablePlace, series: Any) -> None:
    missing = int(series.isna().sum())
    if missing:
        raise place.refuse(f"{missing} missing values among values of {series.dtype}", "drop_missing")


def _objects(place: TablePlace, series: Any) -> TableColumn:
    """Return a column of Python objects. Missing values become None."""
    missing, rows = series.isna().to_numpy(), range(len(series))

    def read(run: range) -> list[Any]:
        part = slice(run.start, run.stop)
        return [None if gone else value for value, gone in zip(series.iloc[part], missing[part], strict=True)]

    return TableColumn(
        place.column,
        [len(rows)],
        lambda _: rows,
        read,
        is_plain=False,
        find_telling_rows=lambda: [int(np.flatnonzero(missing == kind)[0]) for kind in set(missing.tolist())],
    )


def polars_frame(frame: Any) -> dict[str, Any]:
    """Return the columns of a DataFrame or LazyFrame by name. A LazyFrame is collected. Raises SchemaError."""
    frame = frame.collect() if hasattr(frame, "collect") else frame
    for position, (name, dtype) in enumerate(frame.schema.items()):
        _refuse_objects(TablePlace("polars", name, position), dtype)
    return arrow_table("polars", _to_arrow(frame))


def _refuse_objects(place: TablePlace, dtype: Any) -> None:
    if "Object" in str(dtype):  # Arrow would get their addresses
        raise place.refuse("Python objects")


def _to_arrow(data: Any) -> Any:
    try:
        return data.to_arrow()
    except ImportError:
        raise SchemaError(
            "found polars without pyarrow, which reads its columns; expected both: pip install pyarrow"
        ) from None
