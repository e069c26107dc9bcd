"""Columns of several stores, or in other layouts, give the rows of plain ones."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memfeed
from memfeed.errors import CorruptStoreError
from memfeed.schema.fields import DTYPES, Field
from memfeed.store.columns import ConcatFixedColumn, FixedColumn, InMemoryColumn, RowSubsetColumn
from memfeed.store.ragged_columns import ConcatRaggedColumn, SeparateRowsColumn
from memfeed.system.mapped_memory import map_checked, map_file
from support import Made, equal

FIXED = Field(path=("x",), name="x", stem="x", kind="fixed", dtype="int32", shape=(3,))
ROWS = torch.arange(36, dtype=torch.int32).view(12, 3)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 11)), st.sets(st.integers(1, 11)))
def test_a_concatenation_gives_the_rows_of_the_whole(rows, cuts):
    edges = [0, *sorted(cuts), 12]
    parts = [InMemoryColumn(FIXED, ROWS[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    column = ConcatFixedColumn(FIXED, parts)
    assert column.row_count == 12
    out = torch.empty(len(rows), 3, dtype=torch.int32)
    assert torch.equal(column.gather_into(np.array(rows, np.int64), out), ROWS[rows])
    assert all(torch.equal(column.read_row(row), ROWS[row]) for row in rows)


@pytest.mark.parametrize("name", DTYPES)
def test_a_concatenation_of_each_dtype(name):
    data = (torch.arange(12) % 2).to(
        DTYPES[name]
    )  # torch has no copy by an index for uint16, uint32, uint64 and float8
    field = Field(path=("x",), name="x", stem="x", kind="fixed", dtype=name)
    column = ConcatFixedColumn(field, [InMemoryColumn(field, data[:5]), InMemoryColumn(field, data[5:])])
    found = column.gather_into(np.array([11, 2, 4, 5]), torch.empty(4, dtype=data.dtype))
    assert found.to(torch.complex128).real.tolist() == [1, 0, 0, 1]


def test_a_subset_is_asked_for_rows_by_their_own_numbers():
    kept = np.array([2, 5, 11])
    column = RowSubsetColumn(FIXED, ROWS[kept], kept)
    out = torch.empty(3, 3, dtype=torch.int32)
    assert torch.equal(column.gather_into(np.array([11, 2, 11]), out), ROWS[[11, 2, 11]])


def _copied(column, rows):
    starts, lengths, _ = column.locate(np.array(rows, np.int64))
    out = np.empty(int(lengths.sum()), np.uint8)
    column.copy(starts, lengths, out)
    views = [column.view(start, length) for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
    assert b"".join(view.numpy().tobytes() for view in views) == out.tobytes()
    return out.view(np.int64).tolist()


def test_ragged_columns_of_several_stores(tmp_path):
    values = [torch.arange(i % 4) + i for i in range(10)]
    parts = [
        memfeed.cache(Made(values[a:b]), tmp_path / f"{a}.mf", progress=False)._view.columns[0]
        for a, b in [(0, 3), (3, 10)]
    ]
    column = ConcatRaggedColumn(parts[0].field, parts)
    for rows in ([], [0], [9, 0, 3, 2, 2, 8], list(range(10))):
        assert _copied(column, rows) == [int(value) for row in rows for value in values[row]]
    assert all(equal(column.read_row(row), values[row]) for row in range(10))


def test_rows_that_are_separate(tmp_path):
    values = [torch.arange(i) + i for i in (3, 0, 2)]
    paths = [tmp_path / str(row) for row in range(3)]
    for path, value in zip(paths, values, strict=True):
        if len(value):
            value.numpy().tofile(path)
    field = Field(path=("r",), name="r", stem="r", kind="jagged", dtype="int64", shape=(None,))
    shapes = [tuple(value.shape) for value in values]
    for rows in (values, paths):
        column = SeparateRowsColumn(field, rows, shapes)
        assert _copied(column, [2, 0, 1, 2]) == [2, 3, 3, 4, 5, 2, 3]
        assert [column.read_row(row).tolist() for row in range(3)] == [value.tolist() for value in values]
    paths[0].write_bytes(b"")
    with pytest.raises(CorruptStoreError, match="found 0 bytes; expected 24: the file was cut"):
        _copied(SeparateRowsColumn(field, paths, shapes), [0])


def test_a_column_without_rows_is_one_tensor(tmp_path):
    ROWS.numpy().tofile(tmp_path / "x.memmap")
    assert FixedColumn(FIXED, tmp_path / "x.memmap", None).data.shape == (3,)
    assert torch.equal(FixedColumn(FIXED, tmp_path / "x.memmap", 12).data, ROWS)


@pytest.fixture
def store(path):
    return memfeed.cache(Made([{"r": torch.arange(i)} for i in range(5)]), path, progress=False)


@pytest.mark.parametrize("value", [-1, 2**62, 2**61, 2**40, 7])
def test_starts_outside_the_heap_are_refused_when_read(store, value):
    file = store.path / "r" / "start.memmap"
    file.chmod(0o644)
    with open(file, "r+b") as handle:
        handle.seek(4 * 8)  # row 4 has elements
        handle.write(int(value).to_bytes(8, "little", signed=True))
    opened = memfeed.open(store.path)
    with pytest.raises(CorruptStoreError, match="found row 4 of field r"):
        opened[4]
    with pytest.raises(CorruptStoreError, match="found row 4 of field r"):
        opened[:]


@pytest.mark.parametrize("value", [-2, 2**62, 10**6])
def test_dims_outside_the_heap_are_refused_when_read(store, value):
    file = store.path / "r" / "dims.memmap"
    file.chmod(0o644)
    with open(file, "r+b") as handle:
        handle.seek(2 * 8)
        handle.write(int(value).to_bytes(8, "little", signed=True))
    with pytest.raises(CorruptStoreError, match="found row 2 of field r"):
        memfeed.open(store.path)[[0, 2]]


def test_a_store_larger_than_memory_and_swap_can_be_mapped(path):
    with memfeed.Writer(path, like=torch.zeros(1 << 20, dtype=torch.uint8), length=2) as writer:
        writer[0:2] = torch.ones(2, 1 << 20, dtype=torch.uint8)
    big = path / "value.memmap"
    big.chmod(0o644)
    size = 4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    os.truncate(big, size)  # sparse
    mapped = map_file(big, size)
    assert (int(mapped[0]), int(mapped[-1])) == (1, 0)


def test_edits_stay_in_the_process(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    mapped = map_file(tmp_path / "f", 3)
    mapped[1] = 0
    assert mapped.tolist() == [97, 0, 99]
    assert (tmp_path / "f").read_bytes() == b"abc"
    assert map_file(tmp_path / "f", 0).shape == (0,)


def test_a_file_that_was_cut_is_refused_after_the_check(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    checks = []
    with pytest.raises(CorruptStoreError, match="found 3 bytes; expected 4: the file was cut"):
        map_checked(tmp_path / "f", 4, lambda: checks.append(1))
    assert checks == [1]
