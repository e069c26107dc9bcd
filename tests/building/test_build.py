import errno
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_build import SCHEMA, is_right, packed

import memfeed
from disk import Faults
from memfeed.building.build import Build
from memfeed.building.claim import claim
from memfeed.building.partial import ABSENT, DURABLE, WRITTEN, runs
from memfeed.errors import BuildError, StoreError
from memfeed.system import machine
from support import Made


def test_presence_goes_from_absent_to_durable(path):
    with claim(path) as root:
        build = Build.begin(root, SCHEMA, 10, None)
        build.writer().write(2, 3, packed(2, 3))
        assert build.presence().tolist() == [ABSENT] * 2 + [WRITTEN] * 3 + [ABSENT] * 5
        build.sync()
        assert build.presence().tolist() == [ABSENT] * 2 + [DURABLE] * 3 + [ABSENT] * 5
        assert runs(build.absent()) == [(0, 2), (5, 5)]
        with pytest.raises(BuildError, match="found rows 0:2, 5:10 never written, of 10"):
            build.commit(path)
    assert not path.exists()


def test_after_another_boot_only_synced_rows_count(path, monkeypatch):
    with claim(path) as root:
        build = Build.begin(root, SCHEMA, 10, None)
        build.writer().write(0, 4, packed(0, 4))
        build.sync()
        build.writer().write(4, 3, packed(4, 3))
    with claim(path) as root:
        assert len(Build.resume(root).absent()) == 3
    monkeypatch.setattr(machine, "boot_id", lambda: "another")
    with claim(path) as root:
        again = Build.resume(root)
        assert again.absent().tolist() == [4, 5, 6, 7, 8, 9]
        again.writer().write(4, 6, packed(4, 6))
        again.commit(path)
    assert is_right(memfeed.open(path), range(10))


def test_where_the_boot_is_not_known_only_synced_rows_count(path, monkeypatch):
    monkeypatch.setattr(machine, "boot_id", lambda: "")
    with claim(path) as root:
        build = Build.begin(root, SCHEMA, 8, None)
        build.writer().write(0, 4, packed(0, 4))
        build.sync()
        build.writer().write(4, 4, packed(4, 4))
        assert Build.resume(root).absent().tolist() == [4, 5, 6, 7]


def test_rows_whose_sync_failed_are_absent(path):
    """The system tells of it once, and the next sync succeeds without them."""
    with claim(path) as root:
        build = Build.begin(root, SCHEMA, 8, None)
        build.writer().write(0, 4, packed(0, 4))
        build.sync()
        build.writer().write(4, 4, packed(4, 4))
        with (
            Faults(lambda one: one.kind == "sync", errno.EIO),
            pytest.raises(BuildError, match="while waiting for the disk"),
        ):
            build.sync()
        build.sync()
        assert build.presence().tolist() == [DURABLE] * 4 + [ABSENT] * 4


def test_rows_whose_last_sync_failed_are_computed_again(path, monkeypatch):
    """That of the commit, which syncs what was written since the last sync point."""
    read, data = [], Made(lambda i: read.append(i) or torch.tensor([i]), 40)

    def is_sync_of_the_column(one):
        return one.kind == "sync" and one.path.endswith("value.memmap")

    with Faults(is_sync_of_the_column, errno.EIO), pytest.raises(BuildError, match="while waiting for the disk"):
        memfeed.cache(data, path, workers=0, progress=False)
    read.clear()
    store = memfeed.cache(data, path, workers=0, progress=False)
    assert set(read) == set(range(40))
    assert [int(row) for row in store] == list(range(40))


@pytest.mark.parametrize("workers", [0, 2])
def test_sync_points_come_while_rows_are_written(path, workers, monkeypatch):
    monkeypatch.setattr("memfeed.building.build.SYNC_SECONDS", 0.05)
    durable, real = [], Build.sync

    def sync(self):
        real(self)
        durable.append(int((self.presence() == DURABLE).sum()))

    monkeypatch.setattr(Build, "sync", sync)
    memfeed.cache(Made(lambda i: time.sleep(0.004) or torch.arange(i % 3), 200), path, workers=workers, progress=False)
    assert len([count for count in durable if 0 < count < 200]) >= 2


def test_a_build_that_cannot_be_read_says_so(path):
    with claim(path) as root:
        Build.begin(root, SCHEMA, 4, None)
        (root / ".build" / "settings.json").write_text("{")
        with pytest.raises(StoreError, match="found a build that cannot be read .* remove that directory"):
            Build.resume(root)


@settings(max_examples=100)
@given(st.sets(st.integers(0, 50)))
def test_runs(numbers):
    found = runs(np.array(sorted(numbers), np.int64))
    assert [i for first, count in found for i in range(first, first + count)] == sorted(numbers)
    assert all(a + k < b for (a, k), (b, _) in zip(found, found[1:], strict=False))
