import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memfeed.order import Sequential, Shuffled, permutation


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(-5, 2**70), st.integers(0, 100))
def test_every_row_once(n, seed, epoch):
    assert sorted(permutation(n, seed, epoch)) == list(range(n))


def test_literal_permutations_are_pinned():
    assert permutation(10, 0, 0).tolist() == PINNED[0]
    assert permutation(10, 0, 1).tolist() == PINNED[1]
    assert permutation(10, 1, 0).tolist() == PINNED[2]


def test_seed_and_epoch_do_not_alias():
    drawn = {tuple(permutation(50, seed, epoch)) for seed in range(20) for epoch in range(20)}
    assert len(drawn) == 400


def test_uniform_over_positions():
    n, draws = 8, 4000
    counts = np.zeros((n, n))
    for epoch in range(draws):
        counts[np.arange(n), permutation(n, 3, epoch)] += 1
    chi_square = ((counts - draws / n) ** 2 / (draws / n)).sum()
    assert chi_square < 90  # 49 degrees of freedom: 1 in 3,000 exceeds it, and the draw is fixed


def test_parts_of_an_epoch():
    assert Sequential(10**12)(5, 8).tolist() == [5, 6, 7], "no memory for all rows is taken"
    assert Sequential(7)(5, 100).tolist() == [5, 6]
    whole = Shuffled(100, 1, 2)
    assert np.concatenate([whole(0, 60), whole(60, 100)]).tolist() == permutation(100, 1, 2).tolist()


PINNED = [
    [1, 8, 2, 7, 5, 0, 3, 9, 6, 4],
    [5, 4, 8, 1, 9, 2, 7, 0, 3, 6],
    [8, 7, 4, 9, 1, 2, 5, 3, 6, 0],
]
