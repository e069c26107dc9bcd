import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import random_split

import memfeed
from memfeed.errors import RowError
from memfeed.store.view import many_rows, one_row, part_lengths


@pytest.fixture
def pairs(path):
    return memfeed.cache((torch.arange(30).view(10, 3), torch.arange(10) * 10), path, progress=False)


@settings(max_examples=100)
@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(-n, n - 1)))))
def test_negative_rows_count_from_the_end_as_in_a_list(drawn):
    n, which = drawn
    rows = list(range(n))
    assert many_rows(which, n).tolist() == [rows[i] for i in which]
    assert [one_row(i, n) for i in which] == [rows[i] for i in which]
    mask = np.isin(rows, [rows[i] for i in which])
    assert many_rows(mask, n).tolist() == sorted({rows[i] for i in which})


@settings(max_examples=100)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(200, 400))
def test_parts_are_as_long_as_those_of_random_split(weights, n):
    parts = [weight / sum(weights) for weight in weights]
    if abs(sum(parts) - 1) < 1e-9 and sum(parts) <= 1:
        assert part_lengths(parts, n) == [len(part) for part in random_split(range(n), parts)]
    assert sum(part_lengths(parts, n)) == n


@pytest.mark.parametrize("parts", [[0.5, 0.3, 0.2], [1 / 3] * 3, [0.85, 0.15], [7, 3], [1, 2, 7]])
def test_splits_are_disjoint_and_cover(pairs, parts):
    split = pairs.split(parts, seed=3)
    assert sorted(y for part in split for _, y in part) == [10 * i for i in range(10)]
    assert [len(part) for part in split] == [len(s) for s in random_split(range(10), parts)]
    again = memfeed.open(pairs.path).split(parts, seed=3)
    assert [[y for _, y in part] for part in again] == [[y for _, y in part] for part in split]
    other = pairs.split(parts, seed=4)
    assert [[y for _, y in part] for part in other] != [[y for _, y in part] for part in split]


@pytest.mark.parametrize("parts", [[0.5, 0.2], [5, 6], [], [1.5, -0.5], [float("nan"), 1], ["a", 1], 3])
def test_parts_that_do_not_add_up(pairs, parts):
    with pytest.raises(ValueError, match="found parts"):
        pairs.split(parts)


def test_unsigned_rows_do_not_wrap():
    store = memfeed.cache((torch.arange(10),), progress=False)
    assert store[np.array([3, 4], np.uint64)][0].tolist() == [3, 4]
    with pytest.raises(RowError, match="found row 18446744073709551615; expected -10 to 9"):
        store[np.array([2**64 - 1], np.uint64)]
