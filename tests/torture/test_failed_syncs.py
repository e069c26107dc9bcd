"""A sync that fails once, as Linux tells of it: once, and the next one succeeds though the bytes are lost."""

import errno
import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch

import memfeed
from disk import Faults, Recorder
from memfeed.building import commit
from memfeed.building.build import Build
from memfeed.building.claim import claim
from memfeed.building.rows import ABSENT, DURABLE, WRITTEN
from memfeed.building.space import Turn
from memfeed.errors import BuildError
from memfeed.schema import codec
from memfeed.schema.infer import infer
from memfeed.system import files
from memfeed.system.signals import Terminated
from support import Made
from torture.failed_syncs import fail_sync
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
    monkeypatch.setattr(Turn, "all_over", staticmethod(noted := Noted(Turn.all_over)))
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

        def interrupted(path):
            raise KeyboardInterrupt

        monkeypatch.setattr(build, "sync_file", interrupted)
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
    assert presence[:2] == bytes(2), "the disk says that these rows are absent"


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
