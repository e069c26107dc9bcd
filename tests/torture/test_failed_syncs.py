"""A sync that fails once, as Linux tells of it: once, and the next one succeeds though the bytes are lost."""

import errno
import os
import signal
import tempfile
import threading
from pathlib import Path

import pytest
import torch

import memfeed
from disk import Faults, Recorder, Replay
from memfeed.building import build as building
from memfeed.building import commit
from memfeed.building.build import Build
from memfeed.building.claim import claim
from memfeed.building.partial import ABSENT, DURABLE, SYNCING, WRITTEN, Units
from memfeed.convert.dataset_supply import DatasetSupply
from memfeed.errors import BuildError
from memfeed.schema import codec
from memfeed.schema.infer import infer
from memfeed.system import file_copies, files
from memfeed.system.signals import Terminated
from memfeed.system.threads import end_all
from support import Made
from torture.failed_syncs import fail_sync
from torture.victims import ended, start
from torture.works import WORKS, Data, no_syncs, right

SCHEMA = infer([torch.arange(3)]).schema


@pytest.fixture
def memory():
    """A directory in memory where there is one: what is tested is told to the disk very often."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base) as directory, no_syncs():
        yield Path(directory)


@pytest.mark.parametrize(
    ("work", "name"),
    [
        ("convert", "x.memmap"),
        ("convert", "boxes/heap.bin"),
        ("convert", "late/start.memmap"),  # which a promotion writes
        ("convert", ".build/presence"),
        ("convert", ".build/extents"),
        ("convert", ".build/settings.json.tmp"),
        ("convert", "checksums.bin"),
        ("convert", "meta.json"),
        ("convert", "memfeed.json.tmp"),
        ("convert", "a.mf.build"),
        ("convert", "base"),
        ("columns", "x.memmap"),
        ("stream", "text/dims.memmap"),
        ("holes", ".build/closing.tmp"),
        ("holes", "x.copy"),
        ("overwrite", "base"),
        ("repair", "x.memmap"),
        ("repair", "a.mf.build"),
        ("filled", "late/heap.bin"),
        ("write", "text/heap.bin"),
        ("rewrite", ".build/presence"),
        ("append", "a.mf.build/x.memmap"),
        ("append", "a.mf.build/text/heap.bin"),
        ("append", "committed.tmp"),
        ("append", "generations.txt"),
        ("append", "a.mf"),
        ("concat", "a.mf.build/boxes/heap.bin"),
    ],
)
@pytest.mark.parametrize("often", [False, True])
def test_what_a_failed_sync_loses_is_written_again(memory, work, name, often):
    failed = fail_sync(memory, work, lambda one: one.path.endswith(f"/{name}"), often=often)
    assert failed or often, "there is no such sync"


def build_of(root, written):
    """Return a build of 8 rows, the first four of them durable."""
    build = Build.begin(root, SCHEMA, 8, None)
    build.writer().write(0, 4, rows(0, 4))
    build.sync()
    build.writer().write(4, written, rows(4, written))
    return build


def rows(first, count, plus=0):
    return [codec.pack(SCHEMA.fields[0], [torch.arange(3) + i + plus for i in range(first, first + count)])]


def test_a_row_that_is_written_while_a_sync_fails_is_absent_too(path, monkeypatch):
    """Its bytes are lost with the others', and its writer says afterwards that it is there."""
    lose = Units._lose
    monkeypatch.setattr(Units, "_lose", lambda units: noted(units))
    noted = Noted(lose)
    with claim(path) as root:
        build, inside = build_of(root, 2), threading.Event()
        writer = build.writer()
        mark = writer.mark

        def late(*args):
            inside.set()
            assert noted.begun.wait(60)
            mark(*args)

        writer.mark = late
        thread = threading.Thread(target=writer.write, args=(6, 2, rows(6, 2)))
        thread.start()
        assert inside.wait(60)
        with Faults(lambda one: one.kind == "sync", errno.EIO), pytest.raises(BuildError):
            build.sync()
        thread.join()
        assert build.presence().tolist() == [DURABLE] * 4 + [ABSENT] * 4


class Noted:
    """A function of which ``begun`` is set when it is called."""

    def __init__(self, real):
        self.real, self.begun = real, threading.Event()

    def __call__(self, *args):
        self.begun.set()
        return self.real(*args)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, Terminated])
def test_an_interrupt_while_a_sync_fails_hides_nothing(path, monkeypatch, interrupt):
    """Python calls a handler of signals once the system call has returned, with its error."""
    refused, once = files.refused, []

    def interrupted(*args):
        if not once:
            once.append(args)
            raise interrupt
        return refused(*args)

    with claim(path) as root:
        build = build_of(root, 4)
        monkeypatch.setattr(files, "refused", interrupted)
        with Faults(lambda one: one.kind == "sync", errno.EIO), pytest.raises(interrupt):
            build.sync()
        build.sync()
        assert build.presence().tolist() == [DURABLE] * 4 + [ABSENT] * 4


def test_an_interrupt_while_no_sync_fails_loses_nothing(path, monkeypatch):
    with claim(path) as root:
        build = build_of(root, 4)

        def interrupted():
            raise KeyboardInterrupt

        monkeypatch.setattr(build, "sync_columns", interrupted)
        try:
            raise OSError(errno.EIO, "of something else")
        except OSError:
            with pytest.raises(KeyboardInterrupt):
                build.sync()
        assert build.presence().tolist() == [DURABLE] * 4 + [WRITTEN] * 4


def test_another_error_of_a_commit_hides_no_failed_sync(path, monkeypatch):
    def refuse(*args):
        raise BuildError("metadata")

    data = Made(lambda i: torch.tensor([i]), 40)
    with monkeypatch.context() as m, pytest.raises(BuildError):
        m.setattr(commit, "write_metadata", refuse)
        with Faults(lambda one: one.kind == "sync" and one.path.endswith("value.memmap"), errno.EIO):
            memfeed.cache(data, path, workers=0, progress=False)
    build = path.with_name("a.mf.build") / ".build" / "presence"
    assert not build.exists() or not any(build.read_bytes()), "no row counts: the conversion tried to sync them"


def test_bytes_between_rows_are_on_the_disk_too(tmp_path):
    """What is left of rows that were lost has a checksum, as all bytes of a heap have."""
    (base := tmp_path / "base").mkdir()
    schema, armed = infer([torch.arange(2), torch.arange(3)]).schema, []

    def ragged(first, count):
        return [codec.pack(schema.fields[0], [torch.full((i % 5 + 1,), i + 1) for i in range(first, first + count)])]

    recorder = Recorder(base, lambda one: armed and one.path.endswith("heap.bin"))
    with recorder, claim(base / "a.mf") as root:
        build = Build.begin(root, schema, 8, None)
        writer = build.writer()
        writer.write(0, 3, ragged(0, 3))
        build.sync()
        writer.write(3, 3, ragged(3, 3))
        armed.append(True)
        with pytest.raises(BuildError, match="while waiting for the disk"):
            build.sync()
        heap = (root / "value" / "heap.bin").read_bytes()
        writer.write(3, 5, ragged(3, 5))
        build.commit(base / "a.mf")
    assert heap[6 * 8 : 6 * 8 + 8] == (4).to_bytes(8, "little"), "who reads these rows now still finds them"
    recorder.lose(tmp_path / "left")
    store = memfeed.open(tmp_path / "left" / "a.mf")
    store.verify()
    assert [row.tolist() for row in store] == [[i + 1] * (i % 5 + 1) for i in range(8)]


def test_bytes_between_rows_are_on_the_disk_though_the_presence_map_is_not(tmp_path, monkeypatch):
    """A disk that refuses one sync may refuse the next one too, of another file."""
    (base := tmp_path / "base").mkdir()
    schema, armed, sync = infer([torch.arange(2), torch.arange(3)]).schema, [], files.sync

    def ragged(first, count):
        return [codec.pack(schema.fields[0], [torch.full((i % 5 + 1,), i + 1) for i in range(first, first + count)])]

    def refuse_presence_too(fd):
        if armed == ["heap"] and files._name_of(fd).endswith("presence"):
            armed.append("presence")
            error = BuildError("presence")
            error.unsynced = True
            raise error
        sync(fd)

    def heap_fails(one):
        if armed == [] or not one.path.endswith("heap.bin"):
            return False
        armed[:] = ["heap"]
        return True

    monkeypatch.setattr(files, "sync", refuse_presence_too)
    with Recorder(base, heap_fails) as recorder, claim(base / "a.mf") as root:
        build = Build.begin(root, schema, 8, None)
        writer = build.writer()
        writer.write(0, 3, ragged(0, 3))
        build.sync()
        writer.write(3, 3, ragged(3, 3))
        armed.append(True)
        with pytest.raises(BuildError, match="heap.bin.*while waiting for the disk"):
            build.sync()
        assert build.presence().tolist() == [DURABLE] * 3 + [ABSENT] * 5
        writer.write(3, 5, ragged(3, 5))
        build.commit(base / "a.mf")
    recorder.lose(tmp_path / "left")
    store = memfeed.open(tmp_path / "left" / "a.mf")
    store.verify()
    assert [row.tolist() for row in store] == [[i + 1] * (i % 5 + 1) for i in range(8)]


def kill_after_failed_sync(path, step):
    """What a child does: it is killed once a sync has failed, before it can note that."""
    Units._lose = lambda units: os.kill(os.getpid(), signal.SIGKILL)
    with claim(path) as root:
        build = build_of(root, 4)
        with Faults(lambda one: one.kind == "sync" and one.path.endswith("value.memmap"), errno.EIO):
            build.sync() if step == "sync" else build.commit(path)


@pytest.mark.parametrize("step", ["sync", "commit"])
def test_rows_are_absent_if_a_process_was_killed_after_their_sync_failed(path, tmp_path, step):
    """The next process is told nothing by the system, though the machine runs on."""
    path.parent.mkdir(exist_ok=True)
    child = start(tmp_path / "stderr", kill_after_failed_sync, path, step)
    assert ended(child)
    assert child.exitcode == -signal.SIGKILL, (tmp_path / "stderr").read_text()
    with claim(path) as root:
        build = Build.resume(root)
        assert build.presence().tolist() == [DURABLE] * 4 + [ABSENT] * 4
        build.writer().write(4, 4, rows(4, 4))
        build.sync()
        assert Build.resume(root).presence().tolist() == [DURABLE] * 8, "they are forgotten once"
        build.commit(path)
    assert [row.tolist() for row in memfeed.open(path)] == [[i, i + 1, i + 2] for i in range(8)]


@pytest.mark.parametrize("step", ["sync", "commit"])
def test_rows_that_could_not_be_forgotten_are_forgotten_later(path, monkeypatch, step):
    def refuse(units):
        raise BuildError("presence")

    with claim(path) as root:
        build = build_of(root, 4)
        with monkeypatch.context() as m, Faults(lambda one: one.kind == "sync", errno.EIO):
            m.setattr(Units, "_lose", refuse)
            with pytest.raises(BuildError, match="while waiting for the disk"):
                build.sync()
        if step == "sync":
            build.sync()
        else:
            with pytest.raises(BuildError, match="found rows 4:8 never written"):
                build.commit(path)
        assert build.presence().tolist() == [DURABLE] * 4 + [ABSENT] * 4


def test_who_takes_over_a_store_that_is_filled_forgets_what_a_killed_process_synced(path, monkeypatch):
    leader_data, data = Data(), Data()
    leader = memfeed.cache(leader_data, path, lazily=True, workers=0, fields={"late": "jagged"}, progress=False)
    for i in range(6):
        _ = leader[i]
    store = memfeed.cache(data, path, lazily=True, workers=0, fields={"late": "jagged"}, progress=False)
    work, root = leader._view.supply, path.with_name("a.mf.build")
    (root / ".build" / SYNCING).touch()
    monkeypatch.setattr(DatasetSupply, "_keep", lambda self: None)  # a process that is killed does not sync
    work.stop()
    work.join()
    data.read.clear()
    store.finish()
    end_all()
    assert all(data.read[i] for i in range(6))
    right(path, WORKS["filled"])


@pytest.mark.parametrize("by_slice", [False, True])
def test_a_writer_whose_sync_failed_commits_nothing(path, monkeypatch, by_slice):
    """The rows that it lost were written long before, and would be zeros."""
    monkeypatch.setattr(building, "SYNC_SECONDS", 1e9)
    with (
        pytest.raises(BuildError, match="found a Writer after a write or a sync that failed"),
        memfeed.Writer(path, length=8, missing="zero") as w,
    ):
        for i in range(3):
            w[i] = torch.full((3,), i + 1)
        monkeypatch.setattr(building, "SYNC_SECONDS", 0.0)

        def write():
            if by_slice:
                w[3:5] = torch.full((2, 3), 4)
            else:
                w[3] = torch.full((3,), 4)

        with Faults(lambda one: one.kind == "sync", errno.EIO), pytest.raises(BuildError, match="while waiting"):
            write()
        with pytest.raises(BuildError, match="its absent says which to write again"):
            write()
    assert not path.exists()
    with memfeed.Writer(path, length=8, missing="zero") as w:
        assert w.absent == [(0, 8)]
        for i in range(8):
            w[i] = torch.full((3,), i + 1)
    assert [int(row[0]) for row in memfeed.open(path)] == [*range(1, 9)]


def test_a_row_is_not_written_again_unless_it_is_absent_on_the_disk(tmp_path):
    """Else a power loss would leave a durable row of old and new bytes."""
    base = tmp_path / "base"
    base.mkdir()
    with Recorder(base, lambda one: recorder.fails_now) as recorder:
        recorder.fails_now = False
        with claim(base / "a.mf") as root:
            build = build_of(root, 4)
            build.rewrites = True
            writer = build.writer()
            recorder.fails_now = True
            with pytest.raises(BuildError, match="while waiting for the disk"):
                writer.write(0, 2, rows(0, 2, plus=50))
            writer.write(0, 2, rows(0, 2, plus=50))
            files.sync_data(root / "value.memmap")
    recorder.lose(tmp_path / "left")
    presence = (tmp_path / "left" / "a.mf.build" / ".build" / "presence").read_bytes()
    assert DURABLE not in presence[:2], "after a power loss these rows are absent"


def test_a_replaced_store_is_removed_once_the_disk_has_the_exchange(path):
    """A sync of the directory failed after it; who finds the remains syncs it again before he removes them."""
    above, kinds = str(path.parent), []
    memfeed.cache(Data(0), path, workers=0, progress=False)

    def after_exchange(one):
        kinds.append(one.kind)
        return "exchange" in kinds and one.kind == "sync" and one.path == above

    with Faults(after_exchange, errno.EIO) as faults, pytest.raises(BuildError, match="while waiting for the disk"):
        memfeed.cache(Data(1), path, workers=0, progress=False, overwrite=True)
    if "exchange" not in kinds:
        pytest.skip("this file system cannot exchange")
    assert faults.failed is not None
    with Faults() as counted:
        memfeed.cache(Data(1), path, workers=0, progress=False)
    found = [(one.kind, one.path) for one in counted.operations]
    first = next(at for at, (kind, name) in enumerate(found) if kind == "unlink" and ".build.old/" in name)
    assert ("sync", above) in found[:first]
    right(path, WORKS["overwrite"])


def test_the_log_of_extents_is_on_the_disk_before_rows_are_durable(tmp_path):
    """Else heap space that durable rows have could be granted again, where it cannot be read from the rows."""
    (base := tmp_path / "base").mkdir()
    schema = infer([torch.arange(2), torch.arange(3)]).schema
    with Recorder(base) as recorder, claim(base / "a.mf") as root:
        build = Build.begin(root, schema, 2, None)
        build.writer().write(0, 2, [codec.pack(schema.fields[0], [torch.arange(2), torch.arange(3)])])
        build.sync()
        log = (root / ".build" / "extents").read_bytes()
    recorder.lose(tmp_path / "left")
    left = tmp_path / "left" / "a.mf.build" / ".build"
    assert (left / "presence").read_bytes() == bytes([DURABLE] * 2)
    assert log
    assert (left / "extents").read_bytes() == log


class Labelled(Made):
    """Targets that no column has."""

    def __init__(self, first, count):
        super().__init__([torch.full((2,), float(i)) for i in range(first, first + count)])
        self.targets = [10 + i for i in range(first, first + count)]


@pytest.mark.parametrize("fails", [False, True])
def test_targets_of_an_append_are_on_the_disk(tmp_path, fails):
    (base := tmp_path / "base").mkdir()
    path = base / "a.mf"
    memfeed.cache(Labelled(0, 3), path, workers=0, progress=False)
    with Recorder(base, lambda one: fails and one.path.endswith("a.mf.build/targets.bin")) as recorder:
        if fails:
            with pytest.raises(BuildError, match="while waiting for the disk"):
                memfeed.append(path, Labelled(3, 2), workers=0, progress=False)
        memfeed.append(path, Labelled(3, 2), workers=0, progress=False)
    recorder.lose(tmp_path / "left")
    left = memfeed.open(tmp_path / "left" / "a.mf")
    left.verify()
    assert left.targets == [10, 11, 12, 13, 14]


def test_a_repair_that_cannot_link_syncs_its_copies(tmp_path, monkeypatch):
    (base := tmp_path / "base").mkdir()
    path, work = base / "a.mf", WORKS["repair"]
    work.before(path)
    monkeypatch.setattr(file_copies, "link", lambda *_: False)
    with Recorder(base) as recorder:
        work.do(path)
    recorder.lose(tmp_path / "left")
    right(tmp_path / "left" / "a.mf", work)


def test_the_name_of_a_manifest_is_on_the_disk_before_its_store_has_a_name(tmp_path):
    """Its sync failed in the commit that wrote it; the next process only finishes that commit."""
    (base := tmp_path / "base").mkdir()
    path, root = base / "a.mf", base / "a.mf.build"

    def manifest_is_named(one):
        return one.path == str(root) and (root / "memfeed.json").exists()

    with Recorder(base, manifest_is_named) as recorder:
        with pytest.raises(BuildError, match="while waiting for the disk"):
            WORKS["convert"].do(path)
        WORKS["convert"].do(path)
    assert recorder.failed
    replay = Replay(recorder)
    while replay.step():
        pass
    replay.lose(tmp_path / "left", "lost", "lost")
    right(tmp_path / "left" / "a.mf", WORKS["convert"])
