import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memfeed.order.orders import Bijection


@settings(max_examples=60)
@given(st.integers(1, 3000), st.integers(0, 2**64))
def test_it_is_a_permutation_and_knows_its_inverse(n, key):
    place = Bijection(n, key)
    entries = place(np.arange(n))
    assert sorted(entries) == list(range(n))
    assert (place.inverse(entries) == np.arange(n)).all()


@given(st.integers(1, 2**62), st.lists(st.integers(0, 2**62), min_size=1, max_size=5))
def test_any_entry_of_any_size(n, positions):
    at = np.array(positions, np.int64) % n
    entries = Bijection(n, "x")(at)
    assert ((entries >= 0) & (entries < n)).all()
    assert (Bijection(n, "x").inverse(entries) == at).all()


def test_literal_entries_are_pinned():
    assert Bijection(10, "a", 1)(np.arange(10)).tolist() == [4, 0, 1, 9, 5, 2, 8, 6, 7, 3]
    assert Bijection(10**12, "a", 1)(np.arange(3)).tolist() == [837141045010, 236693001136, 15406992940]


def test_every_entry_is_as_likely_at_every_position():
    n, draws = 8, 4000
    counts = np.zeros((n, n))
    for key in range(draws):
        counts[np.arange(n), Bijection(n, key)(np.arange(n))] += 1
    chi_square = ((counts - draws / n) ** 2 / (draws / n)).sum()
    assert chi_square < 90  # 49 degrees of freedom: 1 in 3,000 exceeds it, and the draw is fixed


def test_neighbours_land_anywhere():
    n = 10_000
    entries = Bijection(n, 3)(np.arange(n))
    distance = np.abs(np.diff(entries)).mean() / n
    assert 0.32 < distance < 0.35  # a third for a uniform permutation
