from __future__ import annotations

import errno
import gc
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import memfeed
from forked_programs import Program
from memfeed.errors import BuildError, CorruptStoreError, LoaderError, RemoteError, SpaceError, StoreError
from memfeed.remote import caches, opening, remote_supply
from memfeed.remote.directory import CacheDirectory
from memfeed.remote.fetching import LEAST_IN_FLIGHT
from memfeed.remote.opening import LazyRemote
from memfeed.system import files
from memfeed.testing import equal
from origin import ROWS, disk_bytes, upload
from support import wait_until

pytest.importorskip("obstore")


def loaders(stores, shuffle, **options):
    return [memfeed.Loader(store, 16, shuffle=shuffle, seed=3, **options) for store in stores]


def test_every_row_is_that_of_the_local_store(local, origin, cache):
    store = memfeed.open(origin, cache_dir=cache)
    assert len(store) == len(local)
    assert store.progress() == (0, ROWS, 0)
    assert equal(store[3], local[3])
    assert 0 < store.progress().present < ROWS
    assert equal(store[[7, 149, 20]], local[[7, 149, 20]])
    with pytest.raises(StoreError, match="finish"):
        store.column("image")
    store.finish()
    assert store._view.supply is None
    assert equal(store[:], local[:])
    store.verify()
    assert store.digest == local.digest
    # the cache is a store like any other now, and needs no address any more
    assert equal(memfeed.open(cache)[:], local[:])
    shutil.rmtree(cache.parent / "remote")
    assert equal(memfeed.open(origin, cache_dir=cache)[:], local[:])


@pytest.mark.parametrize(("shuffle", "size"), [(True, None), (memfeed.Blocks(5), None), (False, None), (False, 0.75)])
def test_a_loader_gives_the_batches_of_the_local_store(local, origin, cache, shuffle, size):
    most = None if size is None else int(size * local.nbytes)
    store = memfeed.open(origin, cache_dir=cache, size=most)
    loader, expected = loaders([store, local], shuffle)
    for _ in range(2):
        for mine, theirs in zip(loader, expected, strict=True):
            assert equal(mine, theirs)
            assert disk_bytes(cache) <= (most or 2 * local.nbytes) * 1.05
    assert (store.progress().present == ROWS) == (size is None)
    assert equal(store[5], local[5])


def test_what_a_batch_waits_for_is_asked_for_at_once(local, origin, cache, monkeypatch):
    """The first batch needs more chunks than a new link has requests: they are not asked for in rounds."""
    read, changed, counts = LazyRemote.read, threading.Condition(), {"now": 0, "most": 0}

    def counted(self, *arguments, **options):
        with changed:
            counts["now"] += 1
            counts["most"] = max(counts["most"], counts["now"])
            changed.notify_all()
            changed.wait_for(lambda: counts["most"] > LEAST_IN_FLIGHT, timeout=20)
        try:
            return read(self, *arguments, **options)
        finally:
            with changed:
                counts["now"] -= 1

    monkeypatch.setattr(LazyRemote, "read", counted)
    store = memfeed.open(origin, cache_dir=cache, select=["image", "label"])
    assert torch.equal(store[:]["image"], local[:]["image"])
    assert counts["most"] > LEAST_IN_FLIGHT


@pytest.mark.long
def test_a_loop_that_was_left_says_nothing_when_the_interpreter_ends(origin, cache):
    code = """
import sys, memfeed
batches = iter(memfeed.Loader(memfeed.open(sys.argv[1], cache_dir=sys.argv[2]), 4, shuffle=True))
next(batches)
"""
    command = [sys.executable, "-c", code, origin, str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
def test_the_interpreter_ends_after_the_commit_of_a_complete_cache(origin, cache):
    """A thread inside torch, which a commit calls, would abort the process."""
    code = """
import sys, threading, time, tensordict, torch, memfeed  # a commit imports tensordict, which takes seconds
from memfeed.building import commit
write, began = commit.write_metadata, threading.Event()

def slowly(*arguments):
    began.set()
    for _ in range(100):
        torch.rand(1 << 16).sort()
        time.sleep(0.005)
    write(*arguments)

commit.write_metadata = slowly
store = memfeed.open(sys.argv[1], cache_dir=sys.argv[2])
store[:]
assert began.wait(60)
"""
    command = [sys.executable, "-c", code, origin, str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert (cache / "memfeed.json").exists()


def test_blocks_are_those_that_are_fetched_together(local, origin, cache):
    store, rows = memfeed.open(origin, cache_dir=cache), (4 << 20) // (96 << 10)
    assert f"shuffle=Blocks(rows={rows})" in repr(memfeed.Loader(store, 4, shuffle=memfeed.Blocks()))
    store.finish()
    again = memfeed.open(origin, cache_dir=cache)
    assert f"shuffle=Blocks(rows={rows})" in repr(memfeed.Loader(again, 4, shuffle=memfeed.Blocks()))


def test_only_the_selected_fields_are_fetched(local, origin, cache):
    store = memfeed.open(origin, cache_dir=cache, select=["label", "text"])
    (cache.parent / "remote/a.mf/image.memmap").chmod(0o644)
    (cache.parent / "remote/a.mf/image.memmap").write_bytes(b"")  # it is not looked at again
    assert equal(store[:], local.select("label", "text")[:])


def test_resume_before_and_after_it_is_complete(local, origin, cache):
    loader, expected = loaders([memfeed.open(origin, cache_dir=cache), local], True)
    want = list(expected)
    batches = iter(loader)
    got = [next(batches) for _ in range(4)]
    state = loader.state_dict()
    del batches, loader
    again, _ = loaders([memfeed.open(origin, cache_dir=cache), local], True)
    again.load_state_dict(state)
    again.store.finish()
    assert equal(got + list(again), want)


@pytest.mark.parametrize(("size", "context"), [(None, "fork"), ("15MB", "fork"), (None, "spawn")])
def test_workers_of_a_dataloader(local, origin, cache, size, context):
    store = memfeed.open(origin, cache_dir=cache, size=size)
    assert equal(store[0], local[0])  # connections were made: a forked child cannot use them
    workers = 2 if context == "fork" else 1
    loader = DataLoader(
        store, 30, num_workers=workers, collate_fn=memfeed.Collate(), multiprocessing_context=context, timeout=300
    )
    for batch, first in zip(loader, range(0, ROWS, 30), strict=True):
        assert equal(batch, local[first : first + 30])


def test_workers_get_rows_though_their_parent_has_read_none(local, origin, cache):
    store = memfeed.open(origin, cache_dir=cache)
    loader = DataLoader(
        store, 50, num_workers=1, collate_fn=memfeed.Collate(), multiprocessing_context="fork", timeout=30
    )
    for batch, first in zip(loader, range(0, ROWS, 50), strict=True):
        assert equal(batch, local[first : first + 50])


def test_a_forked_child_gets_the_error_of_its_parent(origin, cache):
    store = memfeed.open(origin, cache_dir=cache)
    _ = store[0]
    shutil.rmtree(cache.parent / "remote")
    loader = DataLoader(store, 30, num_workers=1, collate_fn=memfeed.Collate(), multiprocessing_context="fork")
    with pytest.raises(Exception, match="found that this object was removed after the store was opened"):
        list(loader)


def test_a_pickle_opens_the_address_again(local, origin, cache):
    store = memfeed.open(origin, cache_dir=cache).select("label", "sound").subset([5, 7])
    assert equal(pickle.loads(pickle.dumps(store))[:], local.select("label", "sound")[[5, 7]])


@pytest.mark.long
def test_a_pickle_from_before_an_append_keeps_its_generation(local, tmp_path, cache):
    shutil.copytree(local.path, tmp_path / "grown.mf")
    address = f"file://{tmp_path}/remote/grown.mf"
    memfeed.push(tmp_path / "grown.mf", address)
    store = memfeed.open(address, cache_dir=cache)
    pickled = pickle.dumps(store)
    memfeed.append(tmp_path / "grown.mf", [local[i] for i in range(3)], progress=False)
    memfeed.push(tmp_path / "grown.mf", address)
    other = pickled.replace(str(cache).encode(), str(cache).replace("cache", "other").encode())  # in another process
    assert equal(pickle.loads(other)[:], local[:])
    assert len(memfeed.open(address, cache_dir=tmp_path / "new")) == ROWS + 3
    with pytest.raises(StoreError, match="was replaced"):
        memfeed.open(address, cache_dir=cache)
    memfeed.push(tmp_path / "grown.mf", address, remove_old=True)
    with pytest.raises(StoreError, match="found another store than the one that was sent here"):
        pickle.loads(other.replace(b"other", b"third"))


# --- other processes


def run(code: str, *arguments: object, check: bool = True) -> subprocess.Popen:
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], env={**os.environ, "PYTHONPATH": paths}
    )
    if check:
        assert process.wait(300) == 0
    return process


EPOCH = """
import sys, memfeed
store, local = memfeed.open(sys.argv[1], cache_dir=sys.argv[2], size=eval(sys.argv[3])), memfeed.open(sys.argv[4])
from memfeed.testing import equal
rank, shuffle = int(sys.argv[5]), sys.argv[3] == "None"
options = {"shuffle": shuffle, "seed": 1, "ranks": (rank, 2)}
loaders = [memfeed.Loader(one, 15, **options) for one in (store, local)]
for _ in range(2):
    assert all(equal(a, b) for a, b in zip(*loaders, strict=True))
"""


@pytest.mark.long
@pytest.mark.parametrize("size", [None, 17_000_000])
def test_two_ranks_share_a_cache(local, bucket, proxy, cache, size):
    address = upload(local, f"{bucket}/a.mf")
    proxy.latency_seconds = 0.01
    before = len(proxy.requests)
    ranks = [run(EPOCH, address, cache, size, local.path, rank, check=False) for rank in range(2)]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    if size is None:
        fetched = chunks_fetched(proxy.requests[before:])
        assert sorted(set(fetched)) == sorted(fetched)
        assert len(fetched) == sum(-(-bytes_ // (4 << 20)) for bytes_ in local._view.manifest.files.values())
    else:
        assert disk_bytes(cache) <= size * 1.05


def chunks_fetched(requests):
    """Return the (path, chunk) of every column file that was asked for."""
    found = []
    for one in requests:
        if one.method == "GET" and one.path.endswith((".memmap", "heap.bin")):
            first, last = map(int, one.range.removeprefix("bytes=").split("-"))
            found += [(one.path, chunk) for chunk in range(first >> 22, (last >> 22) + 1)]
    return found


KILLED = """
import os, signal, sys, memfeed
store = memfeed.open(sys.argv[1], cache_dir=sys.argv[2])
for i, batch in enumerate(memfeed.Loader(store, 10)):
    if i == 5:
        store._view.supply.directory.sync()  # which is due once a second, and later on a busy disk
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_fetched_is_not_fetched_again(local, bucket, proxy, cache, tmp_path):
    address = upload(local, f"{bucket}/a.mf")
    proxy.bytes_per_second = 20e6  # it does not get all
    killed = Program(KILLED, address, cache, at=tmp_path)
    assert killed.wait() == -9, killed.err.read_text()
    proxy.bytes_per_second = None
    store = memfeed.open(address, cache_dir=cache)
    present, before = store._view.supply.directory.bytes_present, len(proxy.requests)
    assert present > 0
    assert equal(store[:], local[:])
    fetched = chunks_fetched(proxy.requests[before:])
    table = store._view.supply.directory.table if store._view.supply else None
    assert table is None or len(fetched) < table.count
    total = sum(local._view.manifest.files.values())
    assert sum(
        min(4 << 20, local._view.manifest.files[name_of(local, path)] - (chunk << 22)) for path, chunk in fetched
    ) == (total - present)


def name_of(store, path):
    return next(name for name in store._view.manifest.files if path.endswith(f"/{name}"))


# --- faults


@pytest.mark.parametrize("kind", ["reset", "truncate", "slow_down", "wrong_bytes"])
def test_faults_change_no_row(local, bucket, proxy, cache, kind):
    address = upload(local, f"{bucket}/a.mf")
    store = memfeed.open(address, cache_dir=cache)
    proxy.inject(kind, 5, method="GET", path="a.mf/", every=2)
    loader, expected = loaders([store, local], True)
    assert all(equal(a, b) for a, b in zip(loader, expected, strict=True))
    assert proxy.injected[kind] > 0


def test_without_a_network_the_cache_is_read_and_the_rest_is_an_error(local, bucket, proxy, cache):
    address = upload(local, f"{bucket}/a.mf")
    store = memfeed.open(address, cache_dir=cache)
    assert equal(store[6], local[6])
    proxy.inject("slow_down", -1)
    with pytest.raises(RemoteError, match=r"s3://.*SlowDown"):
        _ = store[149]
    assert equal(store[7], local[7])
    del store
    store = memfeed.open(address, cache_dir=cache)  # without a manifest from the address
    assert equal(store[7], local[7])
    with pytest.raises(RemoteError, match=r"s3://.*SlowDown"):
        list(memfeed.Loader(store, 50))
    proxy.clear()
    assert equal(rows_when_back(store), local[:])


def rows_when_back(store):
    """All rows, once the requests that began before the network came back have failed."""
    end = time.monotonic() + 60
    while True:
        try:
            return store[:]
        except RemoteError:
            assert time.monotonic() < end


def test_an_object_with_other_bytes_is_an_error(origin, cache):
    store = memfeed.open(origin, cache_dir=cache)
    image = cache.parent / "remote/a.mf/image.memmap"
    image.chmod(0o644)
    stat = image.stat()
    with open(image, "r+b") as file:
        file.seek(100)
        file.write(b"damaged")
    os.utime(image, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the etag of a file is that of its time
    with pytest.raises((CorruptStoreError, StoreError), match="file://"):
        _ = store[0]
    assert store.progress().present == 0


def test_a_store_that_was_replaced_is_an_error(local, origin, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(caches, "LEAVE_SECONDS", 0.2)
    store = memfeed.open(origin, cache_dir=cache)
    _ = store[0]
    shutil.rmtree(tmp_path / "remote")
    other = memfeed.cache([{"image": torch.zeros(9)}] * 4, tmp_path / "remote/a.mf", workers=0, progress=False)
    assert len(other) == 4
    with pytest.raises((StoreError, RemoteError), match="file://"):
        _ = store[149]
    del store
    with pytest.raises(StoreError, match="was replaced"):
        memfeed.open(origin, cache_dir=cache)


def test_a_full_disk_is_an_error_and_the_next_call_goes_on(local, origin, cache, monkeypatch):
    store = memfeed.open(origin, cache_dir=cache)
    write_at = files.write_at

    def full(fd, data, offset):
        if len(data) > 100_000:
            raise files.refused(OSError(errno.ENOSPC, "No space left"), cache, "writing", len(data))
        return write_at(fd, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_at", full)
        with pytest.raises(SpaceError, match="no room"):
            _ = store[0]
    assert equal(store[0], local[0])


def test_a_reader_of_objects_that_another_push_removed_is_told(tmp_path):
    address = f"file://{tmp_path}/at/x.mf"
    for rows in (100, 120):
        memfeed.cache((torch.arange(rows), torch.rand(rows, 3)), tmp_path / f"{rows}.mf", progress=False)
    memfeed.push(tmp_path / "100.mf", address, progress=False)
    other = memfeed.open(address, cache_dir=tmp_path / "other")
    memfeed.push(tmp_path / "120.mf", address, remove_old=True, progress=False)
    with pytest.raises(
        RemoteError, match=r"removed after the store was opened; .*remove_old=True.* another cache_dir="
    ):
        other[3]


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_file_of_a_cache_that_was_cut_names_the_directory_to_remove(local, origin, tmp_path, is_complete):
    cache = tmp_path / "the cache"
    store = memfeed.open(origin, cache_dir=cache)
    _ = store[3]
    if is_complete:
        store.finish()
    del store
    wait_until(lambda: gc.collect() >= 0 and cache not in opening._opened)  # its thread may end a moment later
    files.chmod(cache / "label.memmap", 0o644)
    os.truncate(cache / "label.memmap", 10)
    with pytest.raises(
        CorruptStoreError, match=r"found 10 bytes; .*remove this cache .* fetched again: rm -r '.*/the cache'"
    ):
        memfeed.open(origin, cache_dir=cache)
    shutil.rmtree(cache)
    assert equal(memfeed.open(origin, cache_dir=cache)[3], local[3])


def test_a_disk_that_gives_no_room_back_is_an_error(local, origin, cache, monkeypatch):
    store = memfeed.open(origin, cache_dir=cache, size="13MB")

    def refused(fd, ranges):
        raise files.refused(OSError(errno.EIO, "Input/output error"), cache, "making room")

    with monkeypatch.context() as patched:
        patched.setattr(files, "punch", refused)
        # not by a loader: what fails while it reads ahead is tried again, and then the room counts as given back
        with pytest.raises(BuildError, match="making room"):
            [store[row : row + 16] for row in range(0, len(store), 16)]
    assert equal(store[100:], local[100:])


@pytest.mark.parametrize("size", [None, "15MB"])
def test_a_cache_that_is_removed_while_it_is_used_is_an_error(origin, cache, local, size):
    store = memfeed.open(origin, cache_dir=cache, size=size)
    assert equal(store[0], local[0])
    shutil.rmtree(cache)
    with pytest.raises((StoreError, BuildError), match=f"{cache}.*No such file or directory"):
        list(memfeed.Loader(store, 16, shuffle=size is None))


def test_a_commit_that_failed_is_said_and_tried_again(local, origin, cache, monkeypatch, capfd):
    commit, failed = CacheDirectory.commit, []

    def fails_once(self, **options):
        if not failed:
            failed.append(True)
            raise files.refused(OSError(errno.ENOSPC, "No space left"), cache, "writing")
        commit(self, **options)

    monkeypatch.setattr(CacheDirectory, "commit", fails_once)
    monkeypatch.setattr(remote_supply, "SYNC_SECONDS", 0.1)
    store = memfeed.open(origin, cache_dir=cache)
    assert equal(store[:], local[:])
    wait_until(lambda: store._view.supply is None)
    assert len(memfeed.open(cache)) == ROWS
    assert "no room" in capfd.readouterr().err


def test_verify_finds_damage_in_a_cache_that_is_read_as_it_is(local, origin, cache):
    memfeed.open(origin, cache_dir=cache).finish()
    with open(cache / "image.memmap", "r+b") as file:
        file.seek(200)
        byte = file.read(1)[0]
        file.seek(200)
        file.write(bytes([byte ^ 1]))
    store = memfeed.open(origin, cache_dir=cache)
    assert not equal(store[0], local[0])  # docs/reliability.md says so, and why
    with pytest.raises(CorruptStoreError, match=r"image\.memmap: .* in 4,.* bytes from 0 \(field image"):
        store.verify()


@pytest.mark.parametrize("shuffle", [True, memfeed.Blocks()])
def test_pieces_of_two_nodes_are_those_of_a_local_store(local, origin, tmp_path, shuffle):
    """Rows come as with placement="sharded" of the local store, also once one node's cache has all rows, and one node
    goes on with the epoch of two."""

    def loader(store, rank, world_size=2):
        options = {"ranks": (rank, world_size), "placement": "sharded", "drop_last": True}
        return memfeed.Loader(store, 16, shuffle=shuffle, seed=3, return_rows=True, **options)

    stores = [memfeed.open(origin, cache_dir=tmp_path / f"cache{rank}") for rank in range(2)]
    loaders = [loader(stores[rank], rank) for rank in range(2)]
    own = [loader(local, rank) for rank in range(2)]
    for epoch in range(2):
        read = []
        for one, other in zip(loaders, own, strict=True):
            for batch, expected in zip(one, other, strict=True):
                assert equal(batch, expected)
                read += batch["rows"].tolist()
        assert len(set(read)) == len(read) == ROWS // 32 * 32
        if not epoch:
            stores[0].finish()
    assert "mapped" in str(loaders[0].stats())

    batches = iter(loaders[1])
    begun = [next(batches)["rows"].tolist() for _ in range(2)]
    begun += [batch["rows"].tolist() for batch, _ in zip(loaders[0], range(2), strict=False)]
    alone = loader(memfeed.open(origin, cache_dir=tmp_path / "cache0"), 0, 1)
    alone.load_state_dict(loaders[1].state_dict())
    rest = [row for batch in alone for row in batch["rows"].tolist()]
    assert len({*sum(begun, []), *rest}) == 64 + len(rest) >= ROWS // 32 * 32


def test_pieces_of_a_dataset_that_fills_are_refused(tmp_path):
    store = memfeed.cache([{"x": torch.zeros(3)}] * 20, tmp_path / "a.mf", lazily=True, workers=0, progress=False)
    with pytest.raises(LoaderError, match="being filled"):
        memfeed.Loader(store, 4, placement="sharded")
    store.finish()
