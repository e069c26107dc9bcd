import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memfeed
from memfeed.errors import CorruptStoreError
from memfeed.store import copied_ranges
from memfeed.store.copied_ranges import copy_ranges
from memfeed.system.compiled import Loops
from memfeed.system.share import Threads
from support import copies_by

HEAP = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8))


def expected(heap, starts, lengths):
    return np.concatenate([heap.numpy()[a : a + k] for a, k in zip(starts, lengths, strict=True)])


@settings(max_examples=150)
@given(st.integers(1, 60), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 25)), min_size=1), st.integers(1, 16))
def test_blocks_equal_the_ranges_copied_one_by_one(n, ranges, block):
    heap = HEAP[:n]
    starts = np.array([min(start, n) for start, _ in ranges], np.int64)
    lengths = np.minimum([length for _, length in ranges], n - starts)
    out = np.zeros(int(lengths.sum()), np.uint8)
    if block <= min(n, out.size):
        copied_ranges._copy_blocks(heap, starts, lengths, out, block)
        assert np.array_equal(out, expected(heap, starts, lengths))


@pytest.mark.parametrize("way", ["numpy", "numba"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("mean", [1, 60, 200, 1_100, 9_000, 300_000])
@pytest.mark.parametrize("total", [0, 5_000, 1_300_000])
def test_ranges_of_any_size(mean, total, threads, way):
    generator = np.random.default_rng(mean + total)
    lengths = generator.integers(0, 2 * mean + 1, min(total // mean, 30_000))
    starts = generator.integers(0, len(HEAP) - lengths + 1)
    out = np.zeros(int(lengths.sum()) + 8, np.uint8)
    with copies_by(way), Threads(threads).in_use():
        copy_ranges(HEAP, starts, lengths, out[: out.size - 8])
    assert np.array_equal(out[: out.size - 8], expected(HEAP, [0, *starts], [0, *lengths]))
    assert not out[out.size - 8 :].any(), "nothing is written beyond"


def test_a_heap_smaller_than_a_block():
    starts, lengths = np.zeros(20_000, np.int64), np.full(20_000, 90)
    out = np.empty(int(lengths.sum()), np.uint8)
    copy_ranges(HEAP[:100], starts, lengths, out)
    assert np.array_equal(out.reshape(-1, 90), np.tile(HEAP[:90].numpy(), (20_000, 1)))
    starts, lengths = np.zeros(20_000, np.int64), np.full(20_000, 70)
    copy_ranges(HEAP[:70], starts, lengths, out[: int(lengths.sum())])
    assert np.array_equal(out[: int(lengths.sum())].reshape(-1, 70), np.tile(HEAP[:70].numpy(), (20_000, 1)))


def test_ranges_side_by_side_are_copied_as_one(monkeypatch):
    lengths = np.random.default_rng(0).integers(0, 900, 4_000)
    starts = np.cumsum(lengths) - lengths
    starts[lengths == 0] = 0  # as stores have them
    starts[2_000:] += 5
    counts, concatenate = [], copied_ranges._concatenate
    monkeypatch.setattr(
        copied_ranges,
        "_concatenate",
        lambda heap, starts, *rest: counts.append(len(starts)) or concatenate(heap, starts, *rest),
    )
    out = np.empty(int(lengths.sum()), np.uint8)
    with copies_by("numpy"):
        copy_ranges(HEAP, starts, lengths, out)
    assert np.array_equal(out, expected(HEAP, starts, lengths))
    assert counts
    assert counts[0] <= 2 + 2 * np.count_nonzero(lengths == 0)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 9), min_size=1), st.sets(st.integers(0, 30)))
def test_merged_ranges_have_the_same_bytes(lengths, moved):
    lengths = np.array(lengths)
    starts = np.cumsum(lengths) - lengths
    for index in moved:
        starts[index:] += 3
    merged = copied_ranges._merge(starts, lengths)
    assert np.array_equal(expected(HEAP, *merged), expected(HEAP, starts, lengths))
    assert len(merged[0]) <= len(starts)


def test_many_documents_are_copied_as_blocks(path, monkeypatch):
    for way in ("_join", "_concatenate"):
        monkeypatch.setattr(copied_ranges, way, lambda *_: pytest.fail("found a loop over the documents in Python"))
    documents = [torch.full((100 + row % 500,), row, dtype=torch.int32) for row in range(2400)]
    with memfeed.Writer(path) as writer:
        for document in documents:
            writer.append(document)
    loader = memfeed.Loader(memfeed.open(path), 800, shuffle=True, seed=0)
    seen = [row for batch in loader for row in batch.unbind()]
    assert sorted(int(row[0]) for row in seen) == list(range(2400))
    assert all(torch.equal(row, documents[int(row[0])]) for row in seen)


@pytest.fixture(scope="module")
def loops():
    pytest.importorskip("numba")
    return Loops("memfeed.store.copy_loops").wait()


@settings(max_examples=150)
@given(
    st.integers(0, 30),
    st.integers(0, 30),
    st.lists(st.tuples(st.integers(-3, 33), st.integers(-2, 12), st.integers(-3, 33)), max_size=6),
)
def test_no_range_outside_of_the_arrays_is_compiled_to_a_copy(loops, size, room, ranges):
    """What lies outside is neither read nor written, whatever comes before it."""
    source, out = np.arange(100, 100 + size, dtype=np.uint8), np.zeros(room, np.uint8)
    expected = out.copy()
    fits = True
    for start, length, begin in ranges:
        fits = length >= 0 and 0 <= start <= size - length and 0 <= begin <= room - length
        if not fits:
            break
        expected[begin : begin + length] = source[start : start + length]
    places = (np.array(part, np.int64) for part in zip(*ranges, strict=True)) if ranges else [np.empty(0, np.int64)] * 3
    assert loops.copy_ranges(source, *places, out) == fits
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("far", [1 << 62, (1 << 63) - 1, -(1 << 63)])
def test_numbers_that_would_wrap_round_are_outside(loops, far):
    """A damaged store may hold any number."""
    source, out, five = np.zeros(9, np.uint8), np.zeros(9, np.uint8), np.full(1, 5)
    for at in range(3):
        places = [five, five, five]
        places[at] = np.full(1, far)
        assert not loops.copy_ranges(source, *places, out)
    assert not loops.repeat(np.zeros(1, np.int32), np.full(1, far), np.zeros(4, np.int32))
    assert not loops.count_up(np.array([2, far]), np.zeros(4, np.int64))


def test_a_range_outside_of_the_heap_is_an_error(loops):
    out = np.zeros(20_000 * 90, np.uint8)
    with copies_by("numba"), pytest.raises(CorruptStoreError, match="outside of the heap.*run verify"):
        copy_ranges(HEAP[:100], np.full(20_000, 11), np.full(20_000, 90), out)


def test_without_numba_ranges_are_copied_by_numpy(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(copied_ranges, "LOOPS", Loops("memfeed.store.copy_loops"))
    out = np.empty(6, np.uint8)
    copy_ranges(HEAP, np.array([5, 90]), np.array([2, 4]), out)
    assert np.array_equal(out, expected(HEAP, [5, 90], [2, 4]))
    assert copied_ranges.LOOPS.wait() is None


def test_ranges_are_compiled_once_enough_is_copied(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(copied_ranges, "LOOPS", Loops("memfeed.store.copy_loops", after=10))
    out = np.empty(6, np.uint8)
    copy_ranges(HEAP, np.array([5, 90]), np.array([2, 4]), out)
    copied_ranges.LOOPS.join()
    assert copied_ranges.LOOPS.get() is None, "10 bytes are not copied yet"
    copy_ranges(HEAP, np.array([5, 90]), np.array([2, 4]), out)
    copied_ranges.LOOPS.join()
    compiled = []
    monkeypatch.setattr(copied_ranges, "_copy_compiled", lambda *_: compiled.append(True))
    copy_ranges(HEAP, np.array([5, 90]), np.array([2, 4]), out)
    assert compiled
