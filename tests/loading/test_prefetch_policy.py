import time

import torch

from memfeed import Loader
from memfeed.loading.epoch import KEPT_EPOCHS, MEASURED_BATCHES, PrefetchPolicy
from memfeed.transforms import Transform


def run(pace, wait, busy, batches=4 * MEASURED_BATCHES):
    """Notes batches that take these seconds, or with a thread the longer of the two; says when it changed."""
    changes = []
    for batch in range(batches):
        if pace.settled:
            break
        told = (max(wait - busy, 0.0), busy) if pace.threaded else (wait, busy)
        if pace.note(*told):
            changes.append((batch, pace.threaded))
    return changes


def test_a_thread_is_kept_where_it_hides_half_of_the_time():
    pace = PrefetchPolicy(allowed=True)
    assert [threaded for _, threaded in run(pace, 0.01, 0.01)] == [True]
    assert (pace.settled, pace.threaded, str(pace)) == (True, True, "made ahead in a thread")


def test_no_thread_is_tried_where_there_is_nothing_to_hide():
    for wait, busy in ((0.01, 0.0001), (0.0001, 0.01)):
        pace = PrefetchPolicy(allowed=True)
        assert run(pace, wait, busy) == []
        assert (pace.settled, pace.threaded) == (True, False)


def test_a_thread_that_makes_it_no_faster_is_given_up():
    pace = PrefetchPolicy(allowed=True)
    changes = [pace.threaded for _ in range(4 * MEASURED_BATCHES) if not pace.settled and pace.note(0.01, 0.01)]
    assert changes == [True, False]
    assert pace.settled


def test_what_was_found_is_kept_for_some_epochs():
    pace = PrefetchPolicy(allowed=True)
    run(pace, 0.01, 0.01)
    for _ in range(KEPT_EPOCHS - 1):
        pace.begin()
        assert (pace.settled, pace.threaded) == (True, True)
    pace.begin()
    assert (pace.settled, pace.threaded, str(pace)) == (False, False, "measuring")
    pace.begin()
    assert [threaded for _, threaded in run(pace, 0.01, 0.0001)] == []
    assert (pace.settled, pace.threaded) == (True, False)


def test_short_epochs_are_measured_together():
    pace = PrefetchPolicy(allowed=True)
    for _ in range(MEASURED_BATCHES):
        pace.begin()
        run(pace, 0.01, 0.01, batches=3)
        if pace.settled:
            break
    assert pace.threaded


def test_a_loader_finds_out_and_gives_the_same_batches():
    class Slow(Transform):
        def apply(self, batch, keys, **_):
            time.sleep(0.004)
            return batch

    loader = Loader(torch.arange(400), 4, transform=Slow())
    seen = []
    for batch in loader:
        time.sleep(0.004)
        seen += batch.tolist()
    assert seen == list(range(400))
    assert loader.stats()["plan"]["batches"] == "made ahead in a thread"
    assert loader.stats()["wait_share"] < 0.4
    alone = Loader(torch.arange(400), 4, transform=Slow(), prefetch_factor=0)
    assert torch.cat(list(alone)).tolist() == seen
    assert alone.stats()["plan"]["batches"] == "made when asked for"
    assert 0.9 < alone.stats()["wait_share"] <= 1
