"""A pickle of a loader: its arguments and its position, and no data."""

import pickle

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler

import memfeed
from memfeed.system.messages import say_once
from support import Made, cache


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return cache(
        Made(lambda i: {"x": torch.full((1000,), i)}, 20), tmp_path_factory.mktemp("pickling") / "s.mf", workers=0
    )


def rows(loader):
    return [batch["x"][:, 0].tolist() for batch in loader]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "shuffle": True, "seed": 1},
        {"batch_size": 3, "drop_last": True},
        {"batch_size": 4, "sampler": [5, 1, 7]},
        {"batch_sampler": [[1, 2], [3]]},
        {"batch_size": None, "sampler": BatchSampler(SequentialSampler(range(9)), 4, False)},
        {"batch_size": 4, "prefetch_factor": 0, "last": "pad", "collate_fn": None},
    ],
    ids=lambda options: ",".join(options),
)
def test_arguments_come_back(store, options):
    loader = memfeed.Loader(store, **options)
    data = pickle.dumps(loader)
    assert len(data) < 10_000
    again = pickle.loads(data)
    assert (again.batch_size, again.drop_last, len(again)) == (loader.batch_size, loader.drop_last, len(loader))
    assert rows(again) == rows(loader)


def test_the_position_comes_back(store):
    loader = memfeed.Loader(store, 4, shuffle=True, seed=1)
    iterator = iter(loader)
    first = [next(iterator), next(iterator)]
    again = pickle.loads(pickle.dumps(loader))
    rest = rows(again)
    assert rows(first) + rest == rows(memfeed.Loader(store, 4, shuffle=True, seed=1))
    loader.set_epoch(3)
    other = memfeed.Loader(store, 4, shuffle=True, seed=1)
    other.set_epoch(3)
    assert rows(pickle.loads(pickle.dumps(loader))) == rows(other)


def test_a_line_says_that_a_copy_goes_on_within_an_epoch(store, capfd):
    say_once.cache_clear()
    loader = memfeed.Loader(store, 4, sampler=[3, 1, 2, 9, 8])
    pickle.loads(pickle.dumps(loader))
    assert not capfd.readouterr().err
    next(iter(loader))  # to look at a batch
    again = pickle.loads(pickle.dumps(loader))
    assert "goes on within epoch 0" in (said := capfd.readouterr().err)
    assert "set_epoch(1)" in said
    again.set_epoch(1)
    assert rows(again) == [[3, 1, 2, 9], [8]]
    list(loader)
    pickle.loads(pickle.dumps(loader))
    assert not capfd.readouterr().err


def test_columns_in_memory_are_not_copied():
    with pytest.raises(TypeError, match="found columns in memory, which a pickle would copy"):
        pickle.dumps(memfeed.Loader(torch.arange(10), 2))


def test_a_relative_path_means_the_same_in_another_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = Made([{"x": torch.full((4,), i)} for i in range(20)])
    loader = memfeed.Loader(dataset, 4, cache="s.mf")
    monkeypatch.chdir("/")
    expected = rows(loader)
    loader.dataset.finish()
    assert rows(pickle.loads(pickle.dumps(loader))) == expected
    assert rows(memfeed.Loader(loader.dataset, 4, cache=loader.cache)) == expected
