"""Recognise the tables that users have, by the library that they come from. No library is imported for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memfeed.errors import SchemaError
from memfeed.tables import arrow, frames, table_files
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
        return frames.pandas_frame(data)
    if is_a(data, "pandas", "Series"):
        return frames.pandas_series(data)
    if is_a(data, "polars", "DataFrame", "LazyFrame"):
        return frames.polars_frame(data)
    if is_a(data, "polars", "Series"):
        return frames.polars_series(data)
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
