"""Datasets that raise, and iterables that end too early."""

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
