"""The arithmetic of the demo."""

import pytest

from memfeed.cli.demo.chart import last_crossing, repeated
from memfeed.cli.demo.result import EpochTiming, Result


def result(slow, fast, cache_seconds=10.0):
    dataloader, memfeed = (EpochTiming(((0.0, 0), (seconds, 100)), seconds / 4) for seconds in (slow, fast))
    return Result(dataloader, memfeed, cache_seconds, 1000, 500, 8, 1, "a machine")


@pytest.mark.parametrize(
    ("slow", "fast", "exact", "epoch"),
    [(10, 5, 2.0, 3), (10, 8, 5.0, 6), (10, 2.5, 10 / 7.5, 2), (10, 10, None, None), (5, 10, None, None)],
)
def test_break_even(slow, fast, exact, epoch):
    found = result(slow, fast)
    assert found.break_even_epochs == exact
    assert found.break_even_epoch == epoch
    assert found.ratio == pytest.approx(slow / fast)


def test_an_epoch():
    timing = EpochTiming(((0.0, 0), (1.0, 10), (4.0, 40)), 1.0)
    assert (timing.seconds, timing.samples, timing.rate, timing.wait_share) == (4.0, 40, 10.0, 0.25)


def test_title_and_table():
    found = result(10, 5)
    assert found.title == "100 images, batches of 8, 1 worker, a machine"
    assert found.table().row_count == 6
    assert result(5, 10).table().row_count == 6


def test_lines_of_repeated_epochs():
    seconds, samples = repeated(EpochTiming(((0.0, 0), (1.0, 10), (2.0, 20)), 0.0), 3.0, 7.5)
    assert seconds.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert samples.tolist() == [0, 10, 20, 30, 40, 50, 60]


def test_where_lines_cross():
    slow = repeated(result(10, 5).dataloader, 0.0, 60.0)
    fast = repeated(result(10, 5).memfeed, 10.0, 60.0)
    seconds, samples = last_crossing(slow, fast, 60.0)
    assert seconds == pytest.approx(20, abs=0.1)
    assert samples == pytest.approx(200, abs=2)
    assert last_crossing(fast, slow, 60.0) is None
    assert last_crossing((fast[0], fast[1] + 1), (fast[0], fast[1] + 2), 60.0) is None
