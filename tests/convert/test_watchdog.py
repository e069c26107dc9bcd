"""Workers that stop, die or are forked: each is named, and none decides what happens to the others' rows."""

import multiprocessing
import os
import signal
import sys
import threading

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

import memfeed
from memfeed.building.rows import RowWriter
from memfeed.convert import watchdog
from memfeed.convert.watchdog import Watchdog
from support import wait_until

ROWS = 64
QUIET = {"progress": False, "allow": "random"}  # allow_random: the workers read the probed samples again


class Numbers(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return torch.full((4,), i)


class KillsItsWorker(Numbers):
    def __init__(self, row):
        self.row = row

    def __getitem__(self, i):
        if i == self.row and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


class ForksAndReturns(Numbers):
    def __getitem__(self, i):
        if i == 40:
            os.fork()  # the child returns too
        return super().__getitem__(i)


def values(store):
    return [row[0].item() for row in store]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads the state of a process from /proc")
def test_a_worker_that_stops_outside_the_dataset_is_named(tmp_path, monkeypatch, capfd):
    stopped = multiprocessing.Value("q", 0)
    write = RowWriter.write_runs

    def stop_once(self, *arguments):
        with stopped.get_lock():
            is_first = stopped.value == 0 and get_worker_info() is not None
            if is_first:
                stopped.value = os.getpid()
        if is_first:
            os.kill(os.getpid(), signal.SIGSTOP)
        return write(self, *arguments)

    monkeypatch.setattr(RowWriter, "write_runs", stop_once)
    monkeypatch.setattr(watchdog, "STALL_SECONDS", 0.5)
    waker = threading.Timer(4.0, lambda: os.kill(stopped.value, signal.SIGCONT))
    waker.start()
    store = memfeed.cache(Numbers(), tmp_path / "s.mf", workers=2)
    waker.join()
    assert values(store) == list(range(ROWS))
    printed = capfd.readouterr().err
    assert f"(pid {stopped.value}, stopped by a signal) has been writing sample" in printed
    assert "stop it with Ctrl-C" in printed


def test_each_step_of_a_process_is_watched(monkeypatch, capfd):
    monkeypatch.setattr(watchdog, "STALL_SECONDS", 0.1)
    watched = Watchdog(3)
    watched.begin_read(0, 5, 3)
    watched.record(1, watchdog.WAITING)
    watched.record(2, watchdog.ENDED)
    printed = ""

    def both_are_told():
        nonlocal printed
        printed += capfd.readouterr().err
        return "worker 0" in printed and "worker 1" in printed

    with watched.watch(lambda: [os.getpid()] * 3):
        wait_until(both_are_told)
    assert "worker 0" in printed
    assert "has been reading samples 5 to 7 for" in printed
    assert "has waited for its next rows" in printed
    assert "worker 2" not in printed


def test_a_sample_that_kills_its_worker_is_named(tmp_path):
    expected = r'died while it read sample 37 \(pid \d+, killed by signal 9, Killed\).*on_error="skip"'
    for _ in range(2):
        with pytest.raises(memfeed.errors.BuildError, match=expected):
            memfeed.cache(KillsItsWorker(37), tmp_path / "s.mf", workers=2, **QUIET)


@pytest.mark.parametrize("row", [0, 37, ROWS - 1])
def test_a_sample_that_kills_its_worker_is_skipped(tmp_path, row):
    with pytest.warns(RuntimeWarning, match=f"sample {row} is left out: two worker processes died"):
        store = memfeed.cache(KillsItsWorker(row), tmp_path / "s.mf", workers=2, on_error="skip", **QUIET)
    assert store.skipped == (row,)
    assert values(store) == [i for i in range(ROWS) if i != row]


def test_a_worker_that_was_killed_by_chance_loses_no_sample(tmp_path):
    class KilledOnce(KillsItsWorker):
        def __getitem__(self, i):
            if i == self.row and not (tmp_path / "killed").exists() and get_worker_info() is not None:
                (tmp_path / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return Numbers.__getitem__(self, i)

    store = memfeed.cache(KilledOnce(37), tmp_path / "s.mf", workers=2, on_error="skip", **QUIET)
    assert store.skipped == ()
    assert values(store) == list(range(ROWS))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_child_that_the_dataset_forks_is_ended(tmp_path, workers, capfd):
    store = memfeed.cache(ForksAndReturns(), tmp_path / "s.mf", workers=workers, progress=False)
    assert values(store) == list(range(ROWS))
    store.verify()
    assert "which the dataset forked, returned from it" in capfd.readouterr().err


def test_a_daemonic_process_converts_without_workers(tmp_path):
    def convert(path):
        memfeed.cache(Numbers(), path, workers=2, progress=False)

    process = multiprocessing.get_context("fork").Process(target=convert, args=(tmp_path / "s.mf",), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert values(memfeed.open(tmp_path / "s.mf")) == list(range(ROWS))


class Exits(Numbers):
    def __getitem__(self, i):
        if i == 37:
            sys.exit(0)
        return super().__getitem__(i)


class ExitsTogether(Exits):
    def __getitems__(self, rows):
        return [self[i] for i in rows]


@pytest.mark.parametrize("kind", [Exits, ExitsTogether])
def test_a_sample_that_ends_its_worker_by_sys_exit_is_named(tmp_path, kind):
    with pytest.raises(
        memfeed.errors.SampleError, match="sample 37: the dataset raised SystemExit: 0; fix the dataset"
    ):
        memfeed.cache(kind(), tmp_path / "s.mf", workers=2, **QUIET)
    with pytest.raises(SystemExit):
        memfeed.cache(kind(), tmp_path / "s.mf", workers=0, **QUIET)
