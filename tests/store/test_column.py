"""What columns answer by default, the rows of one file, and several columns as one."""

import numpy as np
import pytest
import torch

from memfeed.schema.fields import Field
from memfeed.store.columns import Column, ConcatColumn, ConcatFixedColumn, FileColumn, FileRows, InMemoryColumn

FIELD = Field(path=("x",), name="x", stem="x", kind="fixed", dtype="int32", shape=(3,))


class Plain(Column):
    layout = "dense"

    def __init__(self, row_count=4):
        self.field, self.row_count = FIELD, row_count

    def gather_into(self, rows, out):
        out[:] = torch.from_numpy(rows)[:, None]
        return out


class InFile(FileColumn):
    layout = "dense"

    def __init__(self, rows, *, in_memory=False):
        self.field, self.row_count, self.in_memory = FIELD, rows, in_memory

    def places(self, rows):
        return rows * 12, np.full(len(rows), 12)


def test_defaults():
    column = Plain()
    assert (column.nbytes, column.mean_row_bytes, column.kept_in) == (48, 12, "mapped")
    assert column.read_row(3).tolist() == [3, 3, 3]
    assert column.view_row(2).tolist() == [2, 2, 2]
    assert (column.whole, column.base, list(column.files())) == (None, column, [])
    assert not column.read(0, torch.empty(1))
    assert column.over(column) is column
    assert column.base_rows(np.array([1])).tolist() == column.rows_needed(np.array([1])).tolist() == [1]
    assert column.gather_windows(np.array([1]), torch.empty(1, 3)).tolist() == [[1, 1, 1]]
    assert Plain(None).nbytes == 12  # one value without rows
    with pytest.raises(NotImplementedError):
        column.locate(np.array([0]))


def test_bytes_in_another_place():
    column = Plain()
    assert column.placed_bytes(None) == 48
    assert column.placed_bytes(np.array([0, 3])) == 24
    assert column.placed_bytes(np.array([], np.int64)) is None
    assert Plain(0).placed_bytes(None) is None
    column.why_mapped = "it is read from files"
    assert column.placed_bytes(None) is None


def test_the_rows_of_a_file():
    (rows,) = InFile(5).files(100)
    assert (rows.begin, rows.row_count, rows.row_bytes) == (100, 5, 12)
    assert rows.within(np.array([99, 100, 104, 105, 102], np.int32)).tolist() == [0, 4, 2]
    assert list(InFile(0).files()) == []
    assert list(InFile(5, in_memory=True).files()) == []
    windows = FileRows(InFile(5), 10, 5, InFile(5).places, lambda ids: ids[:, None] + [0, 1])
    assert windows.within(np.array([10, 11])).tolist() == [0, 1, 2]


def parts():
    return [InMemoryColumn(FIELD, torch.arange(3 * n, dtype=torch.int32).view(n, 3) + 100 * n) for n in (2, 0, 3)]


def test_several_as_one():
    column = ConcatColumn(FIELD, parts())
    assert column.row_count == 5
    found = column.by_part(np.array([4, 0, 2, 1]))
    assert [(column.parts.index(part), positions.tolist(), rows.tolist()) for part, positions, rows in found] == [
        (0, [1, 3], [0, 1]),
        (2, [0, 2], [2, 0]),
    ]
    assert column.by_part(np.array([], np.int64)) == []
    assert column.kept_in == "memory"
    whole = torch.cat([part.data for part in column.parts])
    rows = np.array([4, 0, 2, 1])
    out = torch.empty(4, 3, dtype=torch.int32)
    assert torch.equal(ConcatFixedColumn(FIELD, parts()).gather_into(rows, out), whole[rows])


def test_the_files_of_several_begin_where_their_rows_do():
    column = ConcatColumn(FIELD, [InFile(2), InFile(0), InFile(3)])
    assert [(rows.begin, rows.row_count) for rows in column.files(10)] == [(10, 2), (12, 3)]
    assert column.kept_in == "mapped"
    assert ConcatColumn(FIELD, [InFile(2), *parts()]).kept_in == "mapped, memory"
