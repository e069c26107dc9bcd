"""What is expensive to look at is looked at once: the input, its pipeline, a store that exists, and its manifest."""

import sys
import threading
from collections import Counter

import pytest
import torch

from memfeed import Loader
from memfeed.convert.inputs import classify_input
from memfeed.convert.probe import probe_input
from memfeed.store import format
from memfeed.store.backing import open_backing
from support import Made, cache

COUNTED = {one.__code__: one.__name__ for one in (classify_input, probe_input, open_backing, format.decode)}


def calls(action):
    """Return how often each counted function was called in any thread, and what ``action`` returns."""
    found = Counter()

    def note(frame, event, argument):
        if event == "call" and frame.f_code in COUNTED:
            found[COUNTED[frame.f_code]] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        result = action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found, result


def row(index):
    return {"x": torch.full((5,), index)}


@pytest.mark.parametrize("options", [{}, {"lazily": True}, {"split": "auto"}], ids=["at once", "lazily", "split"])
def test_each_is_looked_at_once(tmp_path, options):
    path = tmp_path / "a.mf"

    def convert():
        store = cache(Made(row, 40), path, workers=0, **options)
        store.finish()
        return store

    new, store = calls(convert)
    assert len(store) == 40
    is_opened = {} if "lazily" in options else {"open_backing": 1}
    # what is decoded is the manifest as it is written, which open() must not refuse, and the one that is read
    assert new == {"classify_input": 1, "probe_input": 1, "decode": 2, **is_opened}
    existing, store = calls(convert)
    assert len(store) == 40
    assert existing == {"classify_input": 1, "probe_input": 1, "open_backing": 1, "decode": 1}


def test_a_loader_looks_at_each_once(tmp_path):
    def load():
        loader = Loader(Made(row, 40), 4, cache=tmp_path / "a.mf")
        assert len(list(loader)) == 10
        return loader

    new, loader = calls(load)
    del loader
    assert new["classify_input"] == new["probe_input"] == 1
    assert new["decode"] <= 2
    assert not new["open_backing"]
