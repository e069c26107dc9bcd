import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfeed.store.copied_ranges import PART_BYTES, copy_run, select_rows
from memfeed.system import share
from memfeed.system.share import Threads

ROW = PART_BYTES // 4


@settings(max_examples=30)
@given(index=st.lists(st.integers(0, 39), max_size=40), threads=st.integers(1, 4))
def test_rows_in_parts_are_those_of_one_call(index, threads):
    data = torch.arange(40 * ROW // 4, dtype=torch.int32).view(40, -1)
    rows, out = torch.tensor(index, dtype=torch.int64), torch.empty(len(index), ROW // 4, dtype=torch.int32)
    with Threads(threads).in_use():
        assert select_rows(data, rows, out) is out
        assert torch.equal(out, data[rows])
        assert torch.equal(copy_run(data[3 : 3 + len(index)], out[:37]), data[3 : 3 + len(index)])


def test_large_rows_are_shared_and_small_ones_are_not(monkeypatch):
    shared = []
    monkeypatch.setattr(
        "memfeed.store.copied_ranges.share", lambda *a, **k: (shared.append(a[0]), share.share(*a, **k))
    )
    data = torch.zeros(64, ROW, dtype=torch.uint8)
    select_rows(data, torch.arange(4), torch.empty(4, ROW, dtype=torch.uint8))
    assert shared == []
    select_rows(data, torch.arange(64), torch.empty(64, ROW, dtype=torch.uint8))
    assert shared == [64]


@pytest.mark.parametrize("run", [slice(0, 0), slice(5, 6), slice(0, 64)])
def test_a_run_of_rows(run):
    data = torch.rand(64, ROW // 4)
    with Threads(2).in_use():
        out = copy_run(data[run], torch.empty(len(data[run]), ROW // 4))
    assert torch.equal(out, data[run])
