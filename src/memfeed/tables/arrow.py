"""Arrow tables as columns: which types of columns there are, and what a store holds of each.

A column is plain if its rows are numbers, or arrays of numbers of one shape. The rows of other columns are lists.
Times become int64 nanoseconds (since 1970-01-01 UTC).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from memfeed.errors import SchemaError
from memfeed.tables.table_column import TableColumn

TypeKind = Literal["plain", "rows", "json"]


def arrow_table(library: str, table: Any) -> dict[str, Any]:
    """Return the columns of a Table or RecordBatch by name, over its memory. Raises SchemaError."""
    return table_columns(library, table.schema, lambda index: _chunks_of(table.column(index)), is_lazy=False)


def arrow_array(place: TablePlace, array: Any) -> Any:
    """Return an Array or ChunkedArray as a column. Raises SchemaError."""
    return column_of(place, array.type, *_chunks_of(array), is_lazy=False)


def _chunks_of(array: Any) -> tuple[list[int], Callable[[int], Any]]:
    """Return the rows of each chunk, and a function that returns a chunk."""
    chunks = getattr(array, "chunks", [array])
    return list(map(len, chunks)), chunks.__getitem__


def table_columns(
    library: str, schema: Any, chunks_of: Callable[[int], tuple[list[int], Callable[[int], Any]]], *, is_lazy: bool
) -> dict[str, Any]:
    """Return the columns of a table by name; ``chunks_of(index)`` as `column_of` takes them. Raises SchemaError."""
    columns: dict[str, Any] = {}
    for index, field in enumerate(schema):
        place = TablePlace(library, field.name, index)
        if field.name in columns:
            raise place.refuse("two columns of this name")
        columns[field.name] = column_of(place, field.type, *chunks_of(index), is_lazy=is_lazy)
    return columns


def column_of(
    place: TablePlace, arrow_type: Any, lengths: Sequence[int], load: Callable[[int], Any], *, is_lazy: bool
) -> TableColumn | dict[str, Any]:
    """Return one column; of a struct, a dict of the columns of its fields. Raises SchemaError.

    ``lengths`` are the rows of each chunk, one chunk at least; ``load(i)`` returns chunk ``i``, an Arrow array.
    ``is_lazy`` says that it is read from a file.
    """
    if _is(arrow_type, "struct"):
        if not arrow_type.num_fields:
            raise place.refuse("a struct without fields")

        def load_child(index: int, chunk: int) -> Any:
            parent = load(chunk)
            if parent.null_count:
                raise place.refuse(f"{parent.null_count} missing structs (None)", "drop_missing")
            return parent.field(index)

        return {
            arrow_type.field(i).name: column_of(
                place._replace(inner=(*place.inner, arrow_type.field(i).name)),
                arrow_type.field(i).type,
                lengths,
                functools.partial(load_child, i),
                is_lazy=is_lazy,
            )
            for i in range(arrow_type.num_fields)
        }
    kind = _kind_of(place, arrow_type)
    if kind == "plain" and not is_lazy:
        for chunk in range(len(lengths)):  # before anything is written
            _check_missing(place, load(chunk))
    return TableColumn(
        place.column,
        lengths,
        load,
        lambda part: _plain(place, part) if kind == "plain" else _rows(place, part, kind),
        is_plain=kind == "plain",
        is_lazy=is_lazy,
        kind="json" if kind == "json" else None,
        find_telling_rows=tuple if kind == "plain" else lambda: _telling_rows(lengths, load),
    )


def _kind_of(place: TablePlace, arrow_type: Any) -> TypeKind:
    """Return how the rows of an Arrow type are kept. Raise SchemaError for a type that no store can hold."""
    if _is_number(arrow_type) or _is_tensor(arrow_type):
        return "plain"
    if _is(arrow_type, "dictionary"):
        return _kind_of(place, arrow_type.value_type)
    if _is(arrow_type, "fixed_size_list") and _kind_of(place, arrow_type.value_type) == "plain":
        return "plain"
    if _is_list(arrow_type) and _is_numeric(arrow_type.value_type):
        return "rows"
    is_binary = _is(arrow_type, "binary", "large_binary", "fixed_size_binary") or str(arrow_type) == "binary_view"
    if is_binary or _is_text(arrow_type) or _is(arrow_type, "null"):
        return "rows"
    if _is(arrow_type, "list", "large_list", "fixed_size_list"):
        if _is_json(arrow_type.value_type):
            return "json"
        raise place.refuse(f"lists of {arrow_type.value_type}")
    if _is(arrow_type, "decimal"):
        raise place.refuse(f"decimal numbers ({arrow_type})", "as_float")
    raise place.refuse(f"the type {arrow_type}")


def _is(arrow_type: Any, *names: str) -> bool:
    """Return True for a type of one of these names, those of the functions of `pyarrow.types`."""
    from pyarrow import types

    return any(getattr(types, f"is_{name}")(arrow_type) for name in names)


def _is_number(arrow_type: Any) -> bool:
    return _is(arrow_type, "integer", "floating", "boolean") or _is_time(arrow_type)


def _is_time(arrow_type: Any) -> bool:
    return _is(arrow_type, "temporal") and not _is(arrow_type, "interval")


def _is_tensor(arrow_type: Any) -> bool:
    return str(arrow_type).startswith("extension<arrow.fixed_shape_tensor")


def _is_list(arrow_type: Any) -> bool:
    return _is(arrow_type, "list", "large_list")


def _is_numeric(arrow_type: Any) -> bool:
    """Return True for numbers, and for lists of them of any depth."""
    nests = _is(arrow_type, "list", "large_list", "fixed_size_list")
    return _is_numeric(arrow_type.value_type) if nests else _is_number(arrow_type)


def _is_text(arrow_type: Any) -> bool:
    return _is(arrow_type, "string", "large_string") or str(arrow_type) == "string_view"


def _is_json(arrow_type: Any) -> bool:
    if _is(arrow_type, "list", "large_list", "fixed_size_list", "dictionary"):
        return _is_json(arrow_type.value_type)
    if _is(arrow_type, "struct"):
        return all(_is_json(arrow_type.field(i).type) for i in range(arrow_type.num_fields))
    return _is_text(arrow_type) or (_is_number(arrow_type) and not _is_time(arrow_type))


def _check_missing(place: TablePlace, part: Any) -> None:
    if part.null_count and not _is(part.type, "floating"):  # a missing float is NaN, as in pandas
        raise place.refuse(f"{part.null_count} missing values (None) among values of {part.type}", "drop_missing")


def _plain(place: TablePlace, part: Any) -> Any:
    """Return numbers as an array [n], fixed-size lists of numbers as [n, size, ...]; without a copy if possible."""
    if _is(part.type, "dictionary"):
        part = part.dictionary_decode()
    _check_missing(place, part)
    if _is_tensor(part.type):
        return part.to_numpy_ndarray()
    if _is(part.type, "fixed_size_list"):
        inner = _plain(place, part.flatten())
        return inner.reshape(len(part), part.type.list_size, *inner.shape[1:])
    if _is_time(part.type):
        part = _nanoseconds(place, part)
    return part.to_numpy(zero_copy_only=False)


def _nanoseconds(place: TablePlace, part: Any) -> Any:
    import pyarrow as pa

    try:
        if pa.types.is_time(part.type):
            return part.cast(pa.time64("ns")).view(pa.int64())
        if pa.types.is_duration(part.type):
            return part.cast(pa.duration("ns")).view(pa.int64())
        return part.cast(pa.timestamp("ns")).view(pa.int64())
    except pa.ArrowInvalid:
        raise place.refuse(f"a time that int64 nanoseconds since 1970 cannot hold, in {part.type}", "as_int") from None


def _rows(place: TablePlace, part: Any, kind: TypeKind) -> list[Any]:
    """Return one value per row: str, bytes, an array of numbers, JSON values or None."""
    if not len(part):
        return []
    if _is(part.type, "dictionary"):
        part = part.dictionary_decode()
    if kind == "json" or not _is_list(part.type):
        values: list[Any] = part.to_pylist()
        return values
    ends = np.cumsum(part.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))
    inner = part.flatten()
    if _kind_of(place, inner.type) == "plain":
        arrays = np.split(_plain(place, inner), ends[:-1])
    else:
        rows = _rows(place, inner, "rows")
        empty = _empty(part.type)
        arrays = [_stacked(place, rows[start:end], empty) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    if not part.null_count:
        return arrays[: len(part)]
    return [array if valid else None for array, valid in zip(arrays, part.is_valid().to_pylist(), strict=True)]


def _empty(arrow_type: Any) -> Any:
    """Return an array without elements, of the dtype and the number of dims that lists of numbers have."""
    dims = 0
    while not _is_number(arrow_type):
        arrow_type, dims = arrow_type.value_type, dims + 1
    return np.zeros((0,) * dims, np.int64 if _is_time(arrow_type) else arrow_type.to_pandas_dtype())


def _stacked(place: TablePlace, rows: Sequence[Any], empty: Any) -> Any:
    """Return the lists within one row as one array."""
    if any(row is None for row in rows) or len({row.shape for row in rows}) > 1:
        raise place.refuse("a row with lists of different lengths, which is no array")
    return np.stack(rows) if rows else empty


def _telling_rows(lengths: Sequence[int], load: Callable[[int], Any]) -> list[int]:
    """Return the first row with a value and the first without, if there are such rows."""
    first: dict[bool, int] = {}
    start = 0
    for chunk, length in enumerate(lengths):
        part = load(chunk)
        for wanted, exists in ((True, part.null_count < length), (False, part.null_count > 0)):
            if exists and wanted not in first:
                first[wanted] = start + part.is_valid().to_numpy(zero_copy_only=False).tolist().index(wanted)
        if len(first) == 2:
            break
        start += length
    return list(first.values())


_LINES = {
    "pandas": {
        "drop": "df = df.drop(columns={0!r})",
        "drop_missing": "df = df.dropna(subset=[{0!r}])",
        "as_float": 'df = df.astype({{{0!r}: "float64"}})',
        "as_int": 'df = df.astype({{{0!r}: "int64"}})',
    },
    "polars": {
        "drop": "df = df.drop({0!r})",
        "drop_missing": "df = df.drop_nulls({0!r})",
        "as_float": "df = df.cast({{{0!r}: pl.Float64}})",
        "as_int": "df = df.cast({{{0!r}: pl.Int64}})",
    },
    "pyarrow": {
        "drop": "table = table.drop_columns([{0!r}])",
        "drop_missing": "table = table.filter(pyarrow.compute.field({0!r}).is_valid())",
        "as_float": "table = table.set_column({1}, {0!r}, table[{0!r}].cast('float64'))",
        "as_int": "table = table.set_column({1}, {0!r}, table[{0!r}].cast('int64'))",
    },
    "parquet": {
        "drop": "df = pandas.read_parquet(path).drop(columns={0!r})",
        "drop_missing": "df = pandas.read_parquet(path).dropna(subset=[{0!r}])",
        "as_float": 'df = pandas.read_parquet(path).astype({{{0!r}: "float64"}})',
        "as_int": 'df = pandas.read_parquet(path).astype({{{0!r}: "int64"}})',
    },
    "series": {
        "drop": "series.to_list()",
        "drop_missing": "series = series.dropna()",
        "as_float": 'series = series.astype("float64")',
        "as_int": 'series = series.astype("int64")',
    },
    "polars series": {
        "drop": "series.to_list()",
        "drop_missing": "series = series.drop_nulls()",
        "as_float": "series = series.cast(pl.Float64)",
        "as_int": "series = series.cast(pl.Int64)",
    },
    "array": {
        "drop": "array.to_pylist()",
        "drop_missing": "array = array.drop_null()",
        "as_float": "array = array.cast('float64')",
        "as_int": "array = array.cast('int64')",
    },
}


class TablePlace(NamedTuple):
    """A column of a table, for messages.

    Args:
        library: how lines of code are written for it.
        column: its name.
        position: its position in the table.
        inner: the names that lead to a field of a struct.
    """

    library: str
    column: str
    position: int = 0
    inner: tuple[str, ...] = ()

    def refuse(self, found: str, action: str = "drop") -> SchemaError:
        """Return the error for this column; ``action`` is "drop", "drop_missing", "as_float" or "as_int"."""
        name = ".".join([self.column, *self.inner])
        line = _LINES[self.library]["drop" if self.inner else action].format(self.column, self.position)
        return SchemaError(f"column {name}: found {found}; expected values that a store can hold: {line}")
