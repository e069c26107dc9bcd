"""A batch sampler that draws lists of lists: DataLoader collates what the dataset gives for each list."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import memfeed
import memfeed.transforms as T
from memfeed.errors import RowError
from support import cache, equal

DRAWN = [[[0, 1, 2], [3, 4, 5]], [[9, 9, 9]], [(7, 8), (6, 0), (1, 2)]]


@pytest.fixture
def store(path):
    return cache([{"x": torch.arange(4.0) + i, "label": i, "name": f"row {i}"} for i in range(10)], path)


def test_of_a_store_it_is_what_dataloader_makes_of_it(store):
    batches = list(memfeed.Loader(store, batch_sampler=DRAWN))
    expected = list(DataLoader(store, batch_sampler=DRAWN))
    assert equal(batches, expected)
    assert batches[0]["x"].shape == (2, 3, 4)


def test_of_columns_in_memory():
    columns = torch.arange(30.0).reshape(10, 3)
    drawn = [[[0, 1], [3, 4]], [[9, 9, 9]]]
    assert equal(list(memfeed.Loader(columns, batch_sampler=drawn)), list(DataLoader(columns, batch_sampler=drawn)))


def test_each_row_is_transformed_by_its_own_key(path):
    images = torch.randint(0, 256, (10, 3, 8, 8), dtype=torch.uint8)
    loader = memfeed.Loader(images, batch_sampler=[[[0, 1], [2, 3]]], transform=T.RandomCrop(4), seed=1)
    flat = memfeed.Loader(images, batch_sampler=[[0, 1, 2, 3]], transform=T.RandomCrop(4), seed=1)
    for batch, expected in zip(loader, flat, strict=True):
        assert torch.equal(batch.flatten(0, 1), expected)


def test_rows_and_arrays(store):
    loader = memfeed.Loader(store.select(["x"]), batch_sampler=DRAWN, return_rows=True, as_="torch")
    assert [batch["rows"].tolist() for batch in loader] == [[list(one) for one in drawn] for drawn in DRAWN]


def test_an_epoch_is_resumed(store):
    loader = memfeed.Loader(store, batch_sampler=DRAWN)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = list(iterator)
    other = memfeed.Loader(store, batch_sampler=DRAWN)
    other.load_state_dict(state)
    assert equal(list(other), rest)


def test_lists_of_different_lengths_have_no_batch(store):
    drawn = [[[0], [1, 2]]]
    for loader in (DataLoader(store, batch_sampler=drawn), memfeed.Loader(store, batch_sampler=drawn)):
        with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
            list(loader)


class Whole(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, i):
        return torch.tensor(i)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sampler": DRAWN}, r"found lists of 3 rows .*which a store does not know: Loader\(store, \.\.\.\)"),
        ({"sampler": [[0, 1]], "batch_size": 1}, "expected row numbers: lists of rows are batches"),
        ({"batch_sampler": [[[[0]]]]}, r"found \[\[0\]\] from a sampler; expected row numbers"),
        ({"batch_sampler": [[[0], 1]]}, r"found \[\[0\], 1\] from a sampler; expected row numbers"),
    ],
)
def test_of_a_dataset_it_is_refused(options, message):
    with pytest.raises(RowError, match=message):
        list(memfeed.Loader(Whole(), **options))


def test_a_flag_beside_each_row_is_no_row(store):
    """A batch sampler may give (flag, row) to a dataset that takes it: those of a store are row numbers."""
    drawn = [[(True, 5), (True, 7)]]
    with pytest.raises(RowError, match=r"found \[True, 5, True, 7\] from a sampler; expected row numbers"):
        list(memfeed.Loader(store, batch_sampler=drawn))
    with pytest.raises(RowError, match=r"found \(True, 5\), bools among ints; expected ints alone, or a mask"):
        list(DataLoader(store, batch_sampler=drawn))


def test_beside_a_collate_fn_it_is_refused(store):
    with pytest.raises(RowError, match="beside a collate_fn a list of lists is not a batch: leave collate_fn out"):
        list(memfeed.Loader(store, batch_sampler=DRAWN, collate_fn=list))


def test_arrays_of_rows_are_a_batch(store):
    assert equal(
        list(memfeed.Loader(store, batch_sampler=[np.arange(3)])), list(DataLoader(store, batch_sampler=[np.arange(3)]))
    )
