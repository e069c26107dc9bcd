"""Datasets of torch that are read by their parts, and subclasses of them that are not."""

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import memfeed
from memfeed.schema.containers import reads_as
from support import equal

N = 12


class Labelled(TensorDataset):
    """Has an attribute more than its base class."""

    classes = ("a", "b")


class Doubled(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * 2, y


class Longer(TensorDataset):
    def __len__(self):
        return 2 * N

    def __getitem__(self, index):
        return super().__getitem__(index % N)


class DoubledSubset(Subset):
    def __getitem__(self, index):
        x, y = self.dataset[self.indices[index]]
        return x * 2, y

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class DoubledParts(ConcatDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * 2, y


def tensors():
    return torch.arange(3.0 * N).reshape(N, 3), torch.arange(N)


def store():
    return memfeed.cache(TensorDataset(*tensors()), progress=False)


OWN = {
    "TensorDataset": lambda: Doubled(*tensors()),
    "length": lambda: Longer(*tensors()),
    "Subset": lambda: DoubledSubset(TensorDataset(*tensors()), range(3, 9)),
    "Subset of a store": lambda: DoubledSubset(store(), range(3, 9)),
    "Subset of such a dataset": lambda: Subset(Doubled(*tensors()), range(3, 9)),
    "Subset of such a Subset": lambda: Subset(DoubledSubset(store(), range(3, 9)), [1, 2]),
    "ConcatDataset": lambda: DoubledParts([TensorDataset(*tensors()), TensorDataset(*tensors())]),
    "ConcatDataset of stores": lambda: DoubledParts([store(), store()]),
    "ConcatDataset of such datasets": lambda: ConcatDataset([Doubled(*tensors()), DoubledSubset(store(), [1, 5])]),
}


@pytest.mark.parametrize("name", OWN)
def test_what_a_subclass_makes_of_a_sample_counts(name, tmp_path):
    dataset = OWN[name]()
    expected = list(DataLoader(dataset, 4))
    for source in (dataset, memfeed.cache(dataset, progress=False)):
        assert all(equal(one, other) for one, other in zip(memfeed.Loader(source, 4), expected, strict=True))
    loader = memfeed.Loader(dataset, 4, cache=tmp_path / "a.mf")
    assert all(equal(one, other) for one, other in zip(loader, expected, strict=True))


def test_a_subclass_that_changes_no_sample_is_read_by_its_parts():
    plain = Labelled(*tensors())
    assert reads_as(plain, TensorDataset)
    assert not reads_as(plain, Subset)
    loader = memfeed.Loader(plain, 4)
    plain.tensors[0].add_(1)  # read in place
    assert all(equal(one, other) for one, other in zip(loader, DataLoader(plain, 4), strict=True))
