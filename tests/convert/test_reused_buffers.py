"""A store is exactly what the dataset gives, also where the dataset uses its memory again."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import memfeed

N = 1000


class Filled(Dataset):
    """Fills one buffer and returns it."""

    def __init__(self):
        self.buffer = torch.zeros(3)

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.buffer.fill_(index)


class FilledTogether(Filled):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class FilledArrays(Filled):
    def __init__(self):
        self.buffer = {"x": np.zeros(3), "nested": (np.zeros(2, np.int16), "text")}

    def __getitem__(self, index):
        self.buffer["x"][:] = index
        self.buffer["nested"][0][:] = index
        return self.buffer


class FilledStream(IterableDataset):
    def __iter__(self):
        buffer = torch.zeros(3)
        for index in range(N):
            yield buffer.fill_(index)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Filled, FilledTogether, FilledArrays, FilledStream])
def test_every_row_is_what_the_dataset_gave(dataset, workers):
    store = memfeed.cache(dataset(), workers=0 if dataset is FilledStream else workers, progress=False)
    found = store[:]["x"] if dataset is FilledArrays else store[:]
    assert found[:, 0].tolist() == list(range(N))
    if dataset is FilledArrays:
        assert store[:]["nested"][0][:, 1].tolist() == list(range(N))


class OwnIterator:
    """An iterable whose __iter__ starts again and returns itself."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        self.at = 0
        return self

    def __next__(self):
        if self.at == 40:
            raise StopIteration
        self.at += 1
        return torch.tensor(self.at - 1)


class SizedOwnIterator(OwnIterator):
    def __len__(self):
        return 40


@pytest.mark.parametrize("dataset", [OwnIterator, SizedOwnIterator])
def test_an_iterable_that_is_its_own_iterator_is_read_once(dataset):
    assert memfeed.cache(dataset(), progress=False)[:].tolist() == list(range(40))
