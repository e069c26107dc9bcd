import io
import os
import sys
import threading
import time
import types

import pytest
from tqdm.std import TqdmDefaultWriteLock

import memfeed
from memfeed.system import progress
from memfeed.system.progress import Progress, is_shown


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("shown", [None, True])
@pytest.mark.parametrize("make", [lambda: None, Full, closed], ids=["absent", "full", "closed"])
def test_stderr_does_not_decide_what_happens(tmp_path, monkeypatch, make, shown):
    monkeypatch.setattr(sys, "stderr", make())
    store = memfeed.cache(list(range(100)), tmp_path / "s.mf", progress=shown)
    assert store[99] == 99
    memfeed.repair(list(range(100)), tmp_path / "s.mf", progress=shown)
    store.to("cpu", progress=shown)
    store.verify(progress=shown)


@pytest.mark.parametrize("terminal", [False, True])
def test_none_is_for_a_terminal(monkeypatch, terminal):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    assert is_shown(None) is terminal
    assert is_shown(True) is True
    assert is_shown(False) is False


@pytest.mark.parametrize("make", [lambda: None, Full, closed, object])
def test_none_is_for_no_other_stream(monkeypatch, make):
    monkeypatch.setattr(sys, "stderr", make())
    assert is_shown(None) is False


@pytest.mark.parametrize(
    ("shell", "is_notebook"),
    [({"IPKernelApp": {}}, True), ({"TerminalIPythonApp": {}}, False), (None, False)],
    ids=["notebook", "ipython", "no shell"],
)
def test_none_is_for_a_notebook_too(monkeypatch, shell, is_notebook):
    made = shell if shell is None else types.SimpleNamespace(config=shell)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: made))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert is_shown(None) is is_notebook


@pytest.mark.parametrize("value", [0, 1, "no", []])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match=r"expected True \(show a bar\), False \(show none\), or None"):
        is_shown(value)


@pytest.mark.parametrize(("shown", "lines"), [(None, 1), (True, 1), (False, 0)])
def test_lines_are_printed_unless_it_is_false(monkeypatch, shown, lines):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("store", 4, unit=" rows", progress=shown) as bar:
        bar.say("a line")
    assert stream.getvalue().count("a line\n") == lines
    assert ("store: " in stream.getvalue()) == (shown is True)


@pytest.mark.parametrize(("shown", "appears"), [(None, False), (True, True)])
def test_a_bar_that_is_asked_for_appears_without_delay(monkeypatch, shown, appears):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("store", None, unit=" rows", progress=shown, delay_seconds=600) as bar:
        bar.advance_to(1, 4)
    assert ("1.00/4.00" in stream.getvalue()) == appears


def draw():
    with Progress("store", 4, unit=" rows", progress=True) as bar:
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
    with Progress("store", 4, unit=" rows", progress=True) as bar:
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
