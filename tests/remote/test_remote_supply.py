"""A cache that is smaller than its store: what is fetched, what the disk takes, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch

import memfeed
from memfeed.errors import StoreError
from memfeed.order import choice, orders
from memfeed.remote import fetching
from memfeed.remote.opening import LazyRemote
from memfeed.testing import equal
from origin import disk_bytes

pytest.importorskip("obstore")
ROWS, ROW_SHAPE, ROW_BYTES = 2000, (3, 64, 112), 21_504  # no whole number of rows is 4 MiB
SIZE = 0.4


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    images = torch.randint(0, 256, (ROWS, *ROW_SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    columns = {"image": images, "label": torch.arange(ROWS)}
    return memfeed.cache(columns, tmp_path_factory.mktemp("small") / "a.mf", allow="copy", progress=False)


@pytest.fixture(scope="module")
def origin(local, tmp_path_factory):
    address = f"file://{tmp_path_factory.mktemp('remote')}/a.mf"
    memfeed.push(local, address)
    return address


@pytest.fixture
def fetched(monkeypatch):
    """Return the requests for columns: the file, the first byte and how many."""
    read, found = LazyRemote.read, list[tuple[str, int, int]]()

    def counted(self, name, first, size, accept=None):
        found.append((name, first, size))
        return read(self, name, first, size, accept)

    monkeypatch.setattr(LazyRemote, "read", counted)
    return found


@pytest.fixture
def two_blocks(monkeypatch):
    """Let an order in blocks mix 2 of them, and not 128: the cache has room for four chunks."""
    monkeypatch.setattr(orders, "WINDOW_BLOCKS", 2)
    monkeypatch.setattr(choice, "WINDOW_BLOCKS", 2)


def open_small(origin, local, cache):
    size = int(SIZE * local.nbytes)
    return memfeed.open(origin, cache_dir=cache, size=size), size


def block_loaders(stores, **options):
    return [memfeed.Loader(one, 16, shuffle=memfeed.Blocks(192), seed=1, **options) for one in stores]


@pytest.mark.usefixtures("two_blocks")
def test_by_blocks_each_chunk_comes_once_an_epoch(local, origin, tmp_path, fetched):
    store, size = open_small(origin, local, tmp_path / "cache")
    assert store._backing.chunk_rows == 192
    loaders = block_loaders([store, local])
    step = store._view.supply.directory.table.steps["image.memmap"]
    assert step == store._backing.chunk_rows * ROW_BYTES
    for _ in range(2):
        fetched.clear()
        for mine, theirs in zip(*loaders, strict=True):
            assert equal(mine, theirs)
            assert disk_bytes(tmp_path / "cache") <= size * 1.05
        chunks = Counter(
            at // step
            for name, first, count in fetched
            if name == "image.memmap"
            for at in range(first, first + count, step)
        )
        assert set(chunks.values()) <= {1}
    assert store.progress().present < ROWS


def test_rows_come_in_order_through_a_cache_of_a_few_chunks(local, origin, tmp_path):
    size = 10 << 20
    store = memfeed.open(origin, cache_dir=tmp_path / "cache", size=size)
    for mine, theirs in zip(memfeed.Loader(store, 16), memfeed.Loader(local, 16), strict=True):
        assert equal(mine, theirs)
        assert disk_bytes(tmp_path / "cache") <= size * 1.05


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"shuffle": True},
            r"a cache of 17.* MB for an order that mixes all rows; .* \([\d,]+ bytes\): shuffle=memfeed\.Blocks\(\)",
        ),
        ({"shuffle": memfeed.Blocks(8)}, "mixes all rows"),  # each chunk would come again for each of its blocks
        ({"shuffle": memfeed.Blocks(192)}, r"mixes 384 rows; expected room for 33.* MB \(.* bytes\): a larger size="),
        ({"sampler": [1, 2, 3]}, "mixes all rows"),
    ],
)
def test_an_order_that_needs_more_room_is_refused(local, origin, tmp_path, two_blocks, monkeypatch, options, says):
    if "384" in says:
        monkeypatch.setattr("memfeed.remote.remote_supply.ROOM_FACTOR", 4)
    store, _ = open_small(origin, local, tmp_path / "cache")
    with pytest.raises(StoreError, match=says):
        memfeed.Loader(store, 16, **options)


def test_rows_that_have_no_room_at_once_are_refused(local, origin, tmp_path):
    store, _ = open_small(origin, local, tmp_path / "cache")
    with pytest.raises(StoreError, match=r"found a cache of .* lie in chunks of 43.* MB; expected .* read fewer rows"):
        _ = store[:]
    rows = list(range(0, ROWS, 700))
    assert equal(store[rows], local[rows])
    with pytest.raises(StoreError, match="leave size= out"):
        store.finish()


@pytest.mark.parametrize("is_small", [True, False])
def test_rows_that_are_there_are_known_without_fetching(local, origin, tmp_path, fetched, is_small):
    size = int(SIZE * local.nbytes) if is_small else None
    store = memfeed.open(origin, cache_dir=tmp_path / "cache", size=size)
    _ = store[0]
    fetched.clear()
    supply = store._view.supply
    with store._view.present_now(np.array([0, 1, 1999])) as there:
        assert there.tolist() == [True, True, False]
        assert bool(supply._kept) == is_small
    assert not supply._kept
    assert fetched == []


def test_chunks_that_are_read_stay_until_the_reader_goes_on(local, origin, tmp_path):
    """Rows of all other chunks are read meanwhile, which need all of the room that is left."""
    store, size = open_small(origin, local, tmp_path / "cache")
    rows = np.array([0, 5, 191])
    with store._view.present(rows):
        for at in range(200, ROWS, 192):
            assert equal(store[at], local[at])
        mapped = store._view.columns[0].data[rows].clone()
    assert torch.equal(mapped, local.column("image")[rows])
    assert disk_bytes(tmp_path / "cache") <= size * 1.05


def test_a_cache_that_other_readers_fill_is_an_error_and_no_hang(local, origin, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "ROOM_SECONDS", 0.3)
    store, _ = open_small(origin, local, tmp_path / "cache")
    message = "all in use by readers that wait for more rows"
    with store._view.present(np.arange(0, 4 * 192, 192)), pytest.raises(StoreError, match=message):
        _ = store[ROWS - 1]
    assert equal(store[ROWS - 1], local[ROWS - 1])


@pytest.mark.usefixtures("two_blocks")
def test_two_loaders_read_one_cache(local, origin, tmp_path):
    store, _ = open_small(origin, local, tmp_path / "cache")
    for mine, also, theirs in zip(*block_loaders([store, store, local]), strict=True):
        assert equal(mine, theirs)
        assert equal(also, theirs)


@pytest.mark.usefixtures("two_blocks")
def test_an_epoch_goes_on_from_where_it_was(local, origin, tmp_path):
    store, size = open_small(origin, local, tmp_path / "cache")
    loader, expected = block_loaders([store, local])
    want = list(expected)
    batches = iter(loader)
    got = [next(batches) for _ in range(9)]
    state = loader.state_dict()
    del batches, loader, store
    (again,) = block_loaders([memfeed.open(origin, cache_dir=tmp_path / "cache", size=size)])
    again.load_state_dict(state)
    got += list(again)
    assert all(equal(a, b) for a, b in zip(got, want, strict=True))


RANK = """
import os, signal, sys, memfeed
from memfeed.order import choice, orders
from memfeed.testing import equal
choice.WINDOW_BLOCKS = orders.WINDOW_BLOCKS = 2
origin, cache, size, local, rank, dies = sys.argv[1:]
stores = memfeed.open(origin, cache_dir=cache, size=int(size)), memfeed.open(local)
loaders = [memfeed.Loader(one, 16, shuffle=memfeed.Blocks(192), seed=1, ranks=(int(rank), 2)) for one in stores]
for _ in range(2):
    for at, (mine, theirs) in enumerate(zip(*loaders, strict=True)):
        assert equal(mine, theirs)
        if dies == "yes" and at == 9:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_two_ranks_share_it_also_when_one_is_killed(local, origin, tmp_path):
    size = int(SIZE * local.nbytes)

    def run(rank, dies):
        command = [sys.executable, "-c", RANK, origin, tmp_path / "cache", size, local.path, rank, dies]
        paths = os.pathsep.join(sys.path)
        return subprocess.Popen([str(one) for one in command], env={**os.environ, "PYTHONPATH": paths})

    ranks = [run(0, "no"), run(1, "yes")]
    assert [rank.wait(300) for rank in ranks] == [0, -signal.SIGKILL]
    assert run(1, "no").wait(300) == 0
    assert disk_bytes(tmp_path / "cache") <= size * 1.05
