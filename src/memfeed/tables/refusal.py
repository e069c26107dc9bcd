"""Errors about a column of a table, each with the line of code that makes a column that a store can hold."""

from __future__ import annotations

from typing import NamedTuple

from memfeed.errors import SchemaError

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
