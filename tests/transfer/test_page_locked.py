"""Memory straight from the system: what the kernel is told about it."""

import mmap

import pytest

from memfeed.transfer import page_locked as pages

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
