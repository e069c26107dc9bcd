"""File systems of other kinds and with little room. Most are mounted by the tests, which only root may."""

import contextlib
import errno
import multiprocessing
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

import memfeed
from disk.mounts import mounted, run
from memfeed.errors import BuildError, SpaceError
from memfeed.system import files
from support import Made, equal, wait_until
from torture.victims import PRELOADED

MB = 1_000_000
ROWS = 200


def sample(i):
    """A ragged row of about 100 KB, a ragged row of a few bytes, a number: 20 MB in 200 rows."""
    return {"image": torch.full((80_000 + 200 * i,), i, dtype=torch.uint8), "text": "x" * (i % 7), "label": i}


class Deadly(Made):
    """The samples; the process that converts them is killed before that of an index is read."""

    def __init__(self, index, pid):
        super().__init__(sample, ROWS)
        self.index, self.pid = index, pid

    def __getitem__(self, index):
        if index == self.index:
            os.kill(self.pid, signal.SIGKILL)
        return super().__getitem__(index)


def die(path, index, workers):
    multiprocessing.set_start_method("fork", force=True)  # of the workers: here nothing has used torch's threads
    memfeed.cache(Deadly(index, os.getpid()), path, workers=workers, progress=False)


def convert_and_die(path, index, workers):
    """Return True if it died; another order of the workers may have passed the index before."""
    context = multiprocessing.get_context("forkserver")  # a fork of this process could hang in torch's threads
    context.set_forkserver_preload([*PRELOADED, "torture.test_small_disks"])
    process = context.Process(target=die, args=(path, index, workers))
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def size_on_disk(path):
    found = [Path(top, name) for top, _, names in os.walk(path) for name in names]
    return sum(file.stat().st_blocks for file in found) * 512


def check_store(path):
    store = memfeed.open(path)
    assert all(equal(store[i], sample(i)) for i in range(ROWS))
    store.verify()
    data = sum(80_000 + 200 * i for i in range(ROWS))
    assert size_on_disk(path) <= 1.02 * data + 2 * (1 << 20)


DISKS = pytest.mark.parametrize(
    ("disk", "workers"), [("tmpfs", 0), ("tmpfs", 2), ("tmpfs", 4), ("ext4", 2)], indirect=["disk"]
)


@pytest.fixture
def disk(request, tmp_path):
    """A disk of 24 MB."""
    with mounted(tmp_path / "disk", request.param, 24 * MB) as at:
        yield at


@DISKS
def test_a_nearly_full_disk_is_enough(disk, workers):
    memfeed.cache(Made(sample, ROWS), disk / "a.mf", workers=workers, progress=False)
    check_store(disk / "a.mf")


@pytest.mark.long
@DISKS
def test_a_nearly_full_disk_is_enough_though_builders_die(disk, workers):
    deaths = [convert_and_die(disk / "a.mf", index, workers) for index in (38, 92, 150)]
    assert sum(deaths) > 0
    memfeed.cache(Made(sample, ROWS), disk / "a.mf", workers=workers, progress=False)
    check_store(disk / "a.mf")


def test_a_file_system_that_reports_no_size_is_not_full(tmp_path, capsys):
    with mounted(tmp_path / "disk", "ramfs", 0) as at:
        assert files.free_bytes(at / "a.mf") is None
        store = memfeed.cache(Made(sample, 20), at / "a.mf", workers=0)
        assert all(equal(store[i], sample(i)) for i in range(20))
        with memfeed.Writer(at / "b.mf", like={"x": 1}, length=3) as writer:
            writer[0:3] = {"x": torch.arange(3)}
        assert "free space unknown" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_store_on_a_read_only_disk_is_read(tmp_path, kind):
    """Nothing can be written beside it: that is an error of ours, and the store stays."""
    with mounted(tmp_path / "disk", kind, 24 * MB) as at:
        memfeed.cache(Made(sample, 20), at / "a.mf", workers=0, progress=False)
        run("mount", "-o", "remount,ro", str(at))
        store = memfeed.cache(Made(sample, 20), at / "a.mf", workers=0, progress=False)
        assert all(equal(store[i], sample(i)) for i in range(20))
        for write in (partial(memfeed.cache, workers=0, overwrite=True), memfeed.repair):
            with pytest.raises(BuildError, match=r"a\.mf\.build\S*: found that .* refused .*Read-only file system"):
                write(Made(sample, 20), at / "a.mf", progress=False)
        memfeed.open(at / "a.mf").verify()


def fill(filler):
    """Take all that is free on the disk once a row is written, and return sample 121."""
    presence = filler.with_name("a.mf.build") / ".build" / "presence"
    wait_until(lambda: any(presence.read_bytes()))
    with contextlib.suppress(OSError):
        filler.write_bytes(bytes(24 * MB))
    return sample(121)


def test_a_full_disk_says_so_and_the_next_call_goes_on(tmp_path):
    with mounted(tmp_path / "disk", "tmpfs", 24 * MB) as at:
        filler = at / "filler"
        filler.write_bytes(bytes(12 * MB))
        with pytest.raises(SpaceError, match=r"expected at least \d[\d,]+ for 200 rows"):  # the budget knows
            memfeed.cache(Made(sample, ROWS), at / "a.mf", workers=2, progress=False)
        filler.unlink()
        is_hungry = [True]
        hungry = Made(lambda i: fill(filler) if i == 121 and is_hungry[0] else sample(i), ROWS)
        with pytest.raises(SpaceError, match="rows are kept in"):
            memfeed.cache(hungry, at / "a.mf", workers=2, progress=False)
        filler.unlink()
        is_hungry[0] = False
        memfeed.cache(hungry, at / "a.mf", workers=2, progress=False)
        check_store(at / "a.mf")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_is_named(path, monkeypatch, code):
    def no_locks(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(BuildError, match="found that the disk refused while locking it: some network file systems"):
        memfeed.cache(Made(sample, 4), path, workers=0, progress=False)
