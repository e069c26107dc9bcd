import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memfeed.errors import LoaderError
from memfeed.order.choice import WINDOW, Blocks, check_weights, mixed_orders, shares

KINDS = [False, True, Blocks()]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(1, 10_000))
def test_shares_sum_to_the_whole_and_are_off_by_less_than_a_row(parts, n):
    weights = [part / sum(parts) for part in parts]
    counts = shares(weights, n)
    assert sum(counts) == n
    assert all(abs(count - weight * n) < 1 + 1e-6 for count, weight in zip(counts, weights, strict=True))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.5, 0.6], "which sum to 1.1; expected none negative, and a sum of 1"),
        ([1.5, -0.5], r"found weights \[1.5, -0.5\], which sum to 1"),
        ([float("nan"), 1.0], "found weights"),
    ],
)
def test_weights_that_are_none(weights, message):
    with pytest.raises(LoaderError, match=message):
        check_weights(weights)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    st.lists(st.integers(0, 20), min_size=4, max_size=4),
    st.sampled_from(KINDS),
    st.lists(st.integers(0, 9000), max_size=4),
)
@example([1, 1, WINDOW - 3000, 2998], [1, 1, 1, 1], False, [])  # a window
@example([1, 1, WINDOW - 3000, 2999], [1, 1, 1, 1], False, [])  # and a row: fewer than rounding leaves
@example([1, 1, 2 * WINDOW - 3000, 3000], [1, 1, 1, 1], True, [WINDOW, 2 * WINDOW, 2 * WINDOW + 1])
def test_each_source_has_its_share_and_goes_through_its_rows_pass_after_pass(sizes, parts, kind, cuts):
    parts = parts[: len(sizes)] if any(parts[: len(sizes)]) else [1] * len(sizes)
    counts = shares([part / sum(parts) for part in parts], sum(sizes))
    orders = mixed_orders(sizes, counts, kind, 3, 8)
    first = np.cumsum([0, *sizes])
    seen = [[] for _ in sizes]
    for epoch in range(3):
        order = orders(epoch)
        whole = order(0, order.n)
        assert len(whole) == sum(sizes)
        edges = sorted({0, order.n, *(min(cut, order.n) for cut in cuts)})
        assert (np.concatenate([order(a, b) for a, b in itertools.pairwise(edges)]) == whole).all()
        for i, count in enumerate(counts):
            rows = whole[(whole >= first[i]) & (whole < first[i + 1])] - first[i]
            assert len(rows) == count
            seen[i] += rows.tolist()
    for i, size in enumerate(sizes):
        times = np.bincount(seen[i], minlength=size)
        assert times.max() - times.min() <= 1, "each row of a source comes equally often"


def test_sources_are_spread_evenly():
    orders = mixed_orders([50_000, 50_000], shares([0.7, 0.3], 100_000), True, 0, 8)
    rows = orders(0)(0, 100_000)
    from_first = (rows < 50_000).reshape(-1, 100).mean(axis=1)
    assert abs(from_first.mean() - 0.7) < 1e-9
    by_window = (rows[: WINDOW * 20] < 50_000).reshape(20, WINDOW).mean(axis=1)
    assert (abs(by_window - 0.7) < 1 / WINDOW * 1.5).all()
    even = mixed_orders([50_000, 50_000], shares([0.75, 0.25], 100_000), False, 0, 8)(0)(0, 40)
    assert ((even < 50_000).reshape(10, 4).sum(axis=1) == 3).all()


def test_it_is_the_same_for_the_same_seed_and_no_other():
    def rows(seed, epoch):
        return tuple(mixed_orders([30, 50], [40, 40], True, seed, 8)(epoch)(0, 80))

    assert rows(1, 2) == rows(1, 2)
    assert len({rows(seed, epoch) for seed in range(5) for epoch in range(5)}) == 25
