"""Cache directories: which are refused, and how one goes on after a kill, a power loss or with another size."""

from __future__ import annotations

import fcntl
import shutil
import time

import pytest

import memfeed
from forked_programs import Program
from memfeed.errors import StoreError
from memfeed.remote import caches
from memfeed.testing import equal
from origin import disk_bytes
from support import wait_until

pytest.importorskip("obstore")


def test_a_directory_that_is_no_cache_is_refused(local, origin, cache, tmp_path):
    cache.mkdir()
    (cache / "letter.txt").write_text("mine")
    with pytest.raises(StoreError, match="no cache"):
        memfeed.open(origin, cache_dir=cache)
    (tmp_path / "link").symlink_to(tmp_path / "remote")
    with pytest.raises(StoreError, match="symbolic link"):
        memfeed.open(origin, cache_dir=tmp_path / "link")
    with pytest.raises(StoreError, match="without cache_dir="):
        memfeed.open(origin)
    with pytest.raises(StoreError, match="cache_dir="):
        memfeed.open(origin, size="9GB")
    with pytest.raises(StoreError, match="an address"):
        memfeed.open(local.path, cache_dir=tmp_path / "c")
    for size in ("much", "0GB", -3, True):
        with pytest.raises(ValueError, match="size="):
            memfeed.open(origin, cache_dir=tmp_path / "c", size=size)
    with pytest.raises(StoreError, match="at least"):
        memfeed.open(origin, cache_dir=tmp_path / "c", size="1MB")


def test_a_cache_whose_beginning_was_interrupted_is_begun_again(local, origin, cache):
    """The settings are written last: a process that comes meanwhile, or after a kill, finds files without them."""
    _ = memfeed.open(origin, cache_dir=cache)[0]
    wait_until_unused(cache)
    (cache / ".build" / "remote.json").unlink()
    assert equal(memfeed.open(origin, cache_dir=cache)[:], local[:])


def test_a_cache_of_another_address_is_refused(local, origin, cache, tmp_path):
    shutil.copytree(local.path, tmp_path / "remote" / "b.mf")
    _ = memfeed.open(origin, cache_dir=cache)[0]
    with pytest.raises(StoreError, match=r"cache of .*a\.mf; expected that of .*b\.mf"):
        memfeed.open(origin.replace("a.mf", "b.mf"), cache_dir=cache)


USER = """
import os, sys, time, memfeed
store = memfeed.open(sys.argv[1], cache_dir=sys.argv[2])
print("open", flush=True)
while not os.path.exists(sys.argv[3]):
    time.sleep(0.005)
"""


def test_a_cache_in_use_with_another_size_is_refused(local, origin, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(caches, "LEAVE_SECONDS", 0.2)  # nobody leaves
    user = Program(USER, origin, cache, tmp_path / "end", at=tmp_path)
    wait_until(lambda: user.out.read_text() == "open\n" or user.process.exitcode is not None)
    with pytest.raises(StoreError, match=r"size=all; expected size=9\.0 MB"):
        memfeed.open(origin, cache_dir=cache, size="9MB")
    (tmp_path / "end").touch()
    assert user.wait() == 0, user.err.read_text()
    store = memfeed.open(origin, cache_dir=cache)
    assert equal(store[:], local[:]) if store._view.supply else True


def test_a_cache_that_nobody_uses_takes_another_size(local, origin, cache):
    store = memfeed.open(origin, cache_dir=cache)
    _ = store[:100]
    del store
    deadline = time.monotonic() + 60
    while True:
        try:
            store = memfeed.open(origin, cache_dir=cache, size="9MB")
            break
        except StoreError:  # the last request of the other store is under way
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert disk_bytes(cache) <= 9e6 * 1.05
    assert equal(store[:20], local[:20])


def test_damage_by_a_power_loss_is_found(local, origin, cache):
    store = memfeed.open(origin, cache_dir=cache)
    _ = store[0]
    del store
    wait_until_unused(cache)
    presence, boot = cache / ".build" / "presence", cache / ".build" / "boot"
    assert 2 in presence.read_bytes()  # synced at the end
    presence.write_bytes(presence.read_bytes().replace(b"\2", b"\1"))  # it was not
    boot.write_text("another")
    with open(cache / "image.memmap", "r+b") as file:
        file.seek(200)
        file.write(bytes(100))
    assert equal(memfeed.open(origin, cache_dir=cache)[0], local[0])


def wait_until_unused(cache):
    def is_unused():
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    with open(cache / ".build" / "users", "r+b") as file:
        wait_until(is_unused)
