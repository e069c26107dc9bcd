"""A Loader of an IterableDataset, where a DataLoader stood."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from memfeed import Loader
from memfeed.errors import LoaderError, StaleStoreError
from memfeed.system.messages import say_once


def test_an_iterable_is_written_before_the_first_batch(tmp_path, capsys):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(5))

    say_once.cache_clear()
    for _ in range(2):  # the second time the store is there
        assert [rows.tolist() for rows in Loader(Stream(), 2, cache=tmp_path / "s.mf")] == [[0, 1], [2, 3], [4]]
    assert "Stream, an IterableDataset, have no numbers: all are written to" in capsys.readouterr().err
    with pytest.raises(LoaderError, match="found Stream, an IterableDataset, without cache="):
        Loader(Stream(), 2, shuffle=True)


class Shares(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        return iter(range(80) if info is None else range(info.id, 80, info.num_workers))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_line_says_in_which_turns_workers_read_an_iterable(tmp_path, capsys, shuffle):
    say_once.cache_clear()
    rows = torch.cat(list(Loader(Shares(), 5, shuffle=shuffle, num_workers=2, cache=tmp_path / "s.mf"))).tolist()
    assert sorted(rows) == list(range(80))
    assert ("the 2 workers take turns of 16 rows, where those of a DataLoader" in capsys.readouterr().err) != shuffle
    turns = [
        *range(0, 32, 2),
        *range(1, 32, 2),
        *range(32, 64, 2),
        *range(33, 64, 2),
        *range(64, 80, 2),
        *range(65, 80, 2),
    ]
    assert (rows == turns) != shuffle


class Epochs(IterableDataset):
    """Another order in each epoch; ``__iter__`` counts them itself if `counts`."""

    def __init__(self, counts=False):
        self.epoch, self.counts = 0, counts

    def __iter__(self):
        self.epoch += self.counts
        return iter(torch.randperm(9, generator=torch.Generator().manual_seed(self.epoch)).tolist())


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_that_changes_between_epochs_is_an_error(tmp_path, workers):
    dataset = Epochs()
    loader = Loader(dataset, 3, cache=tmp_path / "s.mf", num_workers=workers)
    first = [rows.tolist() for rows in loader]
    assert [rows.tolist() for rows in loader] == first
    loader.dataset.epoch = 1
    with pytest.raises(StaleStoreError, match="dataset.epoch"):
        list(loader)
    dataset.epoch = 0
    assert [rows.tolist() for rows in loader] == first


def test_a_line_says_that_an_iterable_which_counts_its_epochs_goes_on(tmp_path, capsys):
    say_once.cache_clear()
    Loader(Epochs(counts=True), 3, cache=tmp_path / "s.mf")
    assert "its first epoch goes on after these" in capsys.readouterr().err


def test_the_collate_fn_of_an_iterable_gets_arrays_and_images_as_a_dataloader_does(tmp_path):
    class Arrays(IterableDataset):
        def __iter__(self):
            for row in range(5):
                yield {"x": np.full(3, row, "int16"), "p": Image.new("LA", (2, 2), (row, 1)), "t": torch.tensor(row)}

    def kinds(samples):
        return [{name: (type(one), np.asarray(one).tolist()) for name, one in row.items()} for row in samples]

    expected = list(DataLoader(Arrays(), 2, collate_fn=kinds))
    for _ in range(2):  # the second time the store is there
        assert list(Loader(Arrays(), 2, collate_fn=kinds, cache=tmp_path / "s.mf")) == expected
