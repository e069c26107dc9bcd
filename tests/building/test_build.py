import errno
import os
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memfeed
from disk import Faults
from memfeed.building.build import Build, runs
from memfeed.building.claim import claim
from memfeed.building.commit import finish_interrupted
from memfeed.building.rows import ABSENT, DURABLE, SKIPPED, WRITTEN, Extents
from memfeed.errors import BuildError, SpaceError, StoreError
from memfeed.schema import codec
from memfeed.schema.infer import infer
from memfeed.system import files, machine
from support import Made, equal

SCHEMA = infer([{"x": torch.arange(3), "r": torch.arange(2)}, {"x": torch.arange(3), "r": torch.arange(1)}]).schema


def packed(first, count):
    columns = (
        [torch.arange(3) + i for i in range(first, first + count)],
        [torch.arange(i % 4) for i in range(first, first + count)],
    )
    return [codec.pack(field, values) for field, values in zip(SCHEMA, columns, strict=True)]


def right(store, rows):
    return all(equal(store[r], {"x": torch.arange(3) + i, "r": torch.arange(i % 4)}) for r, i in enumerate(rows))


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(0, 40, 4)), st.sets(st.integers(0, 9), max_size=4))
def test_rows_in_any_order_from_many_writers_with_holes(tmp_path_factory, firsts, skipped):
    path = tmp_path_factory.mktemp("b") / "a.mf"
    with claim(path) as root:
        build = Build.begin(root, SCHEMA, 40, None)
        writers = [build.writer() for _ in range(3)]
        for turn, first in enumerate(firsts):
            rows = writers[turn % 3]
            rows.mark(first, 4, SKIPPED) if first // 4 in skipped else rows.write(first, 4, packed(first, 4))
        build.commit(path)
    store = memfeed.open(path)
    assert right(store, [i for i in range(40) if i // 4 not in skipped])
    assert store.skipped == tuple(i for i in range(40) if i // 4 in skipped)
    store.verify()


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
    assert right(memfeed.open(path), range(10))


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
        with Faults(0, errno.EIO), pytest.raises(BuildError, match="while waiting for the disk"):
            build.sync()
        build.sync()
        assert build.presence().tolist() == [DURABLE] * 4 + [ABSENT] * 4


def test_rows_whose_last_sync_failed_are_computed_again(path, monkeypatch):
    """That of the commit, which syncs what was written since the last sync point."""
    read, data = [], Made(lambda i: read.append(i) or torch.tensor([i]), 40)
    with Faults() as counted:
        memfeed.cache(data, path.with_name("b.mf"), workers=0, progress=False)
    at = next(i for i, one in enumerate(counted.operations) if one.kind == "sync" and one.path.endswith("value.memmap"))
    with Faults(at, errno.EIO), pytest.raises(BuildError, match="while waiting for the disk"):
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


def test_a_disk_that_is_full_of_late_is_told_as_any(path, monkeypatch):
    """torch says in words what went wrong while tensordict wrote its metadata."""

    def full(self, *arguments, **options):
        raise RuntimeError(f"unable to write to file <meta>: {os.strerror(errno.ENOSPC)} (28)")

    with monkeypatch.context() as m, pytest.raises(SpaceError, match=r"writing tensordict's metadata .*rows are kept"):
        m.setattr("tensordict.TensorDict.memmap_like", full)
        memfeed.cache(Made(lambda i: torch.arange(i % 3), 20), path, workers=0, progress=False)
    assert len(memfeed.cache(Made(lambda i: torch.arange(i % 3), 20), path, workers=0, progress=False)) == 20


def test_a_writer_of_an_older_builder_is_turned_away(path):
    with claim(path) as root:
        old = Build.begin(root, SCHEMA, 10, None).writer()
        old.write(0, 2, packed(0, 2))
        Build.resume(root)
        with pytest.raises(BuildError, match=r"found builder 2 at work; expected to be it \(1\)"):
            old.write(2, 2, packed(2, 2))


def test_extents_of_several_processes_never_meet(path):
    with claim(path) as root:
        Build.begin(root, SCHEMA, 10, None)
        granted = [Extents(root).grant(1, size) for size in (100, 1, 70_000, 5)]
        ends = [start + size for start, size in zip(granted, (100, 1, 70_000, 5), strict=True)]
        assert all(end <= start for end, start in zip(ends, granted[1:], strict=False))
        assert Extents(root).grant(0, 10) == 0, "each heap has its own"


@pytest.mark.parametrize("step", ["manifest", "exchange", "gap"])
def test_a_commit_that_was_cut_short_is_finished(path, step, monkeypatch):
    old = memfeed.cache(torch.arange(3), path, progress=False) if step != "manifest" else None
    with claim(path) as root:
        build = Build.begin(root, SCHEMA, 4, None)
        build.writer().write(0, 4, packed(0, 4))
        with monkeypatch.context() as m:
            if step == "manifest":
                m.setattr("memfeed.building.commit.publish", lambda *a, **k: None)
            elif step == "exchange":  # swapped, but the old store is still there
                kept = (root, path / ".build", path.with_name("a.mf.old"))
                m.setattr(files, "remove_tree", lambda p: None if p in kept else _remove(p))
            else:  # no exchange here, and dead between the two renames
                m.setattr(files, "exchange", lambda a, b: False)
                real = files.rename
                m.setattr(
                    files,
                    "rename",
                    lambda one, to: (_ for _ in ()).throw(OSError("dead")) if one == root else real(one, to),
                )
            if step == "gap":
                with pytest.raises(OSError, match="dead"):
                    build.commit(path, overwrite=True)
            else:
                build.commit(path, overwrite=old is not None)
        if step != "exchange":
            assert not path.exists()
        finish_interrupted(path)
    assert right(memfeed.open(path), range(4))
    assert sorted(p.name for p in path.parent.iterdir()) == ["a.mf"]


def _remove(path):
    import shutil

    if path.exists():
        shutil.rmtree(path)


def test_a_build_that_cannot_be_read_says_so(path):
    with claim(path) as root:
        Build.begin(root, SCHEMA, 4, None)
        (root / ".build" / "settings.json").write_text("{")
        with pytest.raises(StoreError, match="found a build that cannot be read .* remove that directory"):
            Build.resume(root)


def test_a_claim_that_began_nothing_leaves_nothing(path):
    with claim(path):
        pass
    assert list(path.parent.iterdir()) == []


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(0, 50)))
def test_runs(numbers):
    found = runs(np.array(sorted(numbers), np.int64))
    assert [i for first, count in found for i in range(first, first + count)] == sorted(numbers)
    assert all(a + k < b for (a, k), (b, _) in zip(found, found[1:], strict=False))


@pytest.mark.parametrize("file", range(2))
def test_a_commit_cut_short_while_it_took_rows_out_is_only_finished(path, file, monkeypatch):
    """Rows have other places by then: a row that can be read now must not be written to its old one."""
    mended = False

    def make(i):
        if i in (3, 17) and not mended:
            raise ValueError("not yet")
        return torch.full((3,), i), torch.arange(i % 4)

    real, calls = files.rename, []

    def rename(source, target):
        if source.suffix == ".copy":
            calls.append(target)
            if len(calls) == file + 2:
                raise KeyboardInterrupt
        real(source, target)

    options = {"on_error": "skip", "progress": False, "workers": 0}
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(files, "rename", rename)
        memfeed.cache(Made(make, 40), path, **options)
    mended = True
    store = memfeed.cache(Made(make, 40), path, **options)
    assert store.skipped == (3, 17)
    assert [int(x[0]) for x, _ in store] == [i for i in range(40) if i not in (3, 17)]
    assert [len(r) for _, r in store] == [i % 4 for i in range(40) if i not in (3, 17)]
    store.verify()
