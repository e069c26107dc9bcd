from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memfeed
from memfeed.schema.fields import Field
from memfeed.store import ragged
from support import Made, rich_sample


def field(kind="jagged", dtype="int32", shape=(None,), **more):
    return Field(path=("r",), name="r", stem="a/r", kind=kind, dtype=dtype, shape=shape, **more)


def test_the_files_of_a_column():
    assert ragged.column_files(field("fixed", shape=(2, 3)), 10) == {"a/r.memmap": 240}
    expected = {"a/r/start.memmap": 80, "a/r/dims.memmap": 160, "a/r/heap.bin": None}
    assert ragged.column_files(field(shape=(None, 4)), 10) == expected
    assert ragged.record_sizes(field("str", "uint8", ()))["a/r/dims.memmap"] == 8
    assert ragged.dims_width(field("list", "int64", (), optional=True)) == 1


def test_paths_and_names_agree(tmp_path):
    for one in (field(), field("fixed", shape=(2,))):
        fixed = one.kind == "fixed"
        paths = [ragged.fixed_file(tmp_path, one)] if fixed else ragged.ragged_files(tmp_path, one)
        assert [tmp_path / name for name in ragged.column_files(one, 0)] == list(paths)


def test_every_store_has_these_files(path):
    store = memfeed.cache(Made(rich_sample, 20), path, progress=False)
    for one in store.schema:
        for name, size in ragged.column_files(one, 20).items():
            assert size in (None, (path / name).stat().st_size)
        if one.kind != "fixed":
            used, size = ragged.used_heap_ranges(path, one, 20), ragged.ragged_files(path, one).heap.stat().st_size
            assert used[-1, 1] == size


@settings(max_examples=100)
@given(st.lists(st.integers(-1, 5), max_size=20), st.integers(0, 100))
def test_rows_one_after_another_do_not_overlap(lengths, first):
    dims = np.array(lengths, np.int64).reshape(len(lengths), 1)
    counts = ragged.element_counts(dims)
    assert counts.tolist() == [max(length, 0) for length in lengths], "None has no elements"
    starts = ragged.consecutive_starts(counts, first)
    taken = [at for start, count in zip(starts, counts, strict=True) for at in range(start, start + count)]
    assert taken == list(range(first, first + int(counts.sum())))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_a_fixed_file_is_a_heap_whose_starts_are_regular(shape):
    fixed = field("fixed", shape=shape)
    starts, dims = ragged.regular_rows(fixed, 5, 4)
    assert starts.tolist() == [row * fixed.row_elements for row in range(5, 9)]
    assert dims.tolist() == [list(shape or (1,))] * 4
    assert ragged.element_counts(dims).tolist() == [fixed.row_elements] * 4


def test_the_used_part_of_a_heap_is_found_in_pieces(path, monkeypatch):
    store = memfeed.cache([torch.arange(i % 3) for i in range(50)], path, progress=False)
    monkeypatch.setattr(ragged, "ROWS_AT_ONCE", 7)
    one = store.schema.fields[0]
    size = ragged.ragged_files(path, one).heap.stat().st_size
    assert ragged.used_heap_ranges(path, one, 50)[-1, 1] == size


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5), st.booleans()), max_size=20), st.integers(1, 8))
def test_the_used_ranges_of_a_heap_are_those_of_its_present_rows(tmp_path_factory, rows, at_once):
    """Rows in any order, which may overlap; the slow reference marks each byte."""
    root = tmp_path_factory.mktemp("heap")
    one = field(dtype="int16")
    start, dims, heap = ragged.ragged_files(root, one)
    start.parent.mkdir(parents=True)
    start.write_bytes(np.array([row[0] for row in rows], np.int64).tobytes())
    dims.write_bytes(np.array([row[1] for row in rows], np.int64).tobytes())
    heap.write_bytes(bytes(100))
    used = {byte for begin, count, kept in rows if kept for byte in range(2 * begin, 2 * (begin + count))}
    with mock.patch.object(ragged, "ROWS_AT_ONCE", at_once):
        found = ragged.used_heap_ranges(root, one, len(rows), np.array([row[2] for row in rows], bool)).tolist()
    assert {byte for first, last in found for byte in range(first, last)} == used
    assert all(first < last for first, last in found)
    assert all(before[1] < after[0] for before, after in pairwise(found))


def test_rows_that_are_read_together_are_those_of_the_files(path):
    store = memfeed.cache(Made(rich_sample, 20), path, progress=False)
    rows = [7, 0, 7, 19]
    for one in store.schema:
        found = list(ragged.read_rows(path, one, rows))
        if one.kind == "fixed":
            data, size = ragged.fixed_file(path, one).read_bytes(), one.row_bytes
            assert [part.buffers[0].tobytes() for part in found] == [
                data[row * size : (row + 1) * size] for row in rows
            ]
            assert all(part.dims is None for part in found)
            continue
        heap = ragged.ragged_files(path, one).heap.read_bytes()
        starts, all_dims = ragged.open_rows(path, one, 20)
        for row, ((data,), dims) in zip(rows, found, strict=True):
            assert np.array_equal(dims, all_dims[row : row + 1])
            first = int(starts[row]) * one.itemsize
            assert data.tobytes() == heap[first : first + int(ragged.element_counts(dims)[0]) * one.itemsize]
