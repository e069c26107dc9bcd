"""Rows of a batch are shared among threads: each once, on at most so many threads, with the caller's modes."""

import os
import threading
import weakref
from collections import deque
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfeed.system import openmp
from memfeed.system.share import HEAVY_PARTS, Threads, _Job, share
from support import wait_until

pytestmark = pytest.mark.skipif(not openmp.can_limit(), reason="torch has no OpenMP here")


@settings(max_examples=60)
@given(rows=st.integers(0, 300), least=st.integers(1, 50), threads=st.integers(1, 5))
def test_each_row_is_done_once(rows, least, threads):
    done, sizes = torch.zeros(rows, dtype=torch.int64), []

    def add(begin, end):
        sizes.append(end - begin)
        done[begin:end] += 1

    with Threads(threads).in_use():
        share(rows, add, least=least)
    assert bool((done == 1).all())
    assert min(sizes) >= min(least, rows)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_so_many_threads_work_at_the_same_time(threads):
    working, all_there = set(), threading.Barrier(threads)

    def work(begin, end):
        me = threading.get_ident()
        if me not in working:
            working.add(me)
            all_there.wait(10)

    with Threads(threads).in_use():
        share(40, work)
    assert len(working) == threads


def test_parts_use_one_thread_of_torch_and_the_callers_modes():
    found, both = set(), threading.Barrier(2)

    def look(begin, end):
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        found.add((threading.get_ident(), torch.get_num_threads(), *modes))
        both.wait(10)

    before = torch.get_num_threads()
    with Threads(2).in_use(), torch.inference_mode():
        share(2, look)
    assert {seen[1:] for seen in found} == {(1, True, False)}
    assert len(found) == 2
    assert torch.get_num_threads() == before
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert elsewhere == [before]  # what torch gives to new threads is left alone


@pytest.fixture
def three_threads_of_torch():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_what_torch_shares_takes_as_many_of_its_threads(threads, three_threads_of_torch):
    seen = []

    def look(begin, end):
        seen.append((begin, end, threading.get_ident(), torch.get_num_threads()))

    with Threads(threads).in_use():
        share(40, look, by_torch=True)
    assert torch.get_num_threads() == 3
    assert seen == [(0, 40, threading.get_ident(), threads)]


def test_our_threads_and_torchs_are_measured_apart(monkeypatch, three_threads_of_torch):
    monkeypatch.setattr("memfeed.system.share._most_threads", lambda: 2)
    threads = Threads()
    threads.allow_those_of_torch()
    with threads.in_use():
        share(40, lambda begin, end: None, by_torch=True, kind="gather")
        share(40, lambda begin, end: None, kind="gather")
    assert threads.choice("gather", True) is not threads.choice("gather")
    assert threads.describe() == {"most": 2, "gather": 1}


def test_ours_share_it_where_the_caller_may_not_use_torchs():
    parts = []

    def call():
        openmp.use_one_thread()
        with Threads(2).in_use():
            share(40, lambda begin, end: parts.append((begin, end, torch.get_num_threads())), by_torch=True)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(parts) > 1
    assert {one[2] for one in parts} == {1}


def test_an_exception_is_raised_in_the_caller():
    def work(begin, end):
        raise ValueError(f"row {begin}")

    with Threads(2).in_use(), pytest.raises(ValueError, match="row "):
        share(16, work)


def test_after_an_exception_no_part_is_begun():
    begun = []

    def work(begin, end):
        begun.append(begin)
        raise ValueError("the first")

    job = _Job(deque(pairwise(range(8))), work)
    job.work()
    job.help()
    job.wait()
    assert begun == [0]
    assert str(job.error) == "the first"


def test_a_part_shares_nothing_further():
    callers = []

    def inner(begin, end):
        callers.append((begin, end))

    with Threads(2).in_use():
        share(8, lambda begin, end: share(5, inner))
    assert callers
    assert set(callers) == {(0, 5)}


def test_nothing_is_kept_alive():
    class Buffer:
        pass

    for _ in range(20):
        buffer = Buffer()
        gone = weakref.ref(buffer)
        with Threads(3).in_use():
            share(12, lambda begin, end, held=buffer: None)
        del buffer
        wait_until(lambda gone=gone: gone() is None)


def test_several_threads_share_at_the_same_time():
    totals = [torch.zeros(500, dtype=torch.int64) for _ in range(6)]
    threads = Threads(3)

    def run(total):
        with threads.in_use():
            for _ in range(30):
                share(len(total), lambda begin, end: total[begin:end].add_(1))

    runners = [threading.Thread(target=run, args=(total,)) for total in totals]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    assert all(bool((total == 30).all()) for total in totals)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_has_helpers_of_its_own():
    with Threads(2).in_use():
        share(8, lambda begin, end: None)
        pid = os.fork()
        if not pid:
            done = [0] * 8

            def mark(begin, end):
                done[begin:end] = [1] * (end - begin)

            share(8, mark)
            os._exit(0 if all(done) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_measured_work_says_what_was_chosen():
    threads = Threads()
    threads.allow_those_of_torch()
    with threads.in_use():
        for _ in range(4):
            share(8, lambda begin, end: None, kind="gather")
    described = threads.describe()
    assert set(described) == {"most", "gather"}
    assert 1 <= described["gather"] <= described["most"] <= torch.get_num_threads()


def test_heavy_work_takes_all_threads_and_measures_nothing(monkeypatch):
    threads, parts, seen = Threads(), [], set()
    monkeypatch.setattr("memfeed.system.share._most_threads", lambda: 2)
    threads.allow_those_of_torch()
    both = threading.Barrier(2, timeout=60)

    def work(begin, end):
        if threading.get_ident() not in seen:  # each of the two threads waits for the other one
            seen.add(threading.get_ident())
            both.wait()
        parts.append((begin, end))

    with threads.in_use():
        for _ in range(3):
            parts.clear()
            seen.clear()
            share(64, work, kind="decode", is_heavy=True)
            assert len(seen) == 2
            assert len(parts) == 2 * HEAVY_PARTS
            assert sorted(row for begin, end in parts for row in range(begin, end)) == list(range(64))
    assert threads.describe() == {"most": 2}


def test_one_thread_of_torch_means_one_of_ours():
    before = torch.get_num_threads()
    threads = Threads()
    torch.set_num_threads(1)
    try:
        threads.allow_those_of_torch()
        assert threads.describe() == {"most": 1}
    finally:
        torch.set_num_threads(before)
