"""Columns of Arrow by their types: what a store holds of each, over sliced and chunked memory, and what it refuses."""

import datetime

import numpy as np
import pytest

from memfeed.errors import SchemaError
from memfeed.tables.arrow import _LINES, TablePlace, arrow_array, arrow_table, column_of, table_columns

pa = pytest.importorskip("pyarrow")

DAY = 86_400_000_000_000


def plain(values):
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]


COLUMNS = [
    (pa.int8(), [1, -2, 3], None),
    (pa.uint64(), [1, 2**64 - 1, 3], None),
    (pa.float16(), [np.float16(1), np.float16(2), np.float16(3)], [1.0, 2.0, 3.0]),
    (pa.float64(), [1.5, 2.5, -0.5], None),
    (pa.bool_(), [True, False, True], None),
    (pa.date32(), [datetime.date(1970, 1, 2)] * 3, [DAY] * 3),
    (pa.timestamp("s", "Europe/Paris"), [datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)] * 3, [0] * 3),
    (pa.time32("ms"), [datetime.time(0, 0, 1)] * 3, [10**9] * 3),
    (pa.duration("us"), [datetime.timedelta(microseconds=2)] * 3, [2000] * 3),
    (pa.list_(pa.int32(), 2), [[1, 2], [3, 4], [5, 6]], None),
    (pa.list_(pa.list_(pa.int8(), 1), 2), [[[1], [2]], [[3], [4]], [[5], [6]]], None),
    (pa.string(), ["a", None, "é"], None),
    (pa.large_binary(), [b"a", b"", None], None),
    (pa.binary(2), [b"ab", b"cd", None], None),
    (pa.list_(pa.int64()), [[1], [], [2, 3]], None),
    (pa.large_list(pa.float32()), [[1.5], None, []], None),
    (pa.list_(pa.list_(pa.int64())), [[[1, 2], [3, 4]], [], [[5, 6]]], None),
    (pa.list_(pa.string()), [["a"], [], ["b", "c"]], None),
    (pa.list_(pa.struct({"a": pa.int64(), "b": pa.string()})), [[{"a": 1, "b": "x"}], [], [{"a": 2, "b": None}]], None),
    (pa.dictionary(pa.int8(), pa.string()), ["a", "b", "a"], None),
    (pa.dictionary(pa.int8(), pa.int64()), [7, 8, 7], None),
    (pa.null(), [None, None, None], None),
]


@pytest.mark.parametrize(("kind", "values", "expected"), COLUMNS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("form", ["whole", "sliced", "chunks"])
def test_values(kind, values, expected, form):
    whole = pa.array(values, kind)
    array = whole
    if form == "sliced":
        array = pa.concat_arrays([whole, whole])[1:4] if kind != pa.null() else whole
        values, expected = ([*values, *values][1:4], None if expected is None else [*expected, *expected][1:4])
    elif form == "chunks":
        array = pa.chunked_array([whole[:1], whole[1:1], whole[1:]])
    column = arrow_array(TablePlace("array", "value"), array)
    assert len(column) == 3
    found = plain(column[:])
    assert found == (values if expected is None else expected)
    assert plain([column[i] for i in range(3)]) == found


def test_rows_that_are_none():
    column = arrow_array(TablePlace("array", "value"), pa.array([[1], None, []], pa.list_(pa.int64())))
    assert column[1] is None
    assert column[2].shape == (0,)
    assert column.find_telling_rows() == [0, 1]
    assert list(arrow_array(TablePlace("array", "value"), pa.array([1.0, None]))[:])[1] != 1.0  # NaN, as in pandas


def test_structs_are_dicts_of_columns():
    data = pa.array([{"x": 1, "in": {"y": "a"}}, {"x": 2, "in": {"y": "b"}}])
    columns = arrow_table("pyarrow", pa.table({"s": data[1:]}))
    assert columns["s"]["x"][:].tolist() == [2]
    assert columns["s"]["in"]["y"][:] == ["b"]


REFUSED = [
    (pa.array([1, None]), "1 missing values (None) among values of int64", "array = array.drop_null()"),
    (pa.array([True, None]), "1 missing values", "array.drop_null()"),
    (pa.array([[1, 2], None], pa.list_(pa.int8(), 2)), "1 missing values", "drop_null"),
    (pa.array([[1, None]], pa.list_(pa.int8(), 2)), "1 missing values", "drop_null"),
    (pa.array([1], pa.decimal128(5)), "decimal numbers (decimal128(5, 0))", "array.cast('float64')"),
    (pa.array([], pa.month_day_nano_interval()), "the type month_day_nano_interval", "array.to_pylist()"),
    (pa.array([[{"t": datetime.date(2000, 1, 1)}]]), "lists of struct<t: date32[day]>", "to_pylist"),
    (pa.array([[[1, 2], [3]]]), "a row with lists of different lengths", "to_pylist"),
    (pa.array([[[1], None]]), "a row with lists of different lengths", "to_pylist"),
    (pa.array([10**15], pa.timestamp("s")), "a time that int64 nanoseconds since 1970 cannot hold", "cast('int64')"),
    (pa.array([{}], pa.struct([])), "a struct without fields", "to_pylist"),
]


@pytest.mark.parametrize(("array", "found", "line"), REFUSED)
def test_refused(array, found, line):
    with pytest.raises(SchemaError) as caught:
        arrow_array(TablePlace("array", "value"), array)[:]
    assert str(caught.value).startswith(f"column value: found {found}")
    assert line in str(caught.value)


def test_missing_structs():
    with pytest.raises(SchemaError, match=r"column value: found 1 missing structs"):
        arrow_array(TablePlace("array", "value"), pa.array([{"x": 1.0}, None]))


def test_two_columns_of_one_name():
    table = pa.table([[1], [2]], names=["a", "a"])
    with pytest.raises(SchemaError, match="column a: found two columns of this name"):
        arrow_table("pyarrow", table)


def test_files_are_not_read_before_they_are_needed():
    loads = []

    def load(chunk):
        loads.append(chunk)
        return pa.array([1, None])

    column = column_of(TablePlace("parquet", "a"), pa.int64(), [2], load, is_lazy=True)
    assert (loads, column.is_lazy, column.is_plain) == ([], True, True)
    with pytest.raises(SchemaError, match="missing values"):
        column[:]
    with pytest.raises(SchemaError, match="missing values"):
        column_of(TablePlace("parquet", "a"), pa.int64(), [2], load, is_lazy=False)


def test_columns_have_the_names_of_the_schema():
    schema = pa.schema({"a": pa.int64(), "b": pa.string()})
    parts = [pa.array([1]), pa.array(["x"])]
    columns = table_columns("pyarrow", schema, lambda index: ([1], lambda _: parts[index]), is_lazy=True)
    assert {name: plain(column[:]) for name, column in columns.items()} == {"a": [1], "b": ["x"]}


@pytest.mark.parametrize("library", _LINES)
@pytest.mark.parametrize("action", ["drop", "drop_missing", "as_float", "as_int"])
def test_each_library_has_a_line_for_each_action(library, action):
    text = str(TablePlace(library, "it's", 3).refuse("x", action))
    assert text.startswith("column it's: found x; expected values that a store can hold: ")
    line = text.partition("can hold: ")[2]
    compile(line, "line", "exec")
    assert str(TablePlace(library, "a", 3, ("b",)).refuse("x", action)).endswith(_LINES[library]["drop"].format("a", 3))
