import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfeed.order import pieces
from memfeed.order.choice import Blocks, orders_of
from memfeed.order.orders import Shuffled
from memfeed.order.pieces import RankCut, RankPieces, RankShards

ways = st.sampled_from([True, False, Blocks()])
PINNED = [6, 7, 10, 4, 11, 9, 5, 1, 2, 3, 8, 0]


def made(n, cut, *, shuffle=True, epoch=0, block_rows=4, seed=0):
    in_blocks = isinstance(shuffle, Blocks)
    return RankPieces(
        n, seed, epoch, shuffle=bool(shuffle), in_blocks=in_blocks, block_rows=block_rows, cut=RankCut(*cut)
    )


def rows_of_rank(order, rank):
    shards = RankShards(order.n, order.cut.batch_size, rank, order.cut.pieces, "uneven")
    found = []
    for run in shards.runs(0, 3):
        for start in range(run.start, run.start + run.steps * run.stride, run.stride):
            found += order(start, start + run.size).tolist()
    return found


@given(st.integers(0, 400), st.integers(2, 6), st.integers(1, 9), st.integers(1, 40), ways, st.integers(0, 3))
def test_each_row_comes_once_and_each_rank_reads_its_piece_alone(n, ranks, batch, block_rows, shuffle, epoch):
    order = made(n, (ranks, batch), shuffle=shuffle, epoch=epoch, block_rows=block_rows)
    assert sorted(order(0, n).tolist()) == list(range(n))
    read = [rows_of_rank(order, rank) for rank in range(ranks)]
    assert [sorted(rows) for rows in read] == [order.rows_of(rank).tolist() for rank in range(ranks)]
    assert max(map(len, read)) - min(map(len, read)) <= 1


@given(st.integers(1, 400), st.integers(2, 6), st.integers(1, 9), ways, st.data())
def test_a_part_of_the_order_is_that_part_of_the_whole(n, ranks, batch, shuffle, data):
    order, whole = (made(n, (ranks, batch), shuffle=shuffle) for _ in range(2))
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1)))
    assert order.at(places).tolist() == whole(0, n)[places].tolist()


def test_the_order_is_the_same_on_every_platform():
    assert made(12, (2, 2), block_rows=2)(0, 12).tolist() == PINNED


def test_pieces_are_others_in_each_epoch_and_for_each_seed():
    held = {tuple(made(1000, (4, 8), epoch=epoch, seed=seed).rows_of(0)) for epoch in range(5) for seed in range(5)}
    assert len(held) == 25
    in_turn = {tuple(made(1000, (4, 8), shuffle=False, epoch=epoch).rows_of(1)) for epoch in range(3)}
    assert in_turn == {tuple(range(250, 500))}


def test_one_piece_is_the_order_without_pieces():
    one = orders_of(100, True, 7, 4, RankCut(1, 8))(3)
    assert one(0, 100).tolist() == Shuffled(100, 7, 3)(0, 100).tolist()


@pytest.mark.parametrize("shuffle", [True, Blocks()])
def test_a_rank_draws_its_own_piece_only(shuffle, monkeypatch):
    order = made(40_000, (4, 10), shuffle=shuffle)
    order.at(np.arange(10))
    order.at(np.arange(4000, 4010))
    assert list(order._drawn) == [0]


def test_a_piece_is_a_sample_of_all_parts_of_the_store(monkeypatch):
    n, ranks = 100_000, 4
    order = made(n, (ranks, 10), block_rows=1024)
    assert order.block_rows == n // ranks // pieces.LEAST_BLOCKS
    tenths = np.bincount(order.rows_of(2) * 10 // n, minlength=10)
    assert tenths.min() > 0.5 * n / ranks / 10


def test_rows_of_different_blocks_meet_in_a_rank_as_often_as_by_chance():
    together = sum(
        int(np.isin([0, 900], order.rows_of(rank)).all())
        for epoch in range(800)
        for order in [made(1024, (4, 8), epoch=epoch, block_rows=8)]
        for rank in range(4)
    )
    assert 0.2 < together / 800 < 0.3
