import gc
import threading
import time
import traceback

import pytest

from memfeed.errors import LoaderError
from memfeed.loading.background import Background, Pause
from support import wait_until


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "memfeed"]


def gone():
    wait_until(lambda: not threads(), 20)
    return True


def counting(n, seen=None):
    for i in range(n):
        if seen is not None:
            seen.append(i)
        yield i


def idle(ahead):
    """Wait until the thread waits for room."""
    wait_until(lambda: ahead._link.is_waiting)


def test_items_come_in_order_and_the_thread_ends():
    assert list(Background(counting(1000), 3)) == list(range(1000))
    assert gone()


@pytest.mark.parametrize(("limit", "weight", "made"), [(3, 1, 3), (100, 30, 4), (1, 30, 1)])
def test_it_is_no_further_ahead_than_the_limit(limit, weight, made):
    seen = []
    ahead = Background(counting(100, seen), limit, weight=lambda item: weight)
    idle(ahead)
    assert len(seen) == ahead.ready == made
    next(ahead)
    idle(ahead)
    assert len(seen) == made + 1
    ahead.close()
    assert gone()


def test_the_limit_may_grow():
    seen = []
    ahead = Background(counting(100, seen), 2)
    idle(ahead)
    ahead.limit = 10
    idle(ahead)
    assert len(seen) == 10
    ahead.close()


def test_an_exception_comes_where_the_item_would_have_with_its_own_traceback():
    def fails():
        yield 1
        raise KeyError("mine")

    ahead = Background(fails(), 5)
    assert next(ahead) == 1
    gc.collect()  # what other tests left: for the workers of a DataLoader, 5 s are waited
    began = time.monotonic()
    with pytest.raises(KeyError, match="mine") as caught:
        next(ahead)
    assert time.monotonic() - began < 1
    assert "in fails" in "".join(traceback.format_tb(caught.value.__traceback__))
    with pytest.raises(StopIteration):
        next(ahead)
    assert gone()


def test_after_a_stop_the_source_can_be_read_on():
    source = counting(100)
    ahead = Background(source, 5)
    read = [next(ahead)]
    ahead.stop()
    read += list(ahead)
    assert len(read) < 100
    assert read + list(source) == list(range(100))


def test_a_reader_that_is_dropped_ends_the_thread():
    ahead = Background(counting(10**9), 2)
    next(ahead)
    assert len(threads()) == 1
    del ahead
    gc.collect()
    assert gone()


def test_an_idle_thread_holds_no_item():
    class Item:
        pass

    def items():
        while True:
            yield Item()

    ahead = Background(items(), 1)
    idle(ahead)
    taken = next(ahead)
    idle(ahead)
    assert not [holder for holder in gc.get_referrers(taken) if type(holder).__name__ == "frame"]
    ahead.close()


def test_a_paused_thread_makes_nothing():
    pause, seen = Pause(), []
    ahead = Background(counting(100, seen), 2, pause=pause)
    idle(ahead)
    with pause.paused():
        found = [next(ahead), next(ahead)]  # what is ready
        with pytest.raises(LoaderError, match=r"found next\(\) within paused"):
            next(ahead)
        assert seen == found == [0, 1]
    assert found + list(ahead) == list(range(100))


def test_a_pause_waits_for_work_that_has_begun():
    pause, go, works, order = Pause(), threading.Event(), threading.Event(), []

    def work():
        with pause.working():
            works.set()
            go.wait(20)
            order.append("worked")

    def wait():
        with pause.paused():
            order.append("paused")

    worker = threading.Thread(target=work)
    worker.start()
    assert works.wait(20)
    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: pause._paused_by)
    go.set()
    for thread in (worker, waiting):
        thread.join(20)
    assert order == ["worked", "paused"]
