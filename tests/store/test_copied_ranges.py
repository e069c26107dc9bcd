import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memfeed
from memfeed.store import copied_ranges
from memfeed.store.copied_ranges import copy_ranges
from memfeed.system.share import Threads

HEAP = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8))


def expected(heap, starts, lengths):
    return np.concatenate([heap.numpy()[a : a + k] for a, k in zip(starts, lengths, strict=True)])


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 60), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 25)), min_size=1), st.integers(1, 16))
def test_blocks_equal_the_ranges_copied_one_by_one(n, ranges, block):
    heap = HEAP[:n]
    starts = np.array([min(start, n) for start, _ in ranges], np.int64)
    lengths = np.minimum([length for _, length in ranges], n - starts)
    out = np.zeros(int(lengths.sum()), np.uint8)
    if block <= min(n, out.size):
        copied_ranges._copy_blocks(heap, starts, lengths, out, block)
        assert np.array_equal(out, expected(heap, starts, lengths))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("mean", [1, 60, 200, 1_100, 9_000, 300_000])
@pytest.mark.parametrize("total", [0, 5_000, 1_300_000])
def test_ranges_of_any_size(mean, total, threads):
    generator = np.random.default_rng(mean + total)
    lengths = generator.integers(0, 2 * mean + 1, min(total // mean, 30_000))
    starts = generator.integers(0, len(HEAP) - lengths + 1)
    out = np.zeros(int(lengths.sum()) + 8, np.uint8)
    with Threads(threads).in_use():
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
    copy_ranges(HEAP, starts, lengths, out)
    assert np.array_equal(out, expected(HEAP, starts, lengths))
    assert counts
    assert counts[0] <= 2 + 2 * np.count_nonzero(lengths == 0)


@settings(max_examples=100, deadline=None)
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
