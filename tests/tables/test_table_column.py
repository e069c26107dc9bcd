"""A column of a table indexed as a list would be, whatever its chunks; and classes known without an import."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memfeed.errors import RowError
from memfeed.tables.table_column import TableColumn


def column_of(lengths, *, is_plain=True, is_lazy=False, loads=None):
    """Return a column of 0, 1, 2, ... in chunks of these lengths."""
    starts = np.cumsum([0, *lengths])

    def load(index):
        if loads is not None:
            loads.append(index)
        return np.arange(starts[index], starts[index + 1])

    convert = np.asarray if is_plain else lambda part: part.tolist()
    return TableColumn("c", lengths, load, convert, is_plain=is_plain, is_lazy=is_lazy)


index = st.integers(-12, 12)


@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    start=st.none() | index,
    stop=st.none() | index,
    step=st.sampled_from([None, 1, 2, 3, -1, -2]),
    is_plain=st.booleans(),
    is_lazy=st.booleans(),
)
@example(lengths=[1, 2], start=1, stop=0, step=None, is_plain=False, is_lazy=False)
def test_a_slice_is_that_of_a_list(lengths, start, stop, step, is_plain, is_lazy):
    column = column_of(lengths, is_plain=is_plain, is_lazy=is_lazy)
    assert list(column[start:stop:step]) == list(range(sum(lengths)))[start:stop:step]


@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4), row=index, is_plain=st.booleans())
def test_a_row_is_that_of_a_list(lengths, row, is_plain):
    column, rows = column_of(lengths, is_plain=is_plain), list(range(sum(lengths)))
    try:
        expected = rows[row]
    except IndexError:
        with pytest.raises(RowError, match=f"column c: found row {row}; expected"):
            column[row]
    else:
        assert column[row] == expected
        assert list(column[[row, row]]) == [expected] * 2
    assert list(column) == rows


def test_no_rows():
    assert column_of([3])[[]].shape == (0,)
    assert column_of([3], is_plain=False)[[]] == []
    assert len(column_of([0])[:]) == 0


def test_one_chunk_of_a_file_is_kept():
    loads = []
    column = column_of([2, 2], is_lazy=True, loads=loads)
    assert [column[i] for i in (0, 1, 2, 3, 2, 0)] == [0, 1, 2, 3, 2, 0]
    assert loads == [0, 1, 0]
    assert column.addresses() == []


def test_addresses_are_those_of_memory():
    data = np.arange(4)
    assert TableColumn("c", [4], lambda _: data, np.asarray, is_plain=True).addresses() == [data.ctypes.data]
    pa = pytest.importorskip("pyarrow")
    array = pa.array([1, 2, None])
    found = TableColumn("c", [3], lambda _: array, list, is_plain=False).addresses()
    assert found == [buffer.address for buffer in array.buffers()]
