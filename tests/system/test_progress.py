import io
import os
import sys
import threading
import time
import types

import pytest
import torch
from tqdm.std import TqdmDefaultWriteLock

import memfeed
from forked_programs import Program
from memfeed.system import progress
from memfeed.system.progress import Progress, is_shown
from support import Made


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


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_that_failed_stops_no_other_thread(monkeypatch, terminal):
    with monkeypatch.context() as patched:
        stream = Full()
        patched.setattr(stream, "isatty", lambda: terminal)
        patched.setattr(sys, "stderr", stream)
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
    monkeypatch.setattr(stream, "isatty", lambda: True)
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


# --- files and pipes


def new_pipe(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def tenths(text):
    """Return the percentages of the lines of bars, which must be lines without codes for a terminal."""
    assert text.isascii()
    assert all(line.isprintable() for line in text.splitlines())
    assert "\r" not in text
    assert text.endswith("\n")
    return [int(line.split(":")[1].split("%")[0]) for line in text.splitlines() if "%" in line]


def test_a_pipe_gets_a_line_for_each_tenth(monkeypatch):
    pipe = new_pipe(monkeypatch)
    with Progress("store", 1000, unit=" rows", progress=True) as bar:
        for _ in range(1000):
            bar.advance(1, 2000)
    assert tenths(pipe.getvalue()) == [*range(10, 101, 10)]
    last = pipe.getvalue().splitlines()[-1]
    assert last.startswith("store: 100% 1.00k/1.00k rows [00:00<00:00, ")
    assert last.endswith(" rows/s, 2.0 MB]")


def test_large_steps_give_fewer_lines_and_what_was_done_before_gives_none(monkeypatch):
    pipe = new_pipe(monkeypatch)
    with Progress("store", 10, unit=" rows", progress=True, done=4) as bar:
        bar.advance(1)
        bar.advance(3)
    assert tenths(pipe.getvalue()) == [50, 80]


def test_the_end_is_said_once(monkeypatch):
    pipe = new_pipe(monkeypatch)
    with pytest.raises(ValueError, match="stop"), Progress("store", 100, unit="B", progress=True) as bar:
        bar.advance(34)
        bar.advance(3)
        raise ValueError("stop")
    assert tenths(pipe.getvalue()) == [34, 37]


def test_a_total_may_be_known_late(monkeypatch):
    pipe = new_pipe(monkeypatch)
    with Progress("store", None, unit="B", progress=True) as bar:
        for done in range(0, 101, 5):
            bar.advance_to(done, 100)
    assert tenths(pipe.getvalue()) == [*range(10, 101, 10)]


def test_without_a_total_there_is_a_line_now_and_then(monkeypatch):
    pipe = new_pipe(monkeypatch)
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Progress("store", None, unit=" rows", progress=True) as bar:
        for _ in range(100):
            now[0] += 1.0
            bar.advance(3)
    assert pipe.getvalue().splitlines() == [
        "store: 90.0 rows [00:30, 3.00 rows/s]",
        "store: 180 rows [01:00, 3.00 rows/s]",
        "store: 270 rows [01:30, 3.00 rows/s]",
        "store: 300 rows [01:40, 3.00 rows/s]",
    ]


class Rows(Made):
    def __init__(self, n=400):
        super().__init__(lambda i: {"x": torch.full((200,), i), "y": i}, n)


def test_every_bar_is_lines_in_a_pipe(tmp_path, monkeypatch):
    """Caching, filling, appending, joining, recoding, verifying, repairing and copies to a device."""
    pipe = new_pipe(monkeypatch)

    def shown(title, action, *, many=True):
        pipe.seek(0)
        pipe.truncate()
        action()
        lines = [line for line in pipe.getvalue().splitlines() if line.startswith(f"{title}: ")]
        found = tenths("".join(f"{line}\n" for line in lines))
        assert "\r" not in pipe.getvalue()
        assert found == sorted({*found})
        assert found[-1] == 100
        assert len(found) <= 12
        assert len(found) > 2 or not many

    path = tmp_path / "a.mf"
    shown("a.mf", lambda: memfeed.cache(Rows(), path, workers=0, progress=True))
    shown("b.mf", lambda: memfeed.cache(Rows(), tmp_path / "b.mf", workers=0, progress=True, lazily=True).finish(),
          many=False)  # fmt: skip
    shown("c.mf", lambda: memfeed.recode(path, tmp_path / "c.mf", {"x": "zstd"}, progress=True), many=False)
    shown("d.mf", lambda: memfeed.concat([path, path], tmp_path / "d.mf", progress=True), many=False)
    shown("a.mf", lambda: memfeed.open(path).verify(progress=True), many=False)
    shown("a.mf", lambda: memfeed.repair(Rows(), path, progress=True), many=False)
    shown("a.mf to cpu", lambda: memfeed.open(path).to("cpu", progress=True), many=False)
    shown("a.mf", lambda: memfeed.append(path, Rows(), progress=True, workers=0), many=False)


def test_push_and_pull_are_lines_in_a_pipe(tmp_path, monkeypatch):
    pipe = new_pipe(monkeypatch)
    pytest.importorskip("obstore")
    store = memfeed.cache(Rows(), tmp_path / "a.mf", workers=0, progress=False)
    address = f"file://{tmp_path}/far/a.mf"
    memfeed.push(store, address, progress=True)
    memfeed.pull(address, tmp_path / "b.mf", progress=True)
    assert tenths(pipe.getvalue())[-1] == 100
    assert {line.split(":")[0] for line in pipe.getvalue().splitlines() if "%" in line} == {"push a.mf", "pull a.mf"}


def test_a_program_without_a_terminal_gets_lines(tmp_path):
    code = (
        "import memfeed, torch; "
        f"memfeed.cache(torch.arange(4000.0).reshape(400, 10), {str(tmp_path / 'a.mf')!r}, progress=True, allow='copy')"
    )
    program = Program(code, at=tmp_path)  # its errors go to a file, which is no terminal either
    assert program.wait() == 0, program.err.read_text()
    assert "\r" not in program.err.read_text()
    assert "a.mf: 100% " in program.err.read_text()
