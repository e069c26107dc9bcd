"""Hits and misses are counted over the processes of a run, and the files of a run are removed."""

import os

import pytest

from memfeed.memoizing import kept
from memfeed.memoizing.kept import Counts, begin_run
from memfeed.memoizing.memo import remove_counts_of_others
from memfeed.store.format import WORK_DIRECTORY


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFEED_RUN", "run-1")
    (tmp_path / WORK_DIRECTORY).mkdir()
    return tmp_path / WORK_DIRECTORY


def test_a_run_has_one_id(monkeypatch):
    monkeypatch.delenv("MEMFEED_RUN", raising=False)
    assert begin_run()
    run = os.environ["MEMFEED_RUN"]
    assert not begin_run()  # as a child, which inherits it
    assert os.environ["MEMFEED_RUN"] == run
    monkeypatch.setenv("MEMFEED_RUN", run)  # so that it is removed after the test


def test_calls_are_added_up(directory):
    one, other = Counts(directory.parent, "f"), Counts(directory.parent, "g")
    assert one.totals() == (0, 0, 0.0, 0)
    one.add(1, 2, 0.5)
    one.add(3, 0, 0.25)
    other.add(7, 7, 7.0)
    assert one.totals() == (4, 2, 0.75, 1)
    assert other.totals() == (7, 7, 7.0, 1)


def test_processes_are_added_up(directory, monkeypatch):
    one = Counts(directory.parent, "f")
    one.add(1, 1, 1.0)
    monkeypatch.setattr(kept.os, "getpid", lambda: 12345)
    one.add(10, 0, 2.0)  # the counts of the parent are not its own
    assert one.totals() == (11, 1, 3.0, 2)


def test_another_run_does_not_count_and_is_removed(directory, monkeypatch):
    one = Counts(directory.parent, "f")
    one.add(1, 0, 0.0)
    monkeypatch.setenv("MEMFEED_RUN", "run-2")
    assert one.totals() == (0, 0, 0.0, 0)
    remove_counts_of_others(directory)
    assert list(directory.iterdir()) == []


def test_the_counts_of_this_run_stay(directory):
    one = Counts(directory.parent, "f")
    one.add(1, 0, 0.0)
    remove_counts_of_others(directory)
    assert one.totals()[0] == 1
    one.remove()
    assert list(directory.iterdir()) == []
    one.remove()


def test_without_room_the_process_counts_for_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFEED_RUN", "run-1")
    one = Counts(tmp_path, "f")  # there is no such directory
    one.add(2, 3, 1.0)
    assert one.totals() == (2, 3, 1.0, 1)


def test_a_file_that_is_cut_is_left_out(directory):
    one = Counts(directory.parent, "f")
    one.add(1, 0, 0.0)
    (directory / "counts-f-run-1-99").write_bytes(b"12")
    assert one.totals() == (1, 0, 0.0, 1)
