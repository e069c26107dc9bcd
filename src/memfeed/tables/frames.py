"""Data frames and series of pandas and polars as columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from memfeed.errors import SchemaError
from memfeed.tables.arrow import arrow_array, arrow_table, column_of
from memfeed.tables.refusal import TablePlace
from memfeed.tables.table_column import TableColumn


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
