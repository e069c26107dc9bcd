"""Memory straight from the system: what the kernel is told about it, and the thread that gives it back."""

import mmap
import os
import queue
import threading
import weakref

import pytest

from memfeed.system import threads
from memfeed.transfer import page_locked as pages
from support import wait_until

DONTFORK, HUGEPAGE = getattr(mmap, "MADV_DONTFORK", None), getattr(mmap, "MADV_HUGEPAGE", None)


@pytest.mark.skipif(None in (DONTFORK, HUGEPAGE), reason="the system has no such advice")
@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (4096, [DONTFORK]),
        (pages.HUGE_PAGES_FROM, [DONTFORK, HUGEPAGE]),
        (9 << 20, [DONTFORK, HUGEPAGE]),
    ],
)
def test_large_memory_asks_for_huge_pages_and_none_is_for_forked_children(monkeypatch, nbytes, expected):
    libc, advised = pages.LIBC, []

    class Recorded:
        mmap, munmap = libc.mmap, libc.munmap

        @staticmethod
        def madvise(address, length, advice):
            libc.madvise(address, length, advice)
            advised.append((address.value, length.value, advice))

    monkeypatch.setattr(pages, "LIBC", Recorded)
    address = pages.map_pages(nbytes)
    pages.unmap_pages(address, nbytes)
    assert advised == [(address, nbytes, advice) for advice in expected]


def test_the_thread_gives_back_what_it_has_and_ends_before_the_interpreter(monkeypatch):
    """Within CUDA it would abort a process that ends."""
    begun, goes_on, given_back = threading.Event(), threading.Event(), []

    def give_back(retired):
        begun.set()
        assert goes_on.wait(20)
        given_back.append(retired.address)

    monkeypatch.setattr(pages, "_give_back", give_back)
    monkeypatch.setattr(pages, "_thread", None)
    monkeypatch.setattr(pages, "_retired", queue.SimpleQueue())
    monkeypatch.setattr(threads, "_work", weakref.WeakSet())
    pages._start_thread()
    pages._retire(pages._Retired(1, 4096, None), os.getpid())
    assert begun.wait(20)
    pages._retire(pages._Retired(2, 4096, None), os.getpid())
    threading.Timer(0.1, goes_on.set).start()
    threads.end_all()
    assert given_back == [1, 2]
    assert not pages._thread.is_alive()
    pages._retire(pages._Retired(3, 4096, None), os.getpid())  # the end of the process gives it back
    assert pages._retired.empty()
    threads.end_all()
    threads.end_all()
    pages._start_thread()  # a thread of the user that still runs at the end may make a loader
    pages._retire(pages._Retired(4, 4096, None), os.getpid())
    wait_until(lambda: given_back == [1, 2, 4])
    assert pages._thread.is_alive()
    threads.end_all()
