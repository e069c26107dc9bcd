"""Datasets that raise, and iterables that end too early."""

import os
import time

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from memfeed.errors import (
    BuildError,
    SampleError,
)
from support import Made, cache, equal, rich_sample


class Bad(Made):
    def __getitem__(self, index):
        if index in (5, 71, 199):
            raise ValueError(f"broken file {index}")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_raises(path, workers):
    with pytest.raises(
        SampleError, match=r"sample \d+: the dataset raised ValueError: broken file \d+; fix the dataset"
    ) as caught:
        cache(Bad(rich_sample, 200), path, workers=workers)
    assert isinstance(caught.value.__cause__, ValueError)
    assert not path.exists()


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_raise_can_be_left_out(path, workers):
    dataset = Bad(rich_sample, 200)
    store = cache(dataset, path, workers=workers, on_error="skip")
    assert store.skipped == (5, 71, 199)
    assert len(store) == 197
    kept = [i for i in range(200) if i not in store.skipped]
    for row, i in enumerate(kept):
        assert equal(store[row], dataset[i])
    store.verify()
    assert len(cache(dataset, path, on_error="skip")) == 197


def test_the_first_sample_that_raises_is_named_whichever_worker_is_ready_first(path):
    def make(i):
        time.sleep(0.3 if i == 30 else 0.001)
        if i in (30, 77, 131):
            raise ValueError("broken")
        return i

    with pytest.raises(SampleError, match=r"^sample 30: .*\[30 rows are kept"):
        cache(Made(make, 200), path, workers=3)


def test_rows_that_were_probed_need_no_worker(path):
    store = cache(Made(lambda i: {"pid": os.getpid(), "i": i}, 16), path, workers=2)
    assert {int(row["pid"]) for row in store} == {os.getpid()}


class Growing(IterableDataset):
    def __init__(self, n, dies=None):
        self.n, self.dies = n, dies

    def __iter__(self):
        info = get_worker_info()
        for i in range(info.id, self.n, info.num_workers) if info else range(self.n):
            if i == self.dies:
                raise ValueError("dead")
            yield torch.tensor([i])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_that_became_shorter_is_refused(path, workers, monkeypatch):
    monkeypatch.setattr("memfeed.convert.write_run.MOST_ROWS_A_WRITE", 16)
    with pytest.raises(SampleError):
        cache(Growing(400, dies=301), path, workers=workers)
    with pytest.raises(BuildError, match=r"ended after [\d,]+ samples; expected at least .*remove that directory"):
        cache(Growing(60), path, workers=workers)
    assert sorted(int(row) for row in cache(Growing(400), path, workers=workers)) == list(range(400))
