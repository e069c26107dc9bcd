import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memfeed.order.buckets import LengthBatches, enough_batches

lengths = st.lists(st.integers(0, 30), max_size=60)


def batches_of(found):
    return [found[at] for at in range(found.n)]


@settings(max_examples=200)
@given(lengths, st.integers(1, 40), st.integers(30, 90), st.sampled_from([None, 7]))
def test_batches_by_tokens_keep_the_budget_and_every_row(lengths, window, budget, key):
    by_place = np.array(lengths, np.int64)
    rows = np.random.default_rng(0).permutation(len(lengths))
    found = LengthBatches(rows, by_place, window, batch_tokens=budget, key=key)
    places = np.concatenate([np.empty(0, np.int64), *(at for _, at in batches_of(found))])
    assert sorted(places.tolist()) == list(range(len(lengths)))
    for part, at in batches_of(found):
        assert len(part) > 0
        assert (rows[at] == part).all()
        assert len(at) * max(int(by_place[at].max()), 1) <= budget
        assert len(set((at // window).tolist())) == 1, "a batch is of one window"
    # the slow way: the longest row that is left, and as many of the next ones as fit
    for first in range(0, len(lengths), window):
        left, expected = sorted(lengths[first : first + window], reverse=True), []
        while left:
            size = 1
            while size < len(left) and (size + 1) * max(left[0], 1) <= budget:
                size += 1
            expected.append(left[:size])
            left = left[size:]
        cut = [by_place[at].tolist() for _, at in batches_of(found) if at[0] // window == first // window]
        assert sorted(cut) == sorted(expected)
        assert key is not None or cut == expected


@settings(max_examples=100)
@given(lengths, st.integers(1, 9), st.integers(1, 4), st.booleans(), st.sampled_from([None, 7]))
def test_batches_of_like_length_have_one_size(lengths, batch_size, window_batches, drop_last, key):
    options = {"batch_size": batch_size, "drop_last": drop_last, "key": key}
    rows = np.arange(len(lengths)) + 100
    found = LengthBatches(rows, np.array(lengths, np.int64), window_batches * batch_size, **options)
    sizes = sorted((len(part) for part, _ in batches_of(found)), reverse=True)
    whole, left = divmod(len(lengths), batch_size)
    assert sizes == [batch_size] * whole + [left] * (left > 0 and not drop_last)
    given_rows = sorted(row for part, _ in batches_of(found) for row in part.tolist())
    assert len(set(given_rows)) == len(given_rows) == sum(sizes)
    assert drop_last or given_rows == rows.tolist()


@settings(max_examples=200)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(1, 40), st.integers(30, 90), st.data())
def test_a_given_count_is_met_within_the_budget(lengths, window, budget, data):
    by_place, rows = np.array(lengths, np.int64), np.arange(len(lengths))
    fewest = LengthBatches(rows, by_place, len(lengths), batch_tokens=budget).n
    found = LengthBatches(rows, by_place, window, batch_tokens=budget)
    assert fewest <= found.n <= len(lengths)
    count = data.draw(st.integers(fewest, len(lengths)))
    met = LengthBatches(rows, by_place, window, batch_tokens=budget, count=count, key=data.draw(st.integers(0, 3)))
    assert met.n == count
    assert sorted(row for part, _ in batches_of(met) for row in part.tolist()) == rows.tolist()
    assert all(len(at) and len(at) * max(int(by_place[at].max()), 1) <= budget for _, at in batches_of(met))


def test_hardly_any_epoch_has_more_batches_than_enough():
    lengths = np.random.default_rng(0).lognormal(5, 1, 5000).astype(np.int64).clip(1, 2000)
    counts = []
    for seed in range(30):
        rows = np.random.default_rng(seed).permutation(len(lengths))
        counts.append(LengthBatches(rows, lengths[rows], 500, batch_tokens=4096).n)
    assert max(counts) <= enough_batches(min(counts), 5000, 500) <= 1.03 * min(counts)
    assert enough_batches(3, 4, 500) == 4


def test_a_key_gives_one_order_and_another_key_another():
    lengths = np.arange(300) % 17

    def order(key):
        return [at.tolist() for _, at in batches_of(LengthBatches(np.arange(300), lengths, 300, batch_size=4, key=key))]

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == sorted(order(2))


def test_the_order_is_pinned():
    # resumed runs depend on it
    found = LengthBatches(np.arange(12), np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]), 12, batch_tokens=12, key=3)
    assert [at.tolist() for _, at in batches_of(found)] == [[11], [7, 4], [6, 1, 3], [5], [8, 10], [2, 0, 9]]
