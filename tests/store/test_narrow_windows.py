"""Narrow computed columns (masks, states) are gathered once for the batches of a task."""

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


@pytest.mark.parametrize("count", [8, 19, 24])
def test_narrow_windows_of_several_batches_are_gathered_at_once(view, monkeypatch, count):
    calls = []
    for kind in (WindowColumn, MaskColumn):
        plain = kind.gather_into
        monkeypatch.setattr(
            kind,
            "gather_into",
            lambda self, rows, out, plain=plain: calls.append((self.field.name, len(rows))) or plain(self, rows, out),
        )
    rows = np.random.default_rng(0).permutation(60)[:count]
    columns = list(view.columns)
    batches = list(Gather(columns, [Pool() for _ in columns]).several(rows, 8))
    sizes = [8] * (count // 8) + [count % 8] * (count % 8 > 0)
    assert [size for name, size in calls if name == "state"] == [count]
    assert [size for name, size in calls if name == "frame"] == sizes, "wide columns are gathered batch by batch"
    assert sum(size for name, size in calls if name == "frame_mask") == count
    expected = view[torch.from_numpy(rows)]
    for batch, start in zip(batches, range(0, count, 8), strict=True):
        for column, leaf in zip(columns, batch, strict=True):
            assert torch.equal(leaf, expected[column.field.name][start : start + 8]), column.field.name
