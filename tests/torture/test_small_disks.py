"""File systems of other kinds and with little room. Most are mounted by the tests, which only root may."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

import memfeed
from disk.mounts import mounted
from support import Made, equal

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
    os.setpgid(0, 0)
    memfeed.cache(Deadly(index, os.getpid()), path, workers=workers, progress=False)


def convert_and_die(path, index, workers):
    """Return True if it died; another order of the workers may have passed the index before."""
    context = multiprocessing.get_context("forkserver")  # a fork of this process could hang in torch's threads
    context.set_forkserver_preload(["memfeed", "torture.test_small_disks"])
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


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request, tmp_path):
    """A disk of 24 MB."""
    with mounted(tmp_path / "disk", request.param, 24 * MB) as at:
        yield at


@pytest.mark.parametrize("workers", [0, 2, 4])
def test_a_nearly_full_disk_is_enough(disk, workers):
    memfeed.cache(Made(sample, ROWS), disk / "a.mf", workers=workers, progress=False)
    check_store(disk / "a.mf")


@pytest.mark.parametrize("workers", [0, 2, 4])
def test_a_nearly_full_disk_is_enough_though_builders_die(disk, workers):
    deaths = [convert_and_die(disk / "a.mf", index, workers) for index in (38, 81, 92, 121, 150, 181)]
    assert sum(deaths) > 0
    memfeed.cache(Made(sample, ROWS), disk / "a.mf", workers=workers, progress=False)
    check_store(disk / "a.mf")
