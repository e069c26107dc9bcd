"""The compiled loops give what NumPy gives, and write nothing outside of their arrays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")
from memfeed.system.compiled import Loops


@pytest.fixture(scope="module")
def loops():
    return Loops("memfeed.store.copy_loops").wait()


def ints(*values):
    return np.array(values, np.int64)


@settings(max_examples=60)
@given(data=st.data())
def test_ranges_are_copied(loops, data):
    source = np.arange(40, dtype=np.uint8)
    lengths = data.draw(st.lists(st.integers(0, 10), max_size=5))
    starts = [data.draw(st.integers(0, 40 - length)) for length in lengths]
    begins = np.cumsum([0, *lengths])[:-1]
    out = np.full(sum(lengths) + 2, 99, np.uint8)
    assert loops.copy_ranges(source, ints(*starts), ints(*lengths), ints(*begins), out)
    expected = [
        value for start, length in zip(starts, lengths, strict=True) for value in source[start : start + length]
    ]
    assert out.tolist() == [*expected, 99, 99]


@pytest.mark.parametrize(
    ("start", "length", "begin"),
    [(-1, 1, 0), (0, -1, 0), (0, 5, 0), (4, 1, 0), (0, 1, -1), (0, 1, 4), (1 << 62, 1 << 62, 0)],
)
def test_ranges_outside_are_refused(loops, start, length, begin):
    out = np.full(4, 99, np.uint8)
    assert not loops.copy_ranges(np.zeros(4, np.uint8), ints(start), ints(length), ints(begin), out)
    assert out.tolist() == [99] * 4


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(0, 5), max_size=6), dtype=st.sampled_from([np.int32, np.bool_]))
def test_values_are_repeated(loops, lengths, dtype):
    values = (np.arange(len(lengths)) % 2).astype(dtype)
    out = np.zeros(sum(lengths), dtype)
    assert loops.repeat(values, ints(*lengths), out)
    assert out.tolist() == np.repeat(values, lengths).tolist()
    counted = np.zeros(sum(lengths), np.int64)
    assert loops.count_up(ints(*lengths), counted)
    assert counted.tolist() == [i for length in lengths for i in range(length)]


@pytest.mark.parametrize("lengths", [(5,), (3,), (-1, 5), (4, -1, 1), (2, 3)])
def test_lengths_that_do_not_fill_the_output_are_refused(loops, lengths):
    values = np.zeros(len(lengths), np.int32)
    assert not loops.repeat(values, ints(*lengths), np.zeros(4, np.int32))
    assert not loops.count_up(ints(*lengths), np.zeros(4, np.int64))


def cut(loops, begins, blocks, firsts, size, room=9):
    out = [np.zeros(room, np.int64) for _ in range(3)] + [np.zeros(room, np.int32) for _ in range(2)]
    count = loops.cut(ints(*begins), ints(*blocks), ints(*firsts), size, *out)
    return count if count < 0 else [tuple(int(array[i]) for array in out) for i in range(count)]


def test_pieces(loops):
    # documents of 3, 0 and 4 tokens; blocks of 4
    assert cut(loops, (0, 3, 3, 7), (0,), (0,), 4) == [(0, 0, 3, 0, 0), (2, 0, 1, 1, 3)]
    assert cut(loops, (0, 3, 3, 7), (), (), 4) == []


@pytest.mark.parametrize(
    ("begins", "blocks", "firsts", "room"),
    [
        ((0, 3), (0,), (0,), 9),
        ((0, 3, 7), (0,), (0,), 1),
        ((0, 8), (0,), (-1,), 9),
        ((0, 8), (0,), (1,), 9),
        ((0, 8), (2,), (0,), 9),
    ],
)
def test_blocks_that_documents_do_not_fill_are_refused(loops, begins, blocks, firsts, room):
    assert cut(loops, begins, blocks, firsts, 4, room) == -1
