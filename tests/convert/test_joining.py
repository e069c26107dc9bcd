"""A process that joins others who fill a store, while they commit it."""

import threading
import time
from multiprocessing.connection import Connection

import pytest

from memfeed.convert import lazily
from memfeed.convert.dataset_supply import DatasetSupply
from memfeed.convert.inputs import classify_input
from memfeed.convert.jobs import RowJob
from memfeed.convert.options import ConvertOptions
from memfeed.errors import BuildError, StoreError
from memfeed.system.threads import end_all
from support import Made, cache


def test_a_store_that_is_committed_while_a_process_joins_is_opened(tmp_path, monkeypatch):
    """The work directory goes first, a moment before the store has its name."""
    path, data = tmp_path / "a.mf", Made(lambda i: {"x": float(i)}, 8)
    begun, unshared = [True, True, False], []

    def join(root):
        raise StoreError(f"{root}: found a build that cannot be read (No such file or directory)")

    monkeypatch.setattr(lazily, "is_shared", lambda root: True)
    monkeypatch.setattr(lazily, "share", lambda root: "shared")
    monkeypatch.setattr(lazily, "close_lock", unshared.append)
    monkeypatch.setattr(lazily.Build, "join", join)
    monkeypatch.setattr(lazily.Build, "is_begun", lambda root: begun.pop(0))
    options = ConvertOptions(workers=0, progress=False)
    assert lazily._join(path, classify_input(data), options) is None
    assert unshared == ["shared"]
    begun += [True] * 9
    monkeypatch.setattr(lazily, "JOIN_SECONDS", 0.1)
    monkeypatch.setattr(lazily, "WAIT_SECONDS", 0.15)
    with pytest.raises(StoreError, match="cannot be read"):
        lazily._join(path, classify_input(data), options)
    monkeypatch.undo()
    assert len(cache(data, path)) == 8


@pytest.mark.parametrize(
    ("workers", "error"),
    [
        pytest.param(0, None, marks=pytest.mark.long),
        (2, None),
        (2, FileNotFoundError),
        (2, BuildError),
    ],
)
def test_a_store_that_is_committed_before_the_workers_of_a_process_start_is_read(workers, error, tmp_path, monkeypatch):
    """All files of the build have other names then, and what workers open first is not there."""
    path, data = tmp_path / "a.mf", Made(lambda i: {"x": float(i)}, 40)
    leader = cache(data, path, lazily=True, workers=0)
    begin = DatasetSupply.begin

    def begin_late(filler, backing):
        leader.finish()
        begin(filler, backing)

    def fail(job, worker):
        raise error("found no file")

    monkeypatch.setattr(DatasetSupply, "begin", begin_late)
    if error is not None:
        monkeypatch.setattr(RowJob, "run", fail)
    store = cache(data, path, lazily=True, workers=workers)
    store.finish()
    assert store._view.supply is None
    assert [store[i]["x"] for i in range(40)] == list(range(40))
    end_all()


def test_rows_that_another_process_commits_are_not_read_by_the_caller(tmp_path):
    """Its first look at them opens the build."""
    path, data = tmp_path / "a.mf", Made(lambda i: {"x": float(i)}, 40)
    leader = cache(data, path, lazily=True, workers=0)
    store = cache(data, path, lazily=True, workers=0)
    work = store._view.supply
    compute = work._compute

    def compute_late(absent):
        leader.finish()
        compute(absent)

    work._compute = compute_late
    assert [store[i]["x"] for i in range(40)] == list(range(40))
    store.finish()
    end_all()


def test_the_end_of_a_process_does_not_write_to_pipes_that_are_closed(tmp_path, monkeypatch):
    """The thread that has settled the store closes them at the same time."""
    send = Connection._send_bytes

    def send_late(self, data):
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.05)  # after the check that the pipe is open
        send(self, data)

    monkeypatch.setattr(Connection, "_send_bytes", send_late)
    for number in range(3):
        store = cache(Made(lambda i: {"x": float(i)}, 40), tmp_path / f"{number}.mf", lazily=True, workers=2)
        store.finish()
        end_all()
        assert store._view.supply is None
