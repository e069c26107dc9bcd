"""SIGTERM: who is asked, what is unwound, and which handler stands there afterwards."""

import functools
import multiprocessing
import os
import signal
import sys
import threading

import pytest

import memfeed
from memfeed.system.signals import Terminated, defer_signals, is_of_handler, sigterm_unwinds
from torture.victims import Logged, compared, ended, left_behind, presence, reads, start, wait_for

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


@pytest.fixture(autouse=True)
def _handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_handler_of_the_users_is_asked_and_stays():
    asked = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    users = signal.getsignal(signal.SIGTERM)
    with sigterm_unwinds() as outer, sigterm_unwinds() as inner:
        signal.raise_signal(signal.SIGTERM)
        assert (outer.received, outer.terminates, inner.received, inner.terminates) == (True, False, True, False)
    assert asked == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is users


def test_blocks_may_end_in_any_order():
    first, second = sigterm_unwinds(), sigterm_unwinds()
    first.__enter__()
    sigterm = second.__enter__()
    first.__exit__(None, None, None)
    with pytest.raises(Terminated):
        signal.raise_signal(signal.SIGTERM)
    assert sigterm.terminates
    sigterm.received = False  # else this process would end now
    second.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_that_came_within_the_block_stays():
    with sigterm_unwinds():
        signal.signal(signal.SIGTERM, users := lambda number, frame: None)
    assert signal.getsignal(signal.SIGTERM) is users


@pytest.mark.parametrize("ignored", [False, True])
def test_nothing_is_changed_in_other_threads_or_where_it_is_ignored(ignored):
    if ignored:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    before, seen = signal.getsignal(signal.SIGTERM), []

    def look():
        with sigterm_unwinds():
            seen.append(signal.getsignal(signal.SIGTERM))

    if ignored:
        look()
    else:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [before]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_wait_where_they_would_tear_something(number):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    done = []
    try:
        with pytest.raises((KeyboardInterrupt, Terminated)), sigterm_unwinds() as sigterm:
            try:
                with defer_signals():
                    signal.raise_signal(number)
                    done.append(number)
                done.append("not reached")
            finally:
                sigterm.received = False  # else this process would end now
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == [number]


def test_held_back_a_second_signal_waits_no_more_and_none_is_lost():
    calls = []
    handlers = {number: lambda number, frame: calls.append(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with defer_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            assert calls == []
            signal.raise_signal(signal.SIGINT)
            assert calls == [signal.SIGINT]
            left = signal.getsignal(signal.SIGINT)
        assert calls == [signal.SIGINT, signal.SIGTERM]
        assert {number: signal.getsignal(number) for number in handlers} == handlers
        signal.signal(signal.SIGINT, left)  # as where an exception came between
        signal.raise_signal(signal.SIGINT)
        assert calls == [signal.SIGINT, signal.SIGTERM, signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handlers[signal.SIGINT]

        def both(number, frame):
            calls.append(-number)
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, both)
        with pytest.raises(KeyboardInterrupt), defer_signals():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
        assert sorted(calls[3:]) == [-signal.SIGINT, signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_death_does_not_hide_what_is_on_its_way(path, monkeypatch):
    """After a Ctrl-C workers die while the builder leaves. The user's handler of SIGCHLD stays, and is called."""
    calls, before = [], signal.getsignal(signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, lambda number, frame: calls.append(number))
    users = signal.getsignal(signal.SIGCHLD)

    def interrupt(build):
        assert signal.getsignal(signal.SIGCHLD) is users
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)
        raise KeyboardInterrupt

    monkeypatch.setattr("memfeed.building.build.Build.sync_if_due", interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            memfeed.cache(Logged(200, path.with_name("log"), 0, 0.001), path, workers=2, progress=False)
        assert calls
        assert signal.getsignal(signal.SIGCHLD) is users
        assert not multiprocessing.active_children()
    finally:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def interrupted_by_its_first_worker(path, dataset):
    """The builder is in the midst of starting three workers."""
    forks, builder = [], os.getpid()
    os.register_at_fork(
        before=lambda: forks.append(1),
        after_in_child=lambda: os.kill(builder, signal.SIGINT) if len(forks) == 1 else None,
    )
    memfeed.cache(dataset, path, workers=3, progress=False)


@linux
def test_an_interrupt_while_workers_start_leaves_nothing_to_wait_for(path):
    child = start(
        path.with_name("stderr"), interrupted_by_its_first_worker, path, Logged(400, path.with_name("log"), 0, 0.001)
    )
    assert ended(child)
    assert child.exitcode == 1, "by KeyboardInterrupt"
    assert not left_behind(child.pid)


def writing(path, dataset, swallow):
    with memfeed.Writer(path) as writer:
        for i in range(len(writer), len(dataset)):
            try:
                writer.append(dataset[i])
            except BaseException:
                if not swallow:
                    raise


@linux
@pytest.mark.parametrize("swallow", [False, True])
def test_a_writer_syncs_what_it_has(path, swallow):
    stderr, log = path.with_name("stderr"), path.with_name("log")
    child = start(stderr, writing, path, Logged(400, log, 0, 0.005), swallow)
    wait_for(lambda: sum(1 for _ in reads(log)) > 60)
    os.kill(child.pid, signal.SIGTERM)
    assert ended(child)
    assert child.exitcode == -signal.SIGTERM
    read, there = sum(1 for _ in reads(log)), presence(path)
    assert (there[: read - 2] == 2).all(), "samples that waited to be written, too"
    writing(path, Logged(400, log, 1, 0.0), False)
    assert compared(path, 400) == {"lost": 0, "wrong": 0}


class Limit:
    def __call__(self, number, frame):
        raise TimeoutError

    def once(self, *given):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self(*given)


@pytest.mark.parametrize("handler", [Limit(), Limit().once, functools.partial(Limit.__call__, None), lambda *_: 1 / 0])
def test_what_a_handler_of_any_kind_raises_is_told(handler):
    signal.signal(signal.SIGTERM, handler)
    with pytest.raises((TimeoutError, ZeroDivisionError)) as caught:
        signal.raise_signal(signal.SIGTERM)
    assert is_of_handler(caught.value)
    with pytest.raises(TimeoutError) as caught:
        Limit()(signal.SIGTERM, None)
    assert not is_of_handler(caught.value)
