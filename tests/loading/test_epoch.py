"""One epoch as it runs, over groups that are made by a few lines: order, moves, counts, and its end."""

import copy
import pickle
import signal
import sys
from contextlib import suppress
from functools import cache, partial
from itertools import count
from types import SimpleNamespace

import pytest

from memfeed.loading import epoch
from memfeed.loading.background import Pause, PausedError
from memfeed.loading.epoch import EpochIterator, EpochProgress, IteratorPickledError, run_epoch, runs_of_epoch
from memfeed.loading.gather_tasks import BatchGroup


class Policy(SimpleNamespace):
    def begin(self):
        pass

    def note(self, wait, step):
        return False


@pytest.fixture
def alarm():
    """SIGALRM raises TimeoutError, as the time limit of a caller."""

    def handle(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, handle)
    yield
    signal.signal(signal.SIGALRM, before)


def groups_from(position, failed=0, count=10, size=2):
    """Groups of ``size`` batches, which are their positions."""
    first = (position or 0) + failed
    for at in range(first, count, size):
        batches = list(range(at, min(at + size, count)))
        yield BatchGroup(batches, [batch + 1 for batch in batches], 3)


def run(progress, *, threaded=False, make=groups_from, note=None):
    policy = Policy(threaded=threaded, settled=note is None)
    if note is not None:
        policy.note = lambda wait, step: note(policy)
    return run_epoch(progress, lambda _: make, lambda: policy, 2, Pause())


@pytest.mark.parametrize("threaded", [False, True])
def test_batches_positions_and_counts(threaded):
    progress = EpochProgress()
    found = []
    for batch in run(progress, threaded=threaded):
        found.append((batch, progress.position, progress.batches))
        assert not progress.finished
    assert found == [(i, i + 1, i + 1) for i in range(10)]
    assert (progress.finished, progress.samples) == (True, 30)
    assert 0 <= progress.wait_seconds <= progress.seconds


@pytest.mark.parametrize("threaded", [False, True])
def test_it_goes_on_after_a_move(threaded):
    progress, found = EpochProgress(), []
    for batch in run(progress, threaded=threaded):
        found.append(batch)
        if len(found) == 3:
            progress.position, progress.moved = 7, True
    assert found == [0, 1, 2, 7, 8, 9]


def test_it_begins_at_a_position():
    progress = EpochProgress(position=6)
    assert list(run(progress)) == [6, 7, 8, 9]


def test_who_makes_batches_may_change_after_any_group():
    def flip(policy):
        policy.threaded = not policy.threaded
        return True

    progress = EpochProgress()
    assert list(run(progress, note=flip)) == list(range(10))
    assert progress.finished


def test_nothing_runs_before_the_first_batch():
    begun = []
    iterator = run_epoch(
        EpochProgress(),
        lambda _: begun.append(1) or groups_from,
        lambda: Policy(threaded=False, settled=True),
        2,
        Pause(),
    )
    assert begun == []
    next(iterator)
    assert begun == [1]


@pytest.mark.parametrize("threaded", [False, True])
def test_an_error_comes_after_the_batches_before_it(threaded):
    def failing(position, failed):
        yield from groups_from(position, failed, 4)
        raise ValueError("bad row")

    found, progress = [], EpochProgress()
    iterator = run(progress, threaded=threaded, make=failing)
    with pytest.raises(ValueError, match="bad row"):
        while True:
            found.append(next(iterator))
    assert found == [0, 1, 2, 3]
    assert not progress.finished


def test_an_empty_epoch():
    progress = EpochProgress()
    assert list(run(progress, make=lambda position, failed: iter([]))) == []
    assert progress.finished


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize(("error", "lost"), [(ValueError("bad"), 1), (PausedError(), 0), (KeyboardInterrupt(), 0)])
def test_an_iterator_goes_on_after_an_error(threaded, error, lost):
    raised = []

    def made(position, failed):
        for group in groups_from(position, failed, size=1):
            if group.batches[0] in (3, 4, 9) and len(raised) < 3:
                raised.append(1)
                raise error
            yield group

    progress, begun, found = EpochProgress(), [], []
    policy = Policy(threaded=threaded, settled=True)
    begin = cache(lambda _: begun.append(1) or made)
    runs = runs_of_epoch(progress, partial(run_epoch, progress, begin, lambda: policy, 2, Pause()))
    iterator = EpochIterator.from_iterable(runs)
    while True:
        try:
            found.append(next(iterator))
        except StopIteration:
            break
        except (ValueError, PausedError, KeyboardInterrupt) as caught:
            assert caught is error
            assert progress.position == (found[-1] + 1), "a state that is saved now has the batch"
    assert found == ([0, 1, 2, 5, 6, 7, 8] if lost else list(range(10)))
    assert (progress.finished, begun, progress.batches) == (True, [1], len(found))


@pytest.mark.parametrize("has_workers", [False, True])
def test_what_a_handler_of_signals_raises_is_no_error_of_a_batch(has_workers, alarm):
    raised = []

    def made(position, failed):
        for group in groups_from(position, failed, size=1):
            if group.batches[0] in (0, 4) and raised.count(group.batches[0]) < 2:
                raised.append(group.batches[0])
                signal.raise_signal(signal.SIGALRM)
            yield group

    progress, found = EpochProgress(has_workers=has_workers), []
    policy = Policy(threaded=False, settled=True)
    iterator = EpochIterator.from_iterable(
        runs_of_epoch(progress, partial(run_epoch, progress, cache(lambda _: made), lambda: policy, 2, Pause()))
    )
    while not progress.finished:
        with suppress(TimeoutError):
            for batch in iterator:
                found.append(batch)  # noqa: PERF402
    assert found == (list(range(10)) if has_workers else [1, 2, 3, 5, 6, 7, 8, 9])


def test_an_interrupt_at_any_call_ends_no_epoch():
    """A signal is handled where a function begins or goes on."""

    def batches(interrupted):
        calls = count()

        def interrupt(frame, event, _):
            if event == "call" and frame.f_code.co_filename == epoch.__file__ and next(calls) == interrupted:
                raise KeyboardInterrupt

        progress, found = EpochProgress(), []
        policy = Policy(threaded=False, settled=True)
        begin = cache(lambda _: groups_from)
        iterator = EpochIterator.from_iterable(
            runs_of_epoch(progress, partial(run_epoch, progress, begin, lambda: policy, 2, Pause()))
        )
        for _ in range(11):
            sys.setprofile(interrupt)
            try:
                found.append(next(iterator, None))
            except KeyboardInterrupt:
                continue
            finally:
                sys.setprofile(None)
        return found, next(calls)

    whole, call_count = batches(None)
    assert whole == [*range(10), None]
    assert call_count > 10
    for interrupted in range(call_count):
        found, _ = batches(interrupted)
        assert found == whole[: len(found)]
        assert len(found) == 10, interrupted


def test_iterators_have_a_length_and_are_not_pickled():
    iterator = EpochIterator(iter([1, 2]))
    iterator.length = lambda: 5
    assert len(iterator) == 5
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(IteratorPickledError, match="found a pickle or a copy of an iterator"):
            call(iterator)
    assert list(iterator) == [1, 2]
    assert not EpochProgress().is_running
