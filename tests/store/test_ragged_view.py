"""Rows of ragged columns one by one."""

import gc
import weakref

import numpy as np
import pytest
import torch

from memfeed.errors import RowError
from memfeed.schema.fields import Field
from memfeed.store.ragged_columns import NestedColumn
from memfeed.store.ragged_gather import RaggedView

FIELD = Field(path=("r",), name="r", stem="r", kind="jagged", dtype="int64", shape=(None,))
FLAT = torch.arange(6)
COLUMN = NestedColumn(FIELD, FLAT, np.array([[1], [2], [3]], np.int64))


def test_rows_are_views():
    view = RaggedView(COLUMN, np.array([2, 0]), None)
    assert [row.tolist() for row in view] == [[3, 4, 5], [0]]
    assert view[-1].data_ptr() == FLAT.data_ptr()
    assert [row.tolist() for row in view[::-1]] == [[0], [3, 4, 5]]
    assert len(view[5:]) == 0
    assert list(RaggedView(COLUMN, np.array([], np.int64), None)) == []


@pytest.mark.parametrize("row", [2, -3, 1 << 40])
def test_rows_out_of_range(row):
    with pytest.raises(RowError, match=f"found row {row}; expected at most 1"):
        RaggedView(COLUMN, np.array([2, 0]), None)[row]


def test_the_owner_lives_as_long_as_a_view():
    class Owner:
        pass

    owner = Owner()
    gone = weakref.ref(owner)
    part = RaggedView(COLUMN, np.array([1]), owner)[:1]
    del owner
    gc.collect()
    assert gone() is not None
    del part
    gc.collect()
    assert gone() is None


def test_a_row_is_a_copy():
    first, second = (COLUMN.read_row(1) for _ in range(2))
    first.zero_()
    assert second.tolist() == [1, 2]
    assert FLAT.tolist() == list(range(6))
