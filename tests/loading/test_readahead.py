import gc
import mmap
import os
import shutil
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memfeed
from measure import drop_pages
from memfeed import Blocks, Loader
from memfeed.loading import readahead
from memfeed.loading.readahead import ReadAhead, merged
from memfeed.order.orders import BlockOrder
from memfeed.system import machine, mapped_memory
from support import Made, skip_without_disk

PAGE = mmap.PAGESIZE
pytestmark = pytest.mark.skipif(not readahead.SUPPORTED, reason="needs posix_fadvise and RWF_NOWAIT: Linux")


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 200_000), st.integers(-1, 30_000)), max_size=20))
def test_merged_ranges_cover_every_byte_and_little_else(places):
    starts = np.array([start for start, _ in places], np.int64)
    lengths = np.array([length for _, length in places], np.int64)
    ranges = list(merged(starts, lengths))
    wanted = {page for a, n in places if n > 0 for page in range(a // PAGE, (a + n - 1) // PAGE + 1)}
    told = [page for a, b in ranges for page in range(a // PAGE, (b - 1) // PAGE + 1)]
    assert len(told) == len(set(told)), "nothing is told twice"
    assert wanted <= set(told)
    assert all(page in wanted or (page - 1 in wanted and page + 1 in wanted) for page in told)
    assert ranges == sorted(ranges)


@pytest.fixture
def images(path):
    rows = torch.randint(0, 256, (300, 3, 64, 64), dtype=torch.uint8)
    memfeed.cache((rows, torch.arange(300)), path, progress=False)
    return path


def chill(path):
    """The store, no file of it in the page cache. Nobody may have it mapped."""
    skip_without_disk(path)
    drop_pages(path)
    return memfeed.open(path)


@pytest.fixture
def never_cached(monkeypatch):
    """All rows look cold, wherever they are."""
    monkeypatch.setattr(ReadAhead, "_is_cached", lambda *_: False)


def test_cold_rows_are_found_and_warm_ones_too(images):
    every, store = np.arange(300), chill(images)
    address = store.column(0).data_ptr()
    assert not mapped_memory.in_page_cache(address)
    reader = ReadAhead(store._view.columns, order_covers=False)
    assert reader.begin(every)
    assert reader.announce(every) == 300 * (3 * 64 * 64 + 8)
    assert len(store[:][1]) == 300
    assert mapped_memory.in_page_cache(address)
    assert not reader.begin(every)
    assert reader.has_arrived(every)


def test_columns_in_memory_are_never_cold():
    loader = Loader((torch.rand(100, 1000), torch.arange(100)), 10)
    list(loader)
    assert loader.stats()["cold"] is False
    assert loader.stats()["plan"]["read_ahead"] == "off"


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True, "seed": 0},
        {"shuffle": Blocks(8), "seed": 0},
        {},
        {"shuffle": True, "seed": 0, "prefetch_factor": 0},
        {"sampler": list(range(0, 300, 3))},
        {"batch_sampler": [[1, 2, 3], [299, 4]]},
    ],
    ids=str,
)
@pytest.mark.usefixtures("never_cached")
def test_a_cold_epoch_gives_what_a_warm_one_gives(images, options):
    options = options if "batch_sampler" in options else {"batch_size": 16, **options}
    warm = list(Loader(memfeed.open(images), **options))
    loader = Loader(memfeed.open(images), **options)
    cold = list(loader)
    assert loader.stats()["cold"] is True
    assert loader.stats()["plan"]["read_ahead"] == "on"
    assert len(cold) == len(warm)
    for (a, b), (c, d) in zip(cold, warm, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)


@pytest.mark.usefixtures("never_cached")
def test_a_cold_epoch_of_ragged_rows(path):
    samples = [{"x": torch.full((i * 50,), i, dtype=torch.int32), "t": f"text {i}"} for i in range(200)]
    warm = list(Loader(memfeed.cache(Made(samples), path, progress=False), 8, shuffle=True, seed=0))
    store = memfeed.open(path)
    loader = Loader(store, 8, shuffle=True, seed=0)
    for mine, other in zip(loader, warm, strict=True):
        assert mine["t"] == other["t"]
        assert all(torch.equal(a, b) for a, b in zip(mine["x"].unbind(), other["x"].unbind(), strict=True))
    assert loader.stats()["cold"] is True


def test_a_store_that_was_removed_while_it_is_read(path):
    samples = [{"x": torch.full((i * 50,), i, dtype=torch.int32), "t": f"text {i}"} for i in range(50)]
    loader = Loader(memfeed.cache(Made(samples), path, progress=False), 8)
    before = [batch["t"] for batch in loader]
    readers = [ReadAhead(loader.store._view.columns, order_covers=covers) for covers in (False, True)]
    shutil.rmtree(path)
    assert [batch["t"] for batch in loader] == before
    for reader in readers:
        reader._plan()
        reader.announce(np.arange(50))


@pytest.mark.usefixtures("never_cached")
def test_a_break_ends_the_thread_that_reads_ahead(images):
    loader = Loader(memfeed.open(images), 4, shuffle=True, seed=0)
    for _ in loader:
        break
    for thread in threading.enumerate():
        if thread.name == "memfeed":
            thread.join(2)
            assert not thread.is_alive()


@pytest.mark.usefixtures("never_cached")
def test_descriptors_are_closed_with_the_loader(images):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        loader = Loader(memfeed.open(images), 64, shuffle=True, seed=0)
        list(loader)
        assert loader.stats()["cold"]
        del loader
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.usefixtures("never_cached")
def test_a_damaged_row_met_while_reading_ahead_reaches_the_caller(path):
    memfeed.cache(Made([torch.zeros(500 + i) for i in range(300)]), path, progress=False)
    start = path / "value" / "start.memmap"
    start.chmod(0o644)
    numbers = np.fromfile(start, np.int64)
    numbers[250] = 1 << 40
    numbers.tofile(start)
    loader = Loader(memfeed.open(path), 16)
    with pytest.raises(memfeed.errors.CorruptStoreError, match="found row 250 of field value"):
        list(loader)
    start.chmod(0o644)
    numbers[250] = 0
    numbers.tofile(start)
    assert len(list(loader)) == len(loader)


# --- more than fits


@pytest.mark.usefixtures("never_cached")
def test_what_an_order_has_passed_leaves_the_page_cache(images, monkeypatch):
    monkeypatch.setattr(machine, "memory_limit", lambda: 1000)
    dropped = []
    page_out = mapped_memory.page_out
    monkeypatch.setattr(readahead, "page_out", lambda address, size: (dropped.append(size), page_out(address, size)))
    for options in ({}, {"shuffle": Blocks(8), "seed": 0}):
        dropped.clear()
        batches = list(Loader(memfeed.open(images), 16, **options))
        assert sum(len(b[1]) for b in batches) == 300
        assert sum(dropped) == 300 * (3 * 64 * 64 + 8)
    dropped.clear()
    list(Loader(memfeed.open(images), 16, shuffle=True, seed=0))
    assert not dropped, "rows come from anywhere: their neighbours may be next"


def test_pages_really_leave_and_private_changes_stay(images):
    store = chill(images)
    column = store.column(0)
    column[5] = 7
    column.sum()
    for _ in range(8):
        mapped_memory.page_out(column.data_ptr(), column.nbytes)
        if ReadAhead(store.select(0)._view.columns, order_covers=False).begin(np.arange(100, 300)):
            break
    else:
        raise AssertionError("the pages never left")
    assert (column[5] == 7).all()


def test_blocks_say_what_has_passed_in_rows_of_the_store():
    assert BlockOrder(10, 0, 0, 4).passed(0, 10) == [(0, 4), (4, 8), (8, 10)]
