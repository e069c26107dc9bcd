"""Threads that the system does not give, and work that ends before the interpreter does."""

import multiprocessing
import subprocess
import sys
import threading
import time

import pytest

from memfeed.system import threads


def failing(message):
    class Thread(threading.Thread):
        def start(self):
            raise RuntimeError(message)

    return Thread(target=lambda: None)


def test_a_thread_that_the_system_does_not_give_is_no_error():
    assert threads.started(failing("can't start new thread")) is False


def test_another_error_of_a_thread_is_raised():
    with pytest.raises(RuntimeError, match="once"):
        threads.started(failing("threads can only be started once"))
    assert not threads.has_no_thread(ValueError("can't start new thread"))


def test_a_thread_is_started():
    ran = threading.Event()
    thread = threading.Thread(target=ran.set)
    assert threads.started(thread)
    thread.join()
    assert ran.is_set()


def test_all_work_is_released_before_any_is_waited_for(monkeypatch):
    monkeypatch.setattr(threads, "_work", set())
    calls = []

    class Work:
        def release(self, *, at_exit=False):
            calls.append("release")

        def join(self):
            calls.append("join")

    for _ in range(2):
        threads.end_at_exit(Work())
    threads.end_all()
    assert calls == ["release", "release", "join", "join"]


def test_a_thread_is_waited_for_that_frees_its_own_work():
    """Its weak references are dead by then, and what it holds, such as open files, is not closed yet."""
    freeing, freed = threading.Event(), []

    class Held:
        def __del__(self):
            freeing.set()
            time.sleep(0.3)
            freed.append(self)

    class Work:
        def __init__(self):
            self.held = Held()

        def run(self):
            go.wait()

    go, work = threading.Event(), Work()
    thread = threading.Thread(target=work.run, daemon=True)
    threads.end_at_exit(work, thread)
    thread.start()
    del work
    go.set()
    assert freeing.wait(5)
    threads.end_all()
    assert freed


def test_work_ends_while_pools_of_threads_still_take_tasks():
    code = """
from concurrent.futures import ThreadPoolExecutor
from memfeed.system.threads import end_at_exit

class Work:
    pool = ThreadPoolExecutor(1)

    def release(self, *, at_exit=False):
        print("release", flush=True)

    def join(self):
        print(self.pool.submit(lambda: "join").result(), flush=True)

work = Work()
end_at_exit(work)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.split()) == (0, ["release", "join"]), ended.stderr


class AtItsEnd:
    """Work that needs a child of its process, as the commit of a store that is being filled needs a worker."""

    def __init__(self, told):
        self.told, self.child = told, multiprocessing.get_context("fork").Process(target=time.sleep, args=[60])
        self.child.daemon = True
        self.child.start()

    def release(self, *, at_exit=False):
        pass

    def join(self):
        self.told.put(self.child.is_alive())


def work_to_the_end(told):
    global kept
    kept = AtItsEnd(told)
    threads.end_at_exit(kept)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_of_multiprocessing_ends_its_work_before_its_children(method):
    context = multiprocessing.get_context(method)
    told = context.SimpleQueue()
    process = context.Process(target=work_to_the_end, args=[told])
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert not told.empty()
    assert told.get(), "its child was ended first"


def test_a_forked_child_ends_no_work_of_its_parent():
    code = """
import multiprocessing, os
from memfeed.system.threads import end_at_exit

class Work:
    pid = os.getpid()

    def release(self, *, at_exit=False):
        assert os.getpid() == self.pid

    def join(self):
        pass

work = Work()
end_at_exit(work)
child = multiprocessing.get_context("fork").Process(target=int)
child.start()
child.join()
print(child.exitcode)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n"
