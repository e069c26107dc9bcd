"""Rows of ragged columns: where they lie, also where numbers are damaged, and columns of several stores."""

import numpy as np
import pytest
import torch

from memfeed.errors import CorruptStoreError
from memfeed.schema.fields import Field
from memfeed.store.ragged import RaggedFiles
from memfeed.store.ragged_columns import ConcatRaggedColumn, NestedColumn, RaggedColumn, SeparateRowsColumn


def field(kind="jagged", shape=(None,), dtype="int64", **others):
    return Field(path=("r",), name="r", stem="r", kind=kind, dtype=dtype, shape=shape, **others)


def column_of(tmp_path, of, starts, dims, heap):
    """Return a mapped column of these numbers, whatever they are."""
    files = RaggedFiles(*(tmp_path / name for name in ("start", "dims", "heap")))
    np.array(starts, np.int64).tofile(files.start)
    np.array(dims, np.int64).tofile(files.dims)
    files.heap.write_bytes(heap)
    return RaggedColumn(of, files, len(starts), len(heap))


HEAP = np.arange(10, dtype=np.int64).tobytes()
KINDS = [
    (field(), [[2], [0], [3]]),
    (field(optional=True), [[2], [0], [3]]),
    (field(shape=(None, 1)), [[2, 1], [0, 1], [3, 1]]),
    (field("list", (None, None)), [[2, 1], [0, 4], [1, 3]]),
    (field("bytes", (), "uint8"), [[16], [0], [24]]),
]


@pytest.mark.parametrize(("of", "dims"), KINDS, ids=lambda value: value.kind if isinstance(value, Field) else "")
def test_rows(tmp_path, of, dims):
    starts = [1, 5, 4] if of.kind != "bytes" else [8, 40, 32]
    column = column_of(tmp_path, of, starts, dims, HEAP)
    values = [column.read_row(i) for i in range(3)]
    if of.kind == "bytes":
        assert values == [HEAP[8:24], b"", HEAP[32:56]]
    else:
        assert [one.flatten().tolist() for one in values] == [[1, 2], [], [4, 5, 6]]
        assert [list(one.shape) for one in values] == dims
    located = column.locate(np.array([2, 0, 2]))
    assert located.lengths.tolist() == [24, 16, 24]
    assert column.locate(np.array([], np.int64)).nbytes == 0
    assert (column.nbytes, column.mean_row_bytes) == (80, 26)


@pytest.mark.parametrize(("of", "dims"), KINDS, ids=lambda value: value.kind if isinstance(value, Field) else "")
@pytest.mark.parametrize("damage", ["start -1", "start end", "start huge", "dim -2", "dim long", "dim huge"])
def test_damaged_numbers(tmp_path, of, dims, damage):
    starts, dims, what = [0, 0, 0], [list(one) for one in dims], damage.split()[1]
    number = {"-1": -1, "-2": -2, "end": 81, "long": 81, "huge": (1 << 62) + 1}[what]
    if damage.startswith("start"):
        starts[2] = number
    else:
        dims[2][0] = number
    column = column_of(tmp_path, of, starts, dims, HEAP)
    column.locate(np.array([0, 1]))
    with pytest.raises(CorruptStoreError, match="found row 2 of field r at byte"):
        column.locate(np.array([0, 2]))


def test_other_dims_than_the_field(tmp_path):
    column = column_of(tmp_path, field(shape=(None, 2)), [0, 0], [[1, 2], [1, 3]], HEAP)
    with pytest.raises(CorruptStoreError, match="found row 1"):
        column.locate(np.array([1]))
    hidden = column_of(tmp_path, field("list", (None, None)), [0], [[0, 1 << 40]], HEAP)
    with pytest.raises(CorruptStoreError, match="found row 0"):
        hidden.locate(np.array([0]))


def test_none(tmp_path):
    column = column_of(tmp_path, field(optional=True), [0, 0], [[-1], [2]], HEAP)
    assert column.read_row(0) is None
    assert column.locate(np.array([0, 1])).lengths.tolist() == [-1, 16]
    with pytest.raises(CorruptStoreError):
        column_of(tmp_path, field(), [0], [[-1]], HEAP).locate(np.array([0]))


def test_copies_are_memory_of_their_own():
    flat = torch.arange(5)
    column = NestedColumn(field(), flat, np.array([[2], [3]]))
    column.read_row(0).zero_()
    assert flat.tolist() == list(range(5))
    column.view_row(0).zero_()
    assert flat.tolist() == [0, 0, 2, 3, 4]
    assert (
        NestedColumn(field(), torch.empty(0, dtype=torch.int64), np.zeros((2, 1), np.int64)).read_row(1).tolist() == []
    )


def test_rows_of_several_stores():
    first = NestedColumn(field(), torch.arange(3), np.array([[1], [2]]))
    second = SeparateRowsColumn(field(), [torch.arange(3) + 10, torch.arange(0)], [(3,), (0,)])
    joined = first.joined(field(), [first, second])
    assert isinstance(joined, ConcatRaggedColumn)
    assert [joined.read_row(i).tolist() for i in range(4)] == [[0], [1, 2], [10, 11, 12], []]
    rows = np.array([2, 0, 1, 2, 3])
    located = joined.locate(rows)
    out = np.empty(located.nbytes, np.uint8)
    joined.copy(located.starts, located.lengths, out)
    assert out.view(np.int64).tolist() == [10, 11, 12, 0, 1, 2, 10, 11, 12]
    assert joined.nbytes == 24 + 24
    assert len(joined.joined(field(), [joined, first]).parts) == 3
