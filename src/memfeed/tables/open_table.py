"""Recognise the tables that users have, by the library that they come from. No library is imported for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memfeed.errors import SchemaError
from memfeed.tables import arrow, table_files
from memfeed.tables.arrow import TablePlace, arrow_array, arrow_table, column_of
from memfeed.tables.table_column import TableColumn, is_a


def open_table(data: Any) -> Any:
    """Return ``data`` with every table in it replaced by its columns; ``data`` itself if there is none.

    Tables are looked for in tuples and dicts of any depth. A table becomes a dict of columns by name, a series one
    column: an array or a `TableColumn`. Raises SchemaError for a table, or a column of one, that no store can hold.
    """
    opened = _open(data)
    return _open_parts(data) if opened is None else opened


def _open_parts(data: Any) -> Any:
    if type(data) is dict:
        return {key: _open_column(str(key), part) for key, part in data.items()}
    if not isinstance(data, tuple):
        return data
    new: list[Any] = [_Samples(part) if is_a(part, "datasets", "Dataset") else open_table(part) for part in data]
    if all(one is other for one, other in zip(new, data, strict=True)):
        return data
    return type(data)(*new) if hasattr(data, "_fields") else tuple(new)


def _open_column(name: str, part: Any) -> Any:
    """Return one value of a dict as a column, or as several. In a tuple, lists stay: they may be samples."""
    if is_a(part, "datasets", "Dataset"):
        return _Samples(part)
    opened = open_table(part)
    return TableColumn(name, [len(opened)], lambda _: opened, list, is_plain=False) if type(opened) is list else opened


def _open(data: Any) -> Any:
    """Return one table as columns; None for anything else."""
    if is_a(data, "pandas", "DataFrame"):
        return pandas_frame(data)
    if is_a(data, "pandas", "Series"):
        return pandas_series(data)
    if is_a(data, "polars", "DataFrame", "LazyFrame"):
        return polars_frame(data)
    if is_a(data, "polars", "Series"):
        return polars_series(data)
    if is_a(data, "pyarrow", "RecordBatchReader"):
        return arrow.arrow_table("pyarrow", data.read_all())
    if is_a(data, "pyarrow", "Table", "RecordBatch"):
        return arrow.arrow_table("pyarrow", data)
    if is_a(data, "pyarrow", "Array", "ChunkedArray"):
        return arrow.arrow_array("array", data)
    if is_a(data, "pyarrow.dataset", "Dataset"):
        return table_files.arrow_dataset(data)
    if table_files.is_parquet(data):
        return table_files.parquet(data)
    if is_a(data, "h5py", "Group", "Dataset"):  # a File is a Group
        return table_files.hdf5_columns(data)
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


class _Samples(TableColumn):
    """A Hugging Face dataset beside other columns: one column of whole samples."""

    def __init__(self, dataset: Any) -> None:
        super().__init__("", [len(dataset)], lambda _: dataset, list, is_plain=False)
        self._dataset = dataset

    def read(self, start: int, stop: int) -> Any:
        """Return samples ``start`` to ``stop``."""
        return self._dataset.__getitems__(list(range(start, stop)))


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


def pandas_series(series: Any) -> Any:
    """Return a Series as a column: an array if it has plain numbers. Raises SchemaError."""
    return _pandas_column(TablePlace("series", str(series.name or "value")), series)


def _pandas_column(place: TablePlace, series: Any) -> Any:
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
        array = series.array.__arrow_array__()
        chunks = getattr(array, "chunks", [array])
        return column_of(place, array.type, list(map(len, chunks)), chunks.__getitem__, is_lazy=False)
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
    missing = series.isna().to_numpy()

    def read(rows: slice) -> list[Any]:
        return [None if gone else value for value, gone in zip(series.iloc[rows], missing[rows], strict=True)]

    return TableColumn(
        place.column,
        [len(series)],
        lambda _: range(len(series)),
        lambda part: read(slice(part.start, part.stop)),
        is_plain=False,
        find_telling_rows=lambda: [int(np.flatnonzero(missing == kind)[0]) for kind in set(missing.tolist())],
    )


def polars_frame(frame: Any) -> dict[str, Any]:
    """Return the columns of a DataFrame or LazyFrame by name. A LazyFrame is collected. Raises SchemaError."""
    frame = frame.collect() if hasattr(frame, "collect") else frame
    for position, (name, dtype) in enumerate(frame.schema.items()):
        _refuse_objects(TablePlace("polars", name, position), dtype)
    return arrow_table("polars", _to_arrow(frame))


def polars_series(series: Any) -> Any:
    """Return a Series as a column. Raises SchemaError."""
    _refuse_objects(TablePlace("polars series", series.name or "value"), series.dtype)
    return arrow_array("polars series", _to_arrow(series))


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
