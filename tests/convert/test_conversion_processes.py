"""Worker processes: what they find in them, how they end, and what the builder is told."""

import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import memfeed
from memfeed.building.build import Build
from memfeed.errors import (
    BuildError,
    SampleError,
)
from support import Made, cache, equal, rich_sample, wait_until
from torture.victims import ended, start


def test_a_killed_worker_leaves_a_build_that_resumes(path):
    class Deadly(Made):
        def __getitem__(self, index):
            if index == 120 and not path.with_name("died").exists() and get_worker_info() is not None:
                path.with_name("died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.full((3,), index)

    dataset = Deadly(None, 200)
    with pytest.raises(
        BuildError, match=r"a worker process died while it read sample 120 .*rows are kept in .*the same call resumes"
    ):
        cache(dataset, path, workers=2)
    assert not path.exists()
    store = cache(dataset, path, workers=2)
    assert [int(row[0]) for row in store] == list(range(200))


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no /proc")
def test_processes_do_not_move_each_other_in_an_open_file(path, tmp_path):
    (tmp_path / "records").write_bytes(b"".join(i.to_bytes(4096, "little") for i in range(200)))

    def record(index):
        file.seek(index * 4096)
        time.sleep(0.0002)
        return int.from_bytes(file.read(8), "little")

    with open(tmp_path / "records", "rb") as file:
        assert list(cache(Made(record, 200), path, workers=2)) == list(range(200))
        loader = memfeed.Loader(Made(record, 200), None, num_workers=2, cache=path.with_name("filled.mf"))
        assert [int(row) for row in loader] == list(range(200))
        loader.store.finish()


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no /proc")
def test_processes_read_one_open_archive(path, tmp_path):
    with zipfile.ZipFile(tmp_path / "records.zip", "w") as archive:
        for i in range(200):
            archive.writestr(str(i), str(i).rjust(9000))
    with zipfile.ZipFile(tmp_path / "records.zip") as archive:
        store = cache(Made(lambda i: int(archive.read(str(i))), 200), path, workers=2)
        assert list(store) == list(range(200))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_dataset_says_of_workers_is_no_death_of_ours(path, workers):
    said = "Caught RuntimeError in DataLoader worker process 0; DataLoader worker (pid 7) is killed"

    class Nested(Made):
        def __getitem__(self, index):
            if index == 30:
                raise RuntimeError(said)
            return index

    class Unready(IterableDataset):
        def __iter__(self):
            if get_worker_info() is not None or workers == 0:
                raise RuntimeError(said)
            yield from range(100)

    with pytest.raises(SampleError, match=r"sample 30: the dataset raised RuntimeError: Caught"):
        cache(Nested(None, 100), path, workers=workers)
    with pytest.raises(SampleError if workers else RuntimeError, match=r"RuntimeError: Caught|^Caught"):
        cache(Unready(), path.with_name("b.mf"), workers=workers)


def test_a_death_is_told_between_reports(path, monkeypatch):
    """torch's handler would raise it in the midst of a sync, or of ending the other workers."""
    sync, whole = Build.sync_if_due, []

    class Slow(Made):
        def __getitem__(self, index):
            time.sleep(0.02)
            return super().__getitem__(index)

    def killing(build):
        if not whole:
            worker = next(child for child in multiprocessing.active_children() if child.daemon)
            whole.append(False)
            os.kill(worker.pid, signal.SIGKILL)
            wait_until(lambda: not worker.is_alive())  # so that the death could be told here
            whole[0] = True
        sync(build)

    with monkeypatch.context() as m, pytest.raises(BuildError, match="a worker process died"):
        m.setattr(Build, "sync_if_due", killing)
        cache(Slow(torch.tensor, 200), path, workers=2)
    assert whole == [True]
    assert not multiprocessing.active_children()
    assert len(cache(Made(torch.tensor, 200), path, workers=2)) == 200


def test_an_exception_that_cannot_be_pickled_arrives(path):
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__(a)
            self.lock = __import__("threading").Lock()

    def make(i):
        if i == 71:
            raise Odd(1, 2)
        return i

    with pytest.raises(SampleError, match="sample 71: the dataset raised Odd"):
        cache(Made(make, 200), path, workers=2)


def in_child(path, action):
    child = start(path.with_name("stderr"), action, path)
    assert ended(child)
    assert child.exitcode == 0, path.with_name("stderr").read_text()


def spawning(path):
    multiprocessing.set_start_method("spawn", force=True)
    store = cache(Made(rich_sample, 40), path, workers=1)
    assert all(equal(store[i], rich_sample(i)) for i in range(40))


@pytest.mark.long
def test_workers_may_be_spawned(path):
    in_child(path, spawning)


class Described(IterableDataset):
    """What a worker's code sees of its worker, and numbers that it draws."""

    def __iter__(self):
        info = get_worker_info()
        if info is None:  # the probe
            yield (0,) * 4 + (0.0,) * 3
            return
        assert (info.dataset is self) or info.dataset.__class__ is Described
        yield (
            info.id,
            info.num_workers,
            info.seed,
            torch.get_num_threads(),
            float(torch.rand(())),
            random.random(),
            float(np.random.rand()),
        )


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_are_those_of_dataloader(path):
    store = cache(Described(), path, workers=3, allow="random")
    loader = DataLoader(Described(), batch_size=None, num_workers=3, generator=torch.Generator())
    assert sorted(tuple(row) for row in store) == sorted(tuple(sample) for sample in loader)
    assert [row[3] for row in store] == [1] * 3


def test_a_death_is_noticed_though_a_child_of_the_worker_holds_its_pipe(path):
    class Forking(Made):
        def __getitem__(self, index):
            if index == 30 and get_worker_info() is not None:
                child = os.fork()
                if not child:
                    time.sleep(60)
                    os._exit(0)
                path.with_name("child").write_text(str(child))
                os.kill(os.getpid(), signal.SIGKILL)
            return index

    begun = time.monotonic()
    try:
        with pytest.raises(
            BuildError,
            match=r"a worker process died while it read sample 30 \(pid \d+, killed by signal 9, Killed\); expected",
        ):
            cache(Forking(None, 100), path, workers=1)
    finally:
        os.kill(int(path.with_name("child").read_text()), signal.SIGKILL)
    assert time.monotonic() - begun < 20


def test_a_worker_that_exits_is_a_death(path):
    class Exiting(Made):
        def __getitem__(self, index):
            if index == 30 and get_worker_info() is not None:
                os._exit(3)
            return index

    with pytest.raises(BuildError, match=r"a worker process died while it read sample 30 \(pid \d+, exit status 3\)"):
        cache(Exiting(None, 100), path, workers=2)


def test_a_worker_that_cannot_import_the_program_says_what_a_script_needs(path, monkeypatch):
    monkeypatch.setattr("memfeed.convert.processes.prepare_like_dataloader", lambda *_: os._exit(1))
    dataset = Made(lambda i: torch.full((3,), i), 200)
    with pytest.raises(BuildError, match=r"a worker process died \(.*use fewer workers="):
        cache(dataset, path, workers=2)
    monkeypatch.setattr("memfeed.system.machine.start_method", lambda: "spawn")
    with pytest.raises(BuildError, match=r"died before it began \(.* needs if __name__ == '__main__':"):
        cache(dataset, path, workers=2)


@pytest.mark.long
@pytest.mark.parametrize("use", ["Loader(data, 8, num_workers=1, cache=path)", "cache(data, path, workers=1)"])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_without_a_guard_ends_where_processes_import_it(tmp_path, method, use):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, memfeed\n"
        f"torch.multiprocessing.set_start_method({method!r}, force=True)\n"
        "data = torch.utils.data.Subset(torch.utils.data.StackDataset(torch.zeros(99, 3)), range(99))\n"
        f"path = {str(tmp_path / 'a.mf')!r}\n"
        f"print(len(list(memfeed.{use})))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert "expected that only the builder does" in done.stderr
    assert "died before it began" in done.stderr or "no worker process could be started" in done.stderr
    assert "A script needs if __name__ == '__main__':" in done.stderr


def test_no_worker_starts_unasked_where_it_would_import_the_program(path, monkeypatch, capsys):
    monkeypatch.setattr("memfeed.system.machine.start_method", lambda: "forkserver")
    monkeypatch.setattr("memfeed.convert.processes._start", lambda *_: pytest.fail("a worker was started"))

    def slow(index):
        time.sleep(0.01)
        return torch.full((3,), index)

    assert len(memfeed.cache(Made(slow, 150), path)) == 150
    assert re.search(
        r"workers=0 is used, because .*'forkserver'.* pass workers=\d+, in a script", capsys.readouterr().err
    )


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_dataset_that_cannot_be_sent_says_what_to_do(path, method):
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    try:
        with pytest.raises(BuildError, match=rf"cannot be sent to a worker .*pickle.* with '{method}'.* workers=0"):
            cache(Made(lambda index: index, 200), path, workers=1)
    finally:
        multiprocessing.set_start_method(before, force=True)
