"""Forked children of a process that fills a store: it brings their rows, and they get the errors."""

import multiprocessing

import torch

from memfeed.errors import MemfeedError
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
