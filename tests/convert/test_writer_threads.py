from concurrent.futures import ThreadPoolExecutor

import torch

import memfeed


def test_threads_may_share_a_writer(tmp_path):
    with memfeed.Writer(tmp_path / "s.mf") as writer, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: writer.append({"x": torch.full((100,), i)}), range(2000)))
    assert sorted(row["x"][0].item() for row in memfeed.open(tmp_path / "s.mf")) == list(range(2000))


def test_threads_may_assign_rows(tmp_path):
    with memfeed.Writer(tmp_path / "s.mf", length=2000) as writer, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: writer.__setitem__(i, {"x": torch.full((10,), i)}), range(2000)))
    assert [row["x"][0].item() for row in memfeed.open(tmp_path / "s.mf")] == list(range(2000))
