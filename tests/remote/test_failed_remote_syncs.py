"""A sync that fails once while a store is fetched: what it lost is fetched again, and never called durable."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import memfeed
from disk import Faults, Recorder
from memfeed.building.partial import DURABLE, HELD, SYNCING, WRITTEN, Units
from memfeed.errors import BuildError
from memfeed.remote.caches import Remote, open_directory
from memfeed.remote.directory import CacheDirectory
from memfeed.remote.layout import RemoteStore, read_manifest
from memfeed.remote.opening import LazyRemote
from memfeed.system import files, locks, machine
from memfeed.testing import equal
from torture.victims import ended, start

pytest.importorskip("obstore")
ROWS, ROW_SHAPE = 700, (3, 64, 112)
LOST = "image.memmap"


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Return a store of 15 MB, whose file of images has four chunks."""
    images = torch.randint(0, 256, (ROWS, *ROW_SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    columns = {"image": images, "label": torch.arange(ROWS)}
    return memfeed.cache(columns, tmp_path_factory.mktemp("local") / "a.mf", allow="copy", progress=False)


@pytest.fixture
def origin(local, tmp_path):
    memfeed.push(local, f"file://{tmp_path}/remote/a.mf")
    return f"file://{tmp_path}/remote/a.mf"


@pytest.fixture
def remote(origin):
    return read_manifest(origin)


@pytest.fixture
def base(tmp_path):
    (tmp_path / "base").mkdir()
    return tmp_path / "base"


def of_images(one):
    return one.path.endswith(LOST)


def open_cache(root, remote, size=None):
    found = Remote(remote.manifest_bytes, remote.read_checksum_file(), remote.read_range_file() or b"")
    return open_directory(root, str(remote.address), size, found)


def fill(directory, local, chunks=None):
    """Write chunks of the images, the first ones as fetching does."""
    first, last = directory.table.of_file(LOST)
    for chunk in range(first, last if chunks is None else first + chunks):
        if not directory.units.is_present(chunk):
            assert directory.units.take(chunk)
            assert directory.reserve(chunk, lambda found: np.zeros(len(found)), urgent=True)
            write(directory, local, chunk)
            directory.units.release(chunk)


def write(directory, local, chunk):
    place = directory.table.at(chunk)
    directory.write(chunk, memoryview((local.path / place.name).read_bytes()[place.start : place.stop]))


def leave(directory):
    directory.units.close()
    directory.leave()


def after_power_loss(recorder, root, left, remote, size, monkeypatch):
    """Open what a power loss leaves; the maps, which `Recorder` does not see, are kept: they say the most."""
    recorder.lose(left)
    for name in ("presence", "used"):
        shutil.copy(root / ".build" / name, left / root.name / ".build" / name)
    monkeypatch.setattr(machine, "boot_id", lambda: "another")
    return open_cache(left / root.name, remote, size)


def right_chunks(directory, local):
    """Return how many chunks of the images are there; assert that these have the right bytes."""
    first, last = directory.table.of_file(LOST)
    there = [chunk for chunk in range(first, last) if directory.units.is_present(chunk)]
    for place in map(directory.table.at, there):
        found, wanted = ((path / place.name).read_bytes() for path in (directory.root, local.path))
        assert found[place.start : place.stop] == wanted[place.start : place.stop]
    return len(there)


@pytest.mark.parametrize("size", [None, 12 << 20])
def test_chunks_whose_sync_failed_are_not_there(local, remote, base, tmp_path, size, monkeypatch):
    """The next sync succeeds, and must not call them durable."""
    root, is_begun = base / "cache", []
    with Recorder(base, lambda one: is_begun and of_images(one)) as recorder:
        directory = open_cache(root, remote, size)
        is_begun.append(True)
        fill(directory, local, 1)
        with pytest.raises(BuildError, match="while waiting for the disk"):
            directory.sync()
        directory.sync()
        assert right_chunks(directory, local) == 0
        fill(directory, local, 2)
        directory.sync()
        assert right_chunks(directory, local) == 2
        leave(directory)
    again = after_power_loss(recorder, root, tmp_path / "left", remote, size, monkeypatch)
    assert right_chunks(again, local) == 2
    assert int(again._taken_bytes[0]) == again.bytes_present
    leave(again)


def test_what_was_durable_before_stays(local, remote, base):
    directory = open_cache(base / "cache", remote)
    fill(directory, local, 2)
    directory.sync()
    fill(directory, local, 3)
    with Faults(lambda one: one.kind == "sync" and of_images(one), errno.EIO), pytest.raises(BuildError):
        directory.sync()
    assert right_chunks(directory, local) == 2
    leave(directory)


def test_another_process_does_not_call_them_durable(local, remote, base, monkeypatch):
    """Only one of them is told of the failure. The other one waits until it has forgotten the chunks."""
    one, other = (open_cache(base / "cache", remote) for _ in range(2))
    fill(one, local)
    lose, ends = Units._lose, []

    def late(units):
        second.start()
        second.join(0.2)  # it has had the time to do harm, if it does not wait
        lose(units)

    second = threading.Thread(target=lambda: ends.append(other.sync()))
    monkeypatch.setattr(Units, "_lose", late)
    with Faults(lambda op: op.kind == "sync" and of_images(op), errno.EIO), pytest.raises(BuildError):
        one.sync()
    second.join()
    assert ends == [None]
    assert right_chunks(one, local) == 0
    leave(one)
    leave(other)


def kill_after_failed_sync(root, address, path, size):
    """What a child does: it is killed once a sync has failed, before it can note that."""
    directory, local = open_cache(root, read_manifest(address), size), memfeed.open(path)
    fill(directory, local, 1)
    directory.sync()
    fill(directory, local, 2)
    Units._lose = lambda units: os.kill(os.getpid(), signal.SIGKILL)
    with Faults(lambda one: one.kind == "sync" and of_images(one), errno.EIO):
        directory.sync()


@pytest.mark.parametrize("size", [None, 12 << 20])
@pytest.mark.parametrize("is_open", [False, True])
def test_chunks_are_not_there_if_a_process_was_killed_after_their_sync_failed(
    local, origin, remote, base, tmp_path, size, is_open
):
    """Neither a process that uses the cache then nor the next one calls them durable."""
    root = base / "cache"
    directory = open_cache(root, remote, size) if is_open else None
    child = start(tmp_path / "stderr", kill_after_failed_sync, root, origin, local.path, size)
    assert ended(child)
    assert child.exitcode == -signal.SIGKILL, (tmp_path / "stderr").read_text()
    if directory is None:
        directory = open_cache(root, remote, size)
        assert right_chunks(directory, local) == 1
    directory.sync()
    assert right_chunks(directory, local) == 1
    assert not (root / ".build" / SYNCING).exists()
    fill(directory, local, 2)
    directory.sync()
    assert right_chunks(directory, local) == 2
    leave(directory)


def test_a_chunk_that_is_written_while_a_sync_fails_is_lost_too(local, remote, base, monkeypatch):
    directory = open_cache(base / "cache", remote)
    fill(directory, local, 1)
    chunk = directory.table.of_file(LOST)[0] + 1
    inside, write_at, locked = threading.Event(), files.write_at, locks.locked
    forgetting = threading.Event()

    def slow(fd, data, offset):
        written = write_at(fd, data, offset)
        inside.set()
        assert forgetting.wait(60)
        return written

    def noted(path):
        if path.name == "writers":
            forgetting.set()
        return locked(path)

    monkeypatch.setattr(locks, "locked", noted)
    monkeypatch.setattr(files, "write_at", slow)
    assert directory.units.take(chunk)
    thread = threading.Thread(target=write, args=(directory, local, chunk))
    thread.start()
    assert inside.wait(60)
    with Faults(lambda one: one.kind == "sync" and of_images(one), errno.EIO), pytest.raises(BuildError):
        directory.sync()
    thread.join()
    assert not directory.units.is_present(chunk)
    leave(directory)


def test_a_cache_whose_last_sync_failed_is_no_store_yet(local, origin, base, tmp_path):
    """That of `finish`: the chunks that were lost are fetched again."""
    root, is_begun = base / "cache", []
    with Recorder(base, lambda one: is_begun and of_images(one)) as recorder:
        store = memfeed.open(origin, cache_dir=root)
        is_begun.append(True)
        with pytest.raises(BuildError, match="while waiting for the disk"):
            store.finish()
        assert not (root / "memfeed.json").exists()
        store.finish()
    recorder.lose(tmp_path / "left")
    left = memfeed.open(tmp_path / "left" / "cache")
    left.verify()
    assert equal(left[:], local[:])


def test_a_cache_of_which_another_process_lost_chunks_is_no_store(local, remote, base, monkeypatch):
    directory = open_cache(base / "cache", remote)
    fill(directory, local)
    monkeypatch.setattr(CacheDirectory, "sync", lambda self: None)
    with pytest.raises(BuildError, match="found that the disk lost bytes that were written"):
        directory.commit()
    leave(directory)


@pytest.mark.parametrize(
    "name", ["checksums.bin", "meta.json", "memfeed.json.tmp", "remote.json.tmp", ".build/presence", LOST]
)
def test_any_other_sync_of_a_cache_may_fail(local, origin, base, tmp_path, name):
    with Recorder(base, lambda one: one.path.endswith(name)) as recorder:
        for _ in range(2):
            try:
                memfeed.open(origin, cache_dir=base / "cache").finish()
                break
            except BuildError as error:
                assert "while waiting for the disk" in str(error)
    assert recorder.failed
    recorder.lose(tmp_path / "left")
    left = memfeed.open(tmp_path / "left" / "cache")
    left.verify()
    assert equal(left[:5], local[:5])
    assert sorted(p.name for p in (tmp_path / "left" / "cache").rglob("meta.json")) == ["meta.json"]
    assert all(p.read_bytes() for p in (tmp_path / "left" / "cache").rglob("meta.json"))


def test_a_chunk_is_removed_only_once_the_disk_says_that_it_is_not_durable(local, remote, base):
    """Else a power loss could leave it durable, and a hole in its place."""
    size = 12 << 20
    directory = open_cache(base / "cache", remote, size)
    fill(directory, local, 2)
    directory.sync()
    first = directory.table.of_file(LOST)[0]
    assert directory.units.states[first] == DURABLE
    states = []

    def fails(one):
        states.append(Path(one.path).name)
        return one.kind == "sync" and one.path.endswith("presence")

    assert directory.units.take(first)
    with Faults(fails, errno.EIO), pytest.raises(BuildError, match="while waiting for the disk"):
        directory.remove(first)
    assert directory.units.states[first] == DURABLE, "the next try syncs it again"
    with Faults() as counted:
        directory.remove(first)
    kinds = [(one.kind, Path(one.path).name) for one in counted.operations]
    assert kinds.index(("sync", "presence")) < kinds.index(("punch", LOST))
    directory.units.release(first)
    assert right_chunks(directory, local) == 1
    leave(directory)


def test_chunks_are_found_to_remove_with_one_sync(local, remote, base):
    directory = open_cache(base / "cache", remote, 12 << 20)
    fill(directory, local, 2)
    directory.sync()
    with Faults() as counted:
        fill(directory, local)
    # another test's directory may be collected meanwhile, which syncs its own presence
    own = str(directory.root)
    synced = [one.path for one in counted.operations if one.kind == "sync" and one.path.endswith("presence")]
    assert len([path for path in synced if path.startswith(own)]) <= 1
    assert set(directory.units.states.tolist()) & {WRITTEN}
    assert HELD not in directory.units.states
    leave(directory)


@pytest.mark.parametrize(
    "name", [LOST, "label.memmap", "checksums.bin", "meta.json", "memfeed.json.tmp", "remote.json.tmp"]
)
def test_a_pull_fetches_what_a_failed_sync_lost(local, origin, base, tmp_path, name, monkeypatch):
    """The bytes can still be read, and their checksums are right."""
    asked, read = [], RemoteStore.read

    def counted(remote, name, *rest, **more):
        asked.append(name)
        return read(remote, name, *rest, **more)

    columns = {LOST, "label.memmap"}
    monkeypatch.setattr(RemoteStore, "read", counted)
    begins = name == "remote.json.tmp"
    with Recorder(base, lambda one: one.path.endswith(name) and (begins or columns <= set(asked))) as recorder:
        with pytest.raises(BuildError, match="while waiting for the disk"):
            memfeed.pull(origin, base / "a.mf")
        asked.clear()
        memfeed.pull(origin, base / "a.mf")
    recorder.lose(tmp_path / "left")
    left = memfeed.open(tmp_path / "left" / "a.mf")
    left.verify()
    assert equal(left[:], local[:])
    assert set(asked) & columns == (columns if begins or name in columns else set())


def test_a_growing_cache_begins_again_where_its_sync_failed(tmp_path, base, monkeypatch):
    rows = [{"x": torch.full((1000,), i)} for i in range(80)]
    old = memfeed.cache(rows[:60], tmp_path / "a.mf", workers=0, progress=False)
    address = f"file://{tmp_path}/remote/a.mf"
    memfeed.push(old, address)
    store = memfeed.open(address, cache_dir=base / "cache")
    _ = store[:]
    del store
    new = memfeed.append(tmp_path / "a.mf", rows[60:], workers=0, progress=False)
    memfeed.push(new, address)
    fetched, read = [], LazyRemote.read

    def counted(self, name, *rest, **more):
        fetched.append(name)
        return read(self, name, *rest, **more)

    monkeypatch.setattr(LazyRemote, "read", counted)
    with Faults(lambda one: one.kind == "sync" and one.path.endswith("presence"), errno.EIO) as faults:
        try:
            memfeed.open(address, cache_dir=base / "cache")
        except BuildError as error:
            assert "while waiting for the disk" in str(error)
    assert faults.failed is not None
    assert equal(memfeed.open(address, cache_dir=base / "cache")[:], new[:])
    assert "x.memmap" in fetched
