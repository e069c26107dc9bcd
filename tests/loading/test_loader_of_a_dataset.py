"""What programs do with a loader of a dataset beside reading it: attributes, a class of their own, many workers."""

import functools
import os
import warnings

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

import memfeed
from memfeed.errors import SchemaError, StaleStoreError


class Words(Dataset):
    """Rows, and what a model asks of its dataset."""

    def __init__(self):
        self.vocabulary = {"a": 0, "b": 1}
        self.transform = None

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.tensor([index])

    def word(self, number):
        return list(self.vocabulary)[number]


@pytest.fixture(params=["temporary", "cache"])
def loader(request, tmp_path):
    return memfeed.Loader(Words(), 2, cache=None if request.param == "temporary" else tmp_path / "words.mf")


def test_attributes_of_the_dataset_are_found(loader):
    for _ in range(2):  # while the store is filled, and when it is finished
        assert loader.dataset.vocabulary == {"a": 0, "b": 1}
        assert loader.dataset.word(1) == "b"
        list(loader)
        loader.dataset.finish()
    assert not hasattr(loader.dataset, "nothing")
    assert not hasattr(loader.dataset, "_nothing")


def test_what_the_store_has_is_its_own(loader):
    with pytest.raises(AttributeError, match="its dataset had none"):
        _ = loader.dataset.classes


def test_a_part_of_the_rows_has_no_attributes_of_the_dataset(loader):
    with pytest.raises(AttributeError, match="found no attribute 'vocabulary' of a store"):
        _ = loader.dataset.subset([1, 2]).vocabulary


def test_an_opened_store_has_none(tmp_path):
    memfeed.cache(Words(), tmp_path / "a.mf")
    with pytest.raises(AttributeError, match="found no attribute 'vocabulary' of a store"):
        _ = memfeed.open(tmp_path / "a.mf").vocabulary


def test_a_change_made_through_the_loader_is_noticed(loader):
    list(loader)
    loader.dataset.vocabulary["c"] = 2
    with pytest.raises(StaleStoreError, match="vocabulary"):
        list(loader)


class Labelled(Words):
    def __init__(self):
        super().__init__()
        self.targets, self.classes, self.class_to_idx = [0, 1] * 3, ["a", "b"], {"a": 0, "b": 1}

    def __getitem__(self, index):
        return torch.tensor([index]), self.targets[index]


def test_labels_are_the_objects_of_the_dataset(tmp_path):
    for _ in range(2):  # the second one opens the store of the first
        dataset = Labelled()
        loader = memfeed.Loader(dataset, 2, cache=tmp_path / "labelled.mf")
        for _ in range(2):  # while the store is filled, and when it is finished
            for name in ("targets", "classes", "class_to_idx"):
                assert getattr(loader.dataset, name) is getattr(dataset, name)
            list(loader)
            loader.dataset.finish()
        loader.dataset.targets[3] = 5
        with pytest.raises(StaleStoreError, match=r"dataset\.targets"):
            list(loader)
    assert memfeed.open(tmp_path / "labelled.mf").subset([1, 3]).targets == [1, 1]


def test_labels_of_a_class_can_be_set_through_the_loader(tmp_path):
    class OfClass(Labelled):
        targets = (0, 1, 0, 1, 0, 1)

        def __init__(self):
            super(Labelled, self).__init__()

    loader = memfeed.Loader(OfClass(), 2, cache=tmp_path / "class.mf")
    list(loader)
    loader.dataset.targets = [5] * 6
    with pytest.raises(StaleStoreError, match=r"dataset\.targets"):
        list(loader)


def test_a_derived_class_may_make_the_iterator(tmp_path):
    begun = []

    class Mine(memfeed.Loader):
        def _get_iterator(self):
            begun.append(len(self))
            return super()._get_iterator()

    store = memfeed.cache(torch.arange(6), tmp_path / "a.mf")
    assert [batch.tolist() for batch in Mine(store, 4)] == [[0, 1, 2, 3], [4, 5]]
    assert begun == [2]


class TestManyWorkers:
    """Processes that fill a store are as many as are asked for, as those of DataLoader; torch warns of too many."""

    @pytest.fixture(autouse=True)
    def cores(self, monkeypatch):
        if hasattr(torch._utils, "cpu_count"):
            monkeypatch.setattr(torch._utils, "cpu_count", lambda: 1)
        else:  # torch 2.6
            monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})

    def test_more_than_cores(self):
        with pytest.warns(UserWarning, match="This DataLoader will create 2 worker processes in total"):
            memfeed.Loader(Words(), num_workers=2)

    def test_not_of_a_store(self, tmp_path):
        store = memfeed.cache(Words(), tmp_path / "a.mf")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            memfeed.Loader(store, num_workers=2)
            memfeed.Loader(Words(), num_workers=1)


class LooksAtItsStep(Dataset):
    def __init__(self):
        self.transform = functools.partial(torch.add, 0)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if type(self.transform) is not functools.partial:
            raise TypeError("a step of a class that it does not know")
        return self.transform(torch.rand(2) + index)


def test_code_that_raises_only_while_its_steps_are_watched_is_read_as_it_is(tmp_path, capfd):
    batches = list(memfeed.Loader(LooksAtItsStep(), 20, cache=tmp_path / "d.mf"))
    assert [batch.shape for batch in batches] == [(20, 2)] * 2
    lines = capfd.readouterr().err
    assert "raises while its steps are watched (TypeError: a step of a class that it does not know)" in lines


class WithList(Dataset):
    """Samples with lists of numbers, as the windows of braindecode."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((2,), float(index)), index % 3, [index % 4, 10 * index, 10 * index + 10]


def test_a_line_says_that_a_list_of_numbers_has_another_form(capfd):
    batch = next(iter(memfeed.Loader(WithList(), 4)))
    assert batch[2].shape == (4, 3)
    line = "WithList: a list of numbers (field 2) is one tensor [n, 3] in a batch, where a DataLoader gives a list of 3"
    assert line in capfd.readouterr().err
    collate = torch.utils.data.default_collate
    expected = next(iter(torch.utils.data.DataLoader(WithList(), 4)))
    found = next(iter(memfeed.Loader(WithList(), 4, collate_fn=collate)))
    assert all(map(torch.equal, found[2], expected[2]))
    assert "a list of numbers" not in capfd.readouterr().err


class Cells(Dataset):
    """As the datasets of scvi-tools: a list of rows is a batch, and one row a batch of one."""

    def __init__(self, *, takes_numbers=True):
        self.counts, self.takes_numbers = torch.arange(40.0).reshape(20, 2), takes_numbers

    def __len__(self):
        return len(self.counts)

    def __getitem__(self, rows):
        if not isinstance(rows, list) and not self.takes_numbers:
            raise TypeError("found a number; expected a list")
        return {"x": self.counts[rows if isinstance(rows, list) else [rows]]}


class Columns(Cells):
    """A list of rows is the batch of their samples."""

    def __getitem__(self, rows):
        return {"x": self.counts[rows].numpy()}


def lists_of(dataset):
    return {"batch_size": None, "sampler": BatchSampler(SequentialSampler(dataset), 8, drop_last=False)}


@pytest.mark.parametrize("takes_numbers", [True, False])
def test_a_dataset_whose_lists_of_rows_are_no_batch_of_samples_is_read_as_it_is(takes_numbers, tmp_path, capfd):
    dataset = Cells(takes_numbers=takes_numbers)
    for path in (None, tmp_path / "cells.mf", tmp_path / "cells.mf"):
        found = list(memfeed.Loader(dataset, cache=path, **lists_of(dataset)))
        for batch, expected in zip(found, DataLoader(dataset, **lists_of(dataset)), strict=True):
            assert torch.equal(batch["x"], expected["x"])
    assert "Cells[[0, 19]], which is a batch for a sampler of lists" in capfd.readouterr().err
    with pytest.raises(SchemaError, match="is not made of the samples of single rows"):
        memfeed.Loader(dataset, require="samples", **lists_of(dataset))


def test_a_dataset_whose_lists_of_rows_are_batches_of_samples_becomes_a_store(tmp_path, capfd):
    dataset = Columns()
    loader = memfeed.Loader(dataset, cache=tmp_path / "columns.mf", **lists_of(dataset))
    for batch, expected in zip(loader, DataLoader(dataset, **lists_of(dataset)), strict=True):
        assert torch.equal(batch["x"], expected["x"])
    assert isinstance(loader.dataset, memfeed.Store)
    assert "no store" not in capfd.readouterr().err
