"""The cache of a store to which rows were appended, at its address: what it has of the older rows is kept."""

import contextlib
import errno
import pickle
import shutil
import sys

import pytest

import memfeed
from disk import Faults
from memfeed.errors import MemfeedError, StoreError
from memfeed.remote import caches
from memfeed.remote.opening import LazyRemote
from memfeed.testing import equal
from origin import ROWS, make, sample

pytest.importorskip("obstore")
MORE = 20


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Return a store and its next generation."""
    old = make(tmp_path_factory.mktemp("growth") / "old.mf")
    shutil.copytree(old.path, old.path.with_name("new.mf"))
    rows = [sample(i) for i in range(ROWS, ROWS + MORE)]
    return old, memfeed.append(old.path.with_name("new.mf"), rows, progress=False)


@pytest.fixture
def address(stores, tmp_path):
    """Return the address at which the older generation is."""
    memfeed.push(stores[0], f"file://{tmp_path}/remote/a.mf")
    return f"file://{tmp_path}/remote/a.mf"


@pytest.fixture
def asked(monkeypatch):
    """Return how many bytes of each file were asked for."""
    read, found = LazyRemote.read, {}

    def counted(self, name, first, size, accept=None):
        found[name] = found.get(name, 0) + size
        return read(self, name, first, size, accept)

    monkeypatch.setattr(LazyRemote, "read", counted)
    return found


@pytest.mark.parametrize("size", [None, "15MB"])
def test_what_was_fetched_is_not_fetched_again(stores, address, asked, tmp_path, size):
    old, new = stores
    rows = 80 if size is None else 20
    store = memfeed.open(address, cache_dir=tmp_path / "cache", size=size)
    assert equal(store[:rows]["image"], old[:rows]["image"])
    del store
    memfeed.push(new, address)
    asked.clear()
    store = memfeed.open(address, cache_dir=tmp_path / "cache", size=size)
    assert len(store) == ROWS + MORE
    if size is None:
        assert equal(store[:80]["image"], new[:80]["image"])
        assert "image.memmap" not in asked
        assert equal(store[:], new[:])
        assert asked["image.memmap"] < new.nbytes - 6 * (1 << 20)
    assert all(equal(store[i], new[i]) for i in range(0, ROWS + MORE, 7))
    assert all(equal(store[i], new[i]) for i in range(ROWS, ROWS + MORE))


def test_a_complete_cache_grows_and_who_reads_it_keeps_its_rows(stores, address, asked, tmp_path):
    old, new = stores
    memfeed.open(address, cache_dir=tmp_path / "cache").finish()
    reader = memfeed.open(address, cache_dir=tmp_path / "cache")
    pickled = pickle.dumps(reader)
    images = reader.column("image")
    memfeed.push(new, address)
    asked.clear()
    with pytest.raises(StoreError, match="pass another cache_dir="):
        memfeed.open(address, cache_dir=tmp_path / "cache", size="9MB")
    store = memfeed.open(address, cache_dir=tmp_path / "cache")
    store.finish()
    assert asked["image.memmap"] < 3 * (4 << 20)
    assert equal(memfeed.open(tmp_path / "cache")[:], new[:])
    assert equal(images, old.column("image"))
    assert equal(reader[:], old[:])
    with pytest.raises(StoreError):
        pickle.loads(pickled)
    memfeed.open(tmp_path / "cache").verify()


def test_a_complete_cache_is_read_without_its_address(stores, address, tmp_path):
    memfeed.open(address, cache_dir=tmp_path / "cache").finish()
    shutil.rmtree(tmp_path / "remote")
    assert equal(memfeed.open(address, cache_dir=tmp_path / "cache")[:], stores[0][:])


def test_a_complete_cache_is_read_without_obstore(stores, address, tmp_path, monkeypatch):
    memfeed.open(address, cache_dir=tmp_path / "cache").finish()
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert equal(memfeed.open(address, cache_dir=tmp_path / "cache")[:], stores[0][:])


def test_another_store_at_the_address_is_refused(stores, address, tmp_path, monkeypatch):
    monkeypatch.setattr(caches, "LEAVE_SECONDS", 0.2)  # nobody leaves
    store = memfeed.open(address, cache_dir=tmp_path / "cache")
    memfeed.push(stores[1], address)
    with pytest.raises(StoreError, match="wait until no other process uses this cache"):  # this one does
        memfeed.open(address, cache_dir=tmp_path / "cache")
    store.finish()
    del store
    columns = [sample(i) for i in range(ROWS + MORE)]  # the same rows, but nobody says that they were appended
    memfeed.push(memfeed.cache(columns, tmp_path / "other.mf", workers=0, progress=False), address)
    with pytest.raises(StoreError, match="was replaced"):
        memfeed.open(address, cache_dir=tmp_path / "cache")
    assert equal(memfeed.open(tmp_path / "cache")[:], stores[0][:])


@pytest.mark.parametrize("size", [None, "15MB"])
def test_it_may_fail_at_any_write(stores, address, tmp_path, size):
    new = stores[1]
    store = memfeed.open(address, cache_dir=tmp_path / "begun", size=size)
    _ = store[: 80 if size is None else 20]
    del store
    memfeed.push(new, address)
    shutil.copytree(tmp_path / "begun", tmp_path / "counted")
    with Faults() as counted:
        _ = memfeed.open(address, cache_dir=tmp_path / "counted", size=size)
    assert len(counted.operations) > 10
    for at in range(0, len(counted.operations), 2):
        cache = tmp_path / f"cache{at}"
        shutil.copytree(tmp_path / "begun", cache)
        with Faults(at, errno.EIO), contextlib.suppress(MemfeedError):
            memfeed.open(address, cache_dir=cache, size=size)
        store = memfeed.open(address, cache_dir=cache, size=size)
        assert all(equal(store[at], new[at]) for at in (0, 50, ROWS - 1, ROWS + 3))
        del store
        shutil.rmtree(cache, ignore_errors=True)  # its threads may be at work still
