"""Which orders the arguments of a loader choose, and among how many rows they mix."""

import numpy as np
import pytest

from memfeed.order.choice import (
    BLOCK_BYTES,
    BLOCK_ROWS,
    Blocks,
    Mixed,
    default_block_rows,
    mixed_orders,
    mixed_rows,
    orders_of,
)
from memfeed.order.orders import WINDOW_BLOCKS, BlockOrder, Sequential, Shuffled
from memfeed.order.pieces import RankCut, RankPieces

N = 60


def rows(order):
    return np.asarray(order(0, order.n)).tolist()


@pytest.mark.parametrize(
    ("row_bytes", "expected"),
    [
        (0, BLOCK_ROWS),
        (1, BLOCK_ROWS),
        (BLOCK_BYTES // BLOCK_ROWS, BLOCK_ROWS),
        (BLOCK_BYTES // BLOCK_ROWS + 1, BLOCK_ROWS - 1),
        (BLOCK_BYTES // 2, 2),
        (BLOCK_BYTES, 1),
        (BLOCK_BYTES + 1, 1),
    ],
)
def test_a_block_is_a_mebibyte_and_has_at_least_one_row(row_bytes, expected):
    assert default_block_rows(row_bytes) == expected


@pytest.mark.parametrize(
    ("shuffle", "n", "block_rows", "chunk_rows", "expected"),
    [
        (False, 10**6, 64, 8, 0),
        (True, 10**6, 64, 8, 10**6),
        (Blocks(), 10**6, 64, 8, WINDOW_BLOCKS * 64),
        (Blocks(), 10**6, 64, 64, WINDOW_BLOCKS * 64),
        (Blocks(), 10**6, 64, 65, 10**6),  # a chunk has rows of several blocks, which come at any time
        (Blocks(), 100, 64, 8, 100),
        (Blocks(), 0, 64, 8, 0),
    ],
)
def test_among_how_many_rows_an_order_mixes(shuffle, n, block_rows, chunk_rows, expected):
    assert mixed_rows(shuffle, n, block_rows, chunk_rows) == expected


@pytest.mark.parametrize(
    ("shuffle", "expected"),
    [
        (False, lambda epoch: Sequential(N)),
        (True, lambda epoch: Shuffled(N, 5, epoch)),
        (Blocks(7), lambda epoch: BlockOrder(N, 5, epoch, 7)),
    ],
)
def test_the_order_that_shuffle_names(shuffle, expected):
    orders = orders_of(N, shuffle, 5, 7)
    for epoch in (0, 3):
        assert type(orders(epoch)) is type(expected(epoch))
        assert rows(orders(epoch)) == rows(expected(epoch))
        assert sorted(rows(orders(epoch))) == list(range(N))
    assert (rows(orders(0)) == rows(orders(3))) == (shuffle is False)


@pytest.mark.parametrize("shuffle", [False, True, Blocks(7)])
def test_one_piece_has_the_order_of_a_store_in_one(shuffle):
    whole, one = orders_of(N, shuffle, 5, 7), orders_of(N, shuffle, 5, 7, RankCut(1, 1))
    assert [rows(one(epoch)) for epoch in (0, 1)] == [rows(whole(epoch)) for epoch in (0, 1)]


@pytest.mark.parametrize("shuffle", [False, True, Blocks(3)])
def test_several_pieces_have_the_orders_of_their_ranks(shuffle):
    cut = RankCut(4, 2)
    orders = orders_of(N, shuffle, 5, 3, cut)
    for epoch in (0, 1):
        expected = RankPieces(
            N, 5, epoch, shuffle=bool(shuffle), in_blocks=isinstance(shuffle, Blocks), block_rows=3, cut=cut
        )
        assert rows(orders(epoch)) == rows(expected)
    assert (rows(orders(0)) == rows(orders(1))) == (shuffle is False)


@pytest.mark.parametrize("shuffle", [False, True, Blocks(3)])
def test_a_mixture_takes_the_counts_from_each_source(shuffle):
    sizes, counts = [20, 40], [30, 10]
    for epoch in (0, 1):
        order = mixed_orders(sizes, counts, shuffle, 5, 3)(epoch)
        assert type(order) is Mixed
        found = np.asarray(rows(order))
        assert [int((found < 20).sum()), int((found >= 20).sum())] == counts
        assert np.bincount(found[found < 20], minlength=20).min() >= 1, "each row once before one comes again"
    drawn = [rows(mixed_orders(sizes, counts, shuffle, seed, 3)(0)) for seed in (5, 6)]
    assert (drawn[0] == drawn[1]) == (shuffle is False)


def test_sources_of_one_size_are_shuffled_in_ways_of_their_own():
    found = np.asarray(rows(mixed_orders([30, 30], [30, 30], True, 5, 3)(0)))
    assert found[found < 30].tolist() != (found[found >= 30] - 30).tolist()
