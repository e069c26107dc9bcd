import io
import os
import sys
import threading
import time

import pytest
from tqdm.std import TqdmDefaultWriteLock

import memfeed
from memfeed.system import progress
from memfeed.system.progress import Progress


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [lambda: None, Full, closed], ids=["absent", "full", "closed"])
def test_stderr_does_not_decide_what_happens(tmp_path, monkeypatch, make):
    monkeypatch.setattr(sys, "stderr", make())
    store = memfeed.cache(list(range(100)), tmp_path / "s.mf")
    assert store[99] == 99
    memfeed.repair(list(range(100)), tmp_path / "s.mf")
    store.to("cpu")


def draw():
    with Progress("store", 4, unit=" rows", shown=True) as bar:
        bar.advance(4)
        bar.say("a line")


def must_draw_in_another_thread():
    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_a_bar_that_failed_stops_no_other_thread(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", Full())
        draw()
    must_draw_in_another_thread()


def test_a_process_that_was_killed_while_it_drew_stops_no_other():
    TqdmDefaultWriteLock()
    with TqdmDefaultWriteLock.mp_lock:  # for another thread it is held, as for other processes
        must_draw_in_another_thread()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_draws_although_a_thread_of_its_parent_did():
    held, forked = threading.Event(), threading.Event()

    def hold():
        with progress._Bar.get_lock():
            held.set()
            forked.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if progress._Bar.get_lock().acquire(timeout=20) else 1)
    forked.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_the_clock_may_be_set_meanwhile(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("store", 4, unit=" rows", shown=True) as bar:
        monkeypatch.setattr(time, "time", lambda: 0.0)
        bar._bar.mininterval = 0
        bar.advance(4)
    shown = stream.getvalue()
    assert "4.00/4.00" in shown
    assert "[00:00<" in shown
    assert "-" not in shown


def test_a_fast_copy_draws_no_bar(monkeypatch, tmp_path):
    stream = io.StringIO()
    store = memfeed.cache(list(range(10)), tmp_path / "s.mf", progress=False)
    monkeypatch.setattr(sys, "stderr", stream)
    store.to("cpu")
    assert stream.getvalue() == ""
