"""For the batches of a task, narrow computed columns are gathered at once, and the rows of wide ones found at once."""

import numpy as np
import pytest
import torch

import memfeed
from memfeed.store.gather import Gather
from memfeed.store.windows import MaskColumn, WindowColumn
from memfeed.system.buffers import Pool

OFFSETS = {"frame": [-1, 0], "state": [-1, 0, 1]}


@pytest.fixture
def view(path):
    rows = 60
    made = {
        "frame": torch.arange(rows * 2000, dtype=torch.float32).view(rows, 2000),
        "state": torch.arange(rows * 3, dtype=torch.float32).view(rows, 3),
        "episode": torch.arange(rows) // 12,
    }
    return memfeed.cache(made, path, progress=False).windows(OFFSETS, within="episode")


def note_calls(monkeypatch, kind, name, calls):
    """Let a method add the name of its field, and the length of its first argument, to `calls`."""
    plain = getattr(kind, name)

    def noting(self, rows, *more):
        calls.append((self.field.name, len(rows)))
        return plain(self, rows, *more)

    monkeypatch.setattr(kind, name, noting)


@pytest.mark.parametrize("count", [8, 19, 24])
def test_narrow_windows_of_several_batches_are_gathered_at_once(view, monkeypatch, count):
    calls = {}
    for kind, name in (WindowColumn, "base_rows"), (WindowColumn, "gather_windows"), (MaskColumn, "gather_into"):
        note_calls(monkeypatch, kind, name, calls.setdefault(name, []))
    rows = np.random.default_rng(0).permutation(60)[:count]
    columns = list(view._view.columns)
    batches = list(Gather(columns, [Pool() for _ in columns]).several(rows, 8))
    sizes = [8] * (count // 8) + [count % 8] * (count % 8 > 0)
    assert [size for name, size in calls["gather_windows"] if name == "state"] == [count]
    assert [size for name, size in calls["gather_windows"] if name == "frame"] == sizes, "wide ones batch by batch"
    assert [size for name, size in calls["base_rows"] if name == "frame"] == [count], "their rows for all batches"
    assert sum(size for name, size in calls["gather_into"] if name == "frame_mask") == count
    expected = view[torch.from_numpy(rows)]
    for batch, start in zip(batches, range(0, count, 8), strict=True):
        for column, leaf in zip(columns, batch, strict=True):
            assert torch.equal(leaf, expected[column.field.name][start : start + 8]), column.field.name
