from dataclasses import replace

import pytest
from made_loops import BATCH, HELPS, ROWS, loop, measured, verdict

from memfeed.verdict.judge import Loop, break_even, judge, spread, times_as_fast

FIVE = [10.0, 10.4, 9.8, 10.1, 10.2]


def test_a_store_that_is_faster_in_every_turn_helps():
    result = judge(HELPS)
    assert result.kind == "helps"
    assert result.break_even == 3  # 100 + 11 + 11 seconds, against 3 * 50
    assert (
        verdict(HELPS)
        .headline()
        .startswith("helps: 4.5 times (4.2 to 5.2) as fast as DataLoader at its best (2 workers)")
    )


@pytest.mark.parametrize(
    ("found", "kind", "because", "instead"),
    [
        (measured(FIVE, None, FIVE, FIVE), "does not help", "the step computes for", "a faster step"),
        (
            measured(FIVE, [5.0] * 5, [4.9] * 5, [5.0] * 5),
            "does not help",
            "more workers are enough, 2 workers",
            "2.0 times",
        ),
        (measured(FIVE, None, [1.0] * 5, FIVE), "does not help", "no faster than from the dataset", "what a sample"),
        (measured(FIVE, None, [1.0] * 5, None, refused="it is random"), "does not help", "made: it is random", "cores"),
        (
            measured([5, 20, 9, 8, 12], None, [1.0] * 5, [6, 6, 6, 6, 6]),
            "cannot tell",
            "spread of 5 turns",
            "nothing else",
        ),
        (measured(FIVE[:3], None, [1.0] * 3, [1.0] * 3), "cannot tell", "only 3 turns", "seconds="),
        (measured(FIVE, None, None, [1.0] * 5), "cannot tell", "less than 505 ms a batch", "step="),
        (measured(FIVE, None, None, FIVE), "does not help", "no faster", "what a sample"),
        (measured(FIVE, None, [1.0] * 5, [1.0] * 5, epochs=1), "does not help", "read once", "streaming format"),
        (
            measured(FIVE[:1], None, [1.0], [20.0], epochs=1),
            "does not help",
            "once, and the first epoch only fills",
            "",
        ),
        (measured(FIVE, None, [1.0] * 5, [5.0] * 5, fill_seconds=400.0, epochs=4), "does not help", "from epoch 7", ""),
        (
            measured(FIVE, None, [1.0] * 5, [1.0] * 5, free_bytes=10),
            "does not help",
            "1.0 GB, and 10 B are free",
            "smaller",
        ),
    ],
)
def test_what_is_said_and_why(found, kind, because, instead):
    result = judge(found)
    assert result.kind == kind
    assert because in result.because
    assert instead in result.instead
    text = str(verdict(found))
    assert text.startswith(f"{kind}, because")
    assert len(text.splitlines()) <= 13


def test_the_same_spread_beside_more_epochs_helps():
    assert judge(measured(FIVE, None, [1.0] * 5, [1.0] * 5, epochs=30)).kind == "helps"


def test_what_slows_down_both_loops_of_a_turn_hides_no_gain():
    noise = [1.0, 3.0, 1.5, 2.0, 1.1]
    slow, fast = [10 * one for one in noise], [8 * one for one in noise]
    assert judge(measured(slow, None, [1.0] * 5, fast)).kind == "helps"
    assert judge(measured(slow, None, [1.0] * 5, fast[::-1])).kind == "cannot tell"


def test_a_step_that_computes_is_found_in_its_own_turns():
    """The ratios of two loops are noisy, but a turn that waits for 1 % of its time says that by itself."""
    noise = [1.0, 3.0, 1.5, 2.0, 1.1]
    found = measured(noise, None, noise[::-1], noise[::-1])
    assert judge(found).kind == "cannot tell"  # all of it is waiting
    computing = replace(
        found, today=Loop("today", tuple(replace(one, waiting=1e-6, computing=1e-3) for one in found.today.turns))
    )
    assert judge(computing).kind == "does not help"
    assert "the step computes" in judge(computing).because
    faster = replace(computing, repeated=loop("", [0.1] * 5), memfeed=loop("", [0.1, 1.0, 0.1, 0.1, 0.1]))
    assert judge(faster).kind == "cannot tell"  # workers may take the cores from the step


def test_the_start_of_an_epoch_counts():
    found = times_as_fast(loop("fast", [1.0], start=90.0), loop("slow", [10.0]), ROWS)
    assert found.middle == pytest.approx(1.0)  # 10 s and 90 s, against 100 s
    assert times_as_fast(loop("fast", [1.0]), loop("slow", [10.0]), ROWS).middle == pytest.approx(10.0)


def test_outermost_turns_are_left_out_of_many():
    assert spread([5.0, 1.0, 3.0]).low == 1.0
    found = spread([*range(1, 9)])
    assert (found.low, found.middle, found.high) == (2, 4.5, 7)


@pytest.mark.parametrize(
    ("fill", "epoch", "rival", "expected"),
    [
        (10, 1, 10, 2),
        (100, 10, 50, 3),
        (90, 10, 50, 3),
        (89, 10, 50, 2),
        (5, 1, 10, 2),
        (0, 1, 10, 1),
        (10, 10, 10, None),
    ],
)
def test_break_even_is_the_first_epoch_at_whose_end_time_is_saved(fill, epoch, rival, expected):
    assert break_even(fill, epoch, rival) == expected
    if expected is not None and fill:
        spent = [fill + (n - 1) * epoch for n in range(1, 9)]
        assert next(n for n in range(2, 9) if spent[n - 1] < n * rival) == expected


def test_the_batch_of_a_line_is_the_programs():
    assert f"a batch of {BATCH} " in str(verdict(HELPS))
