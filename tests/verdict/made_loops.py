"""Loops with turns of given times, and a verdict made of them."""

from memfeed.verdict.judge import Form, Loop, Measured, SampleCost, Step, Turn, ceiling, judge, times_as_fast
from memfeed.verdict.verdict import Verdict

ROWS, BATCH = 10_000, 50


def loop(name, milliseconds, computing=0.0, start=0.0):
    """Return a loop whose turns take so many milliseconds a row."""
    return Loop(
        name, tuple(Turn(start, start, (one - computing) / 1e3, 0.0, computing / 1e3, 100) for one in milliseconds)
    )


def measured(today, best=None, repeated=None, memfeed=None, **others):
    """Return measured loops, each from milliseconds a row of its turns."""
    loops = {
        "today": loop("today, 0 workers", today),
        "best": best and loop("2 workers", best),
        "repeated": repeated and loop("one batch repeated", repeated, min(repeated)),
        "memfeed": memfeed and loop("memfeed", memfeed),
    }
    defaults = {"refused": "", "row_count": ROWS, "batch_size": BATCH, "epochs": None, "fill_seconds": 100.0}
    return Measured(**{**loops, **defaults, "store_bytes": 1e9, "free_bytes": 10**12, **others})


def verdict(found, **others):
    """Return the verdict on measured loops."""
    result = judge(found)
    rows = found.row_count
    steps = (Step("decode", 0.007, 0.7), Step("RandomResizedCrop", 0.002, 0.2), Step("file", 0.001, 0.1))
    given = {
        "gain": times_as_fast(found.memfeed, found.rival, rows) if found.memfeed else None,
        "gain_today": times_as_fast(found.memfeed, found.today, rows) if found.memfeed else None,
        "ceiling": ceiling(found),
        "break_even": result.break_even,
        "store_bytes": found.store_bytes,
        "fill_seconds": found.fill_seconds,
        "rows_measured": 100,
        "today": found.today,
        "best": found.best,
        "repeated": found.repeated,
        "memfeed": found.memfeed,
        "sample": SampleCost(0.01, 0.009, 0.08, (17, 203), 1e5, 100, steps),
        "forms": (Form("'full'", 1e5, 20_000.0, 1e9, 0.05, 2), Form("'encoded'", 1e4, 500.0, 1e8, 2.0, None)),
        "machine": "2 cores, x86_64, torch 2",
        **others,
    }
    return Verdict(result.kind, result.because, result.instead, rows, found.batch_size, 0, **given)


HELPS = measured([10.0, 10.4, 9.8, 10.1, 10.2], [5.0, 5.2, 5.1, 5.0, 4.9], [1.0] * 5, [1.1, 1.0, 1.2, 1.1, 1.1])
