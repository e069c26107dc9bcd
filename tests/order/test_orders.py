import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfeed.order import orders
from memfeed.order.orders import WINDOW_BLOCKS, BlockOrder, Sequential, Shuffled, permutation

PINNED = [
    [5, 0, 7, 4, 8, 9, 6, 2, 3, 1],
    [4, 5, 3, 2, 6, 8, 9, 7, 0, 1],
    [3, 8, 6, 4, 5, 7, 0, 1, 2, 9],
]
PINNED_LONG = [19430, 874, 166, 15363, 9211, 10294, 5218, 3591]  # numpy draws long ones in another way
PINNED_BLOCKS = [7, 2, 3, 1, 4, 8, 9, 6, 0, 10, 11, 5]


@settings(max_examples=50)
@given(st.integers(1, 300), st.integers(-5, 2**70), st.integers(0, 100))
def test_every_row_once(n, seed, epoch):
    assert sorted(permutation(n, seed, epoch)) == list(range(n))


def test_literal_permutations_are_pinned():
    assert permutation(10, 0, 0).tolist() == PINNED[0]
    assert permutation(10, 0, 1).tolist() == PINNED[1]
    assert permutation(10, 1, 0).tolist() == PINNED[2]
    assert permutation(20_000, 0, 0)[:8].tolist() == PINNED_LONG
    assert sorted(permutation(20_000, 0, 0)) == list(range(20_000))
    assert BlockOrder(12, 0, 0, 2)(0, 12).tolist() == PINNED_BLOCKS


def test_seed_and_epoch_do_not_alias():
    drawn = {tuple(permutation(50, seed, epoch)) for seed in range(20) for epoch in range(20)}
    assert len(drawn) == 400
    mixed = {tuple(BlockOrder(50, seed, epoch, 4)(0, 50)) for seed in range(20) for epoch in range(20)}
    assert len(mixed) == 400


@pytest.mark.parametrize(
    "draw", [lambda epoch: permutation(8, 3, epoch), lambda epoch: BlockOrder(8, 3, epoch, 2)(0, 8)]
)
def test_uniform_over_positions(draw):
    n, draws = 8, 4000
    counts = np.zeros((n, n))
    for epoch in range(draws):
        counts[np.arange(n), draw(epoch)] += 1
    chi_square = ((counts - draws / n) ** 2 / (draws / n)).sum()
    assert chi_square < 90  # 49 degrees of freedom: 1 in 3,000 exceeds it, and the draw is fixed


def test_a_long_permutation_takes_half_the_memory(monkeypatch):
    wide = Shuffled(1000, 5, 7)
    monkeypatch.setattr(orders, "COMPACT_ABOVE", 1000)
    compact = Shuffled(1000, 5, 7)
    assert (wide(0, 1000).dtype, compact(0, 1000).dtype) == (np.int64, np.int32)
    assert (wide(0, 1000) == compact(0, 1000)).all()


@settings(max_examples=100)
@given(st.integers(1, 3000), st.integers(1, 40), st.integers(0, 5), st.lists(st.integers(0, 3000), max_size=6))
def test_any_part_of_an_order_is_that_part_of_the_whole(n, block_rows, epoch, cuts):
    for made in (Sequential(n), Shuffled(n, 1, epoch), BlockOrder(n, 1, epoch, block_rows)):
        whole = made(0, n)
        assert sorted(whole) == list(range(n))
        edges = sorted({0, n, *(min(cut, n) for cut in cuts)})
        parts = [made(a, b) for a, b in itertools.pairwise(edges)]
        assert (np.concatenate(parts) == whole).all()


# --- blocks


@settings(max_examples=50)
@given(st.integers(1, 5000), st.integers(1, 20), st.integers(1, 700))
def test_what_has_passed_was_read_before_and_is_in_the_end_everything(n, block_rows, step):
    made = BlockOrder(n, 0, 0, block_rows)
    read, passed = set(), set()
    for start in range(0, n, step):
        read |= set(made(start, min(start + step, n)).tolist())
        for a, b in made.passed(start, min(start + step, n)):
            passed |= set(range(a, b))
        assert passed <= read
    assert passed == set(range(n))


def test_blocks_mix_within_a_window_and_are_uniform_if_one_window_holds_all():
    n, block_rows = 100_000, 16
    rows = BlockOrder(n, 0, 0, block_rows)(0, n)
    window = WINDOW_BLOCKS * block_rows
    at = np.empty(n, np.int64)
    at[rows] = np.arange(n)
    # where rows go: as far as in a uniform permutation, a third of n on average
    assert 0.32 < np.abs(at - np.arange(n)).mean() / n < 0.345
    # rows of one block never come further apart than a window
    apart = np.abs(at[1:] - at[:-1])
    same_block = np.arange(1, n) % block_rows != 0
    assert apart[same_block].max() < window
    assert 0.31 < apart[same_block].mean() / window < 0.36
    # neighbours in the store that stay neighbours: about 2 in a window's rows, where uniform has 2 in n
    kept = (np.abs(np.diff(rows)) == 1).mean()
    assert 0.5 / window < kept < 4 / window
    # and rows of the same block follow each other as often as chance has it within a window
    together = (rows[1:] // block_rows == rows[:-1] // block_rows).mean()
    assert 0.5 < together * WINDOW_BLOCKS < 1.5


def test_ten_billion_rows_start_at_once():
    made = BlockOrder(10**10, 0, 0, 1024)
    rows = made(10**10 - 600, 10**10)
    assert len(set(rows.tolist())) == 600
    assert made._held[1].nbytes <= made.window_rows * 8 == 1 << 20
