"""Forked children of a process that fills a store: it brings their rows, and they get the errors."""

import multiprocessing

import pytest
import torch

import memfeed
from forked_programs import run_program
from memfeed.building.build import Build
from memfeed.errors import BuildError, MemfeedError
from support import Made, cache

ROWS, BAD = 60, 41


def row(index):
    if index == BAD:
        raise ValueError("no such file")
    return {"x": torch.full((5,), index)}


def read(store, index, sender):
    try:
        sender.send(store[index]["x"].tolist())
    except MemfeedError as error:
        sender.send(f"{type(error).__name__}: {error}")


def in_child(store, index):
    """Return what a forked child gets for a row, or the text of its error."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=read, args=(store, index, sender))
    child.start()
    try:
        assert receiver.poll(60), "it waits for ever"
        return receiver.recv()
    finally:
        child.kill()
        child.join()


def test_a_forked_child_gets_rows_and_the_errors_of_rows(tmp_path):
    store = cache(Made(row, ROWS), tmp_path / "s.mf", lazily=True, workers=2, on_error="raise")
    assert in_child(store, 5) == [5] * 5
    assert in_child(store, BAD).startswith("SampleError: sample 41: the dataset raised ValueError: no such file")
    assert in_child(store, ROWS - 1) == [ROWS - 1] * 5
    store._view.supply.stop()
    store._view.supply.join()
    assert "come no more" in in_child(store, BAD)


ANOTHER_PROCESS_ENDS_IT = """
import os, sys, torch, memfeed
from support import Made
store = memfeed.cache(Made(lambda i: {"x": torch.full((5,), i)}, 60), sys.argv[1], lazily=True, workers=0)
store[:50]
child = os.fork()
if not child:
    store[:60]
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_store_is_committed_at_the_end_though_another_process_brought_its_last_rows(tmp_path):
    """With ``workers=0`` samples are compared before a commit in the thread that reads, which may read no more."""
    run_program(ANOTHER_PROCESS_ENDS_IT, tmp_path / "s.mf", at=tmp_path)
    assert memfeed.open(tmp_path / "s.mf")[59]["x"].tolist() == [59] * 5


def test_why_a_full_store_was_not_committed_is_told(tmp_path, monkeypatch, capfd):
    def commit(*arguments, **options):
        raise BuildError("found no address space")

    monkeypatch.setattr(Build, "commit", commit)
    store = memfeed.cache(Made(lambda i: {"x": torch.full((5,), i)}, 60), tmp_path / "s.mf", lazily=True, workers=0)
    with pytest.raises(MemfeedError, match="found no address space"):
        store.finish()
    store._view.supply.join()
    assert (
        "60 of 60 rows are kept; the same call goes on from there. The commit failed: found no"
        in capfd.readouterr().err
    )
