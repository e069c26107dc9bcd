"""Disks that refuse and power that fails, in short; `make torture` runs the same for as long as one likes."""

import contextlib
import errno
import gc
import os
import random
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch

import memfeed
from disk import Faults, Recorder, Replay
from memfeed.building import commit
from memfeed.building.build import Build
from memfeed.building.claim import claim, clear
from memfeed.building.commit import claim_recovered
from memfeed.convert.probe import probe_indices
from memfeed.errors import BuildError, SampleError, SpaceError, StoreError
from memfeed.system import files
from short_form import short_form
from support import Made, equal, wait_until
from torture.faults import CODES, fail_once, operations
from torture.powerloss import NAMES, lose, record
from torture.works import BROKEN, WORKS, Data, Work, convert, no_syncs, right, sample


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    """Who finds the remains of a commit waits for another process to remove them: here is none."""
    monkeypatch.setattr("memfeed.building.claim.WAIT_SECONDS", 0.005)


@pytest.fixture
def memory():
    """A directory in memory where there is one: what is tested is told to the disk very often."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base) as directory, no_syncs():
        yield Path(directory)


@pytest.mark.parametrize("name", short_form(WORKS, 5))
def test_any_write_may_fail(memory, name):
    """Some points of each in turn here, all of them in the torture; which they are moves from run to run."""
    most = len(operations(name))
    for code in CODES:
        for at in random.sample(range(most), 2):
            directory = memory / f"{at} {code}"
            directory.mkdir()
            fail_once(directory, name, at, code, lasting=at % 2 == 0)


def test_other_refusals_are_told(memory):
    for code in (errno.EDQUOT, errno.EROFS):
        for step in (3, 60):
            directory = memory / f"{code} {step}"
            directory.mkdir()
            fail_once(directory, "convert", step, code)


@pytest.mark.parametrize("name", short_form(NAMES, 5))
def test_power_may_fail_at_any_moment(memory, name):
    """After some operations of each here, after all of them in the torture."""
    (memory / "base").mkdir()
    recorder = record(memory / "base", name)
    parts = max(len(recorder.steps) // 5, 1)
    found = lose(recorder, name, memory, random.randrange(parts), parts, random.Random(3))
    assert sum(found.values()) > 2


def test_what_a_power_loss_leaves(tmp_path):
    """The model itself: what was synced is there, whatever else is lost."""
    base, left = tmp_path / "base", tmp_path / "left"
    base.mkdir()
    (base / "old").write_bytes(b"old")
    with Recorder(base) as recorder:
        files.write_file(base / "new", b"unsynced")
        recorder.note("written")
        files.sync_data(base / "new")
        files.sync_directory(base)
        recorder.note("synced")
        files.rename(base / "new", base / "newer")
    replay, seen = Replay(recorder), []
    while replay.step():
        replay.lose(left, "lost", "lost")
        lost = {p.name: p.read_bytes() for p in left.iterdir()}
        replay.lose(left, "kept", "zeros")
        zeros = {p.name: p.read_bytes() for p in left.iterdir()}
        seen.append((list(replay.notes), lost, zeros))
    old = {"old": b"old"}
    assert (["written"], old, {**old, "new": bytes(8)}) in seen
    assert (["written", "synced"], {**old, "new": b"unsynced"}, {**old, "new": b"unsynced"}) in seen
    assert seen[-1][1:] == ({**old, "new": b"unsynced"}, {**old, "newer": b"unsynced"})


def test_short_writes_and_errors_come_where_they_are_asked_for(tmp_path):
    with Faults() as counted:
        files.write_file(tmp_path / "f", b"x" * 100)
    assert [one.kind for one in counted.operations] == ["unlink", "create", "write"]
    with Faults(0, 0) as faults:
        files.write_file(tmp_path / "f", b"y" * 100)
    assert [len(one.data) for one in faults.operations if one.kind == "write"] == [100, 50]
    assert (tmp_path / "f").read_bytes() == b"y" * 100
    with (
        Faults(2, errno.ENOSPC),
        pytest.raises(SpaceError, match=r"f: found no room .* expected room for 100 bytes more"),
    ):
        files.write_file(tmp_path / "f", b"z" * 100)
    with Faults(1, errno.EIO), pytest.raises(BuildError, match=r"f: found that the disk refused while opening it"):
        files.write_file(tmp_path / "f", b"z" * 100)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB."""
    at = tmp_path / "small"
    at.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(at)], capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield at
    subprocess.run(["umount", "-l", str(at)], check=True)


def test_a_disk_that_fills_up(small_disk):
    """The samples probed are short, those between them long: the budget cannot know."""
    probed = set(probe_indices(200))
    data = Made(lambda i: torch.full((5 if i in probed else 10_000,), i, dtype=torch.int32), 200)
    path, filler = small_disk / "a.mf", small_disk / "filler"
    with pytest.raises(SpaceError, match=r"bytes more: free some space .*rows are kept in .*a\.mf\.build"):
        memfeed.cache(data, path, workers=0, progress=False)
    with pytest.raises(SpaceError):
        memfeed.cache(data, path, workers=0, progress=False)
    filler.unlink(missing_ok=True)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    store = memfeed.cache(data, path, workers=0, progress=False)
    assert all(equal(store[i], data[i]) for i in range(200))


def test_a_directory_that_is_read_only(small_disk):
    done = subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"it cannot be made read-only: {done.stderr.strip()}")
    with pytest.raises(BuildError, match=r"a\.mf\.build: found that the disk refused .*Read-only file system"):
        memfeed.cache(torch.arange(4), small_disk / "a.mf", progress=False)
    with pytest.raises(BuildError, match="Read-only file system"), memfeed.Writer(small_disk / "b.mf"):
        pass


# --- what these found


def test_a_presence_map_of_another_length_is_refused(path):
    with pytest.raises(BuildError, match="sample"), memfeed.Writer(path, like=torch.arange(3), length=8) as writer:
        writer[0:4] = torch.zeros(4, 3, dtype=torch.int64)
        raise BuildError("sample")
    presence = path.with_name("a.mf.build") / ".build" / "presence"
    presence.write_bytes(presence.read_bytes()[:4])
    with claim(path) as root, pytest.raises(StoreError, match="found 4 bytes; expected 8, one a row or chunk"):
        Build.resume(root).presence()


def test_a_commit_cut_short_while_rows_are_taken_out_goes_on_as_it_began(path, monkeypatch):
    """The dataset is mended meanwhile: its rows must not be written where other rows lie now."""
    real, done = files.rename, []

    def once(one, to):
        if done and one.suffix == ".copy":
            raise BuildError("dead")
        done.extend([one] if one.suffix == ".copy" else [])
        real(one, to)

    broken = Data(broken=BROKEN)
    with monkeypatch.context() as m, pytest.raises(BuildError, match="dead"):
        m.setattr(files, "rename", once)
        memfeed.cache(broken, path, workers=0, progress=False, on_error="skip")
    assert done
    memfeed.cache(Data(), path, workers=0, progress=False, on_error="skip")
    right(path, WORKS["holes"])


def test_an_older_replacement_cut_short_is_not_taken_for_the_newer(path, monkeypatch):
    """Two replacements, both dead between the exchange and the removal of the old store."""
    memfeed.cache(Data(0), path, workers=0, progress=False)

    def dead(one, keep=()):
        if one.name == ".build" or one == path.with_name("a.mf.build"):
            raise BuildError("dead")

    for version in (1, 2):
        with monkeypatch.context() as m, pytest.raises(BuildError, match="dead"):
            m.setattr(
                commit, "publish", lambda root, to, overwrite, real=commit.publish: _until(m, dead, real, root, to)
            )
            memfeed.cache(Data(version), path, workers=0, progress=False, overwrite=True)
        right(path, Work(convert, partial(sample, version=version)))
    assert (path / ".build" / "settings.json").exists()
    with claim(path):
        commit.finish_interrupted(path)
    right(path, Work(convert, partial(sample, version=2)))
    assert [p.name for p in path.parent.iterdir() if p.name.startswith("a.mf")] == ["a.mf"]


def _until(m, dead, real, root, to):
    """publish, dead once the directories were exchanged."""
    exchange = files.exchange

    def then_dead(one, other):
        if not exchange(one, other):
            pytest.skip("this file system cannot exchange")
        m.setattr(files, "remove_tree", dead)
        return True

    m.setattr(files, "exchange", then_dead)
    real(root, to, overwrite=True)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for open files in /proc")
@pytest.mark.parametrize("name", short_form(WORKS, 4))
def test_no_file_stays_open(path, name):
    def opened():
        gc.collect()
        found = (Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        return [target for fd in found if fd.is_symlink() and str(path.parent) in (target := os.readlink(fd))]

    if WORKS[name].before:
        WORKS[name].before(path)
    WORKS[name].do(path)
    wait_until(lambda: not opened(), 5)  # another thread may collect garbage meanwhile
    with pytest.raises(SampleError):
        memfeed.cache(Data(broken=(10,)), path.with_name("b.mf"), workers=0, progress=False)
    wait_until(lambda: not opened(), 5)


def test_a_build_half_removed_is_none(memory):
    """In memory the first directory made, which is the work directory, is removed last."""
    path = memory / "a.mf"
    data = Data(broken=(10,))

    def clears(*fault):
        with pytest.raises(SampleError):
            memfeed.cache(data, path, workers=0, progress=False)
        with claim(path) as root, Faults(*fault) as faults, contextlib.suppress(BuildError):
            clear(root)
        return len(faults.operations)

    for at in range(clears()):
        clears(at, errno.EIO)
        convert(path)
        right(path, WORKS["convert"])
        shutil.rmtree(path)


def test_a_writer_whose_rows_are_all_there_can_commit(path, monkeypatch):
    with monkeypatch.context() as m, pytest.raises(BuildError, match="dead"), memfeed.Writer(path) as writer:
        m.setattr(Build, "commit", lambda *a, **k: (_ for _ in ()).throw(BuildError("dead")))
        for i in range(20):
            writer.append(sample(i))
    with memfeed.Writer(path) as writer:
        assert len(writer) == 20
    assert all(equal(memfeed.open(path)[i], sample(i)) for i in range(20))


@pytest.mark.parametrize("replaced", [False, True])
def test_who_has_finished_an_interrupted_commit_holds_a_lock_that_others_see(path, monkeypatch, replaced):
    """The lock's file went with the directory that was moved: a builder that went on would not be the only one."""
    if replaced:
        memfeed.cache(Data(0), path, workers=0, progress=False)
    with monkeypatch.context() as m, pytest.raises(BuildError, match="dead"):
        m.setattr(commit, "publish", lambda *a, **k: (_ for _ in ()).throw(BuildError("dead")))
        memfeed.cache(Data(1), path, workers=0, progress=False, overwrite=replaced)
    with claim_recovered(path) as root:
        right(path, WORKS["overwrite"])
        assert sys.modules["memfeed.building.claim"]._try_lock(root / ".build") is None
    assert [p.name for p in path.parent.iterdir() if p.name.startswith("a.mf")] == ["a.mf"]


def test_a_replaced_store_in_the_place_of_a_build_is_moved_aside(path):
    """Dead between the exchange and the move: what is next begins a build there."""
    for version in (0, 1):
        memfeed.cache(Data(version), path.with_name(str(version)), workers=0, progress=False)
    path.with_name("1").rename(path)
    path.with_name("0").rename(path.with_name("a.mf.build"))
    (path / ".build").mkdir()
    (path / ".build" / "settings.json").write_bytes(b"{}")
    memfeed.cache(Data(2), path, workers=0, progress=False, overwrite=True)
    right(path, Work(convert, partial(sample, version=2)))
    assert [p.name for p in path.parent.iterdir() if p.name.startswith("a.mf")] == ["a.mf"]
