import io
import sys
import time

import pytest

import memfeed
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
    memfeed.cache(list(range(100)), tmp_path / "s.mf", repair=True)
    store.to("cpu")


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
