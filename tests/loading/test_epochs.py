"""Positions, states and figures of the epochs of a loader, without a thread."""

import signal
import warnings
from functools import partial

import pytest
import torch
from torch.utils.data import RandomSampler, Sampler, default_collate

import memfeed
from memfeed.errors import LoaderError
from memfeed.loading.epoch_reader import EpochReader
from memfeed.order.choice import Blocks
from support import Made, cache


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return cache(Made(lambda i: {"x": torch.full((2,), i)}, 22), tmp_path_factory.mktemp("epochs") / "s.mf", workers=0)


def rows(batches):
    return [batch["x"][:, 0].tolist() for batch in batches]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"shuffle": True}, "shuffle=True"),
        ({}, "shuffle=False"),
        ({"shuffle": Blocks(8)}, "shuffle=Blocks(rows=8)"),
        ({"sampler": [1, 2]}, "sampler"),
        ({"batch_sampler": [[1, 2]], "batch_size": 1}, "batch_sampler"),
    ],
)
def test_names_of_orders(store, options, name):
    loader = memfeed.Loader(store, **{"batch_size": 4, **options})
    assert loader._epochs.order_name(loader._settings).startswith(name)


def test_figures_before_the_first_batch(store):
    stats = memfeed.Loader(store, 4).stats()
    assert stats["epoch"] is None
    assert (stats["batches"], stats["samples"], stats["seconds"], stats["bytes"]) == (0, 0, 0.0, 0)
    assert (stats["samples_per_second"], stats["wait_share"]) == (0.0, 0.0)
    assert stats["columns"] == {"x": "mapped"}
    assert stats["placement"] == {"x": "no epoch has begun"}


def test_figures_of_an_epoch(store):
    loader = memfeed.Loader(store, 4, prefetch_factor=0)
    list(loader)
    stats = loader.stats()
    assert (stats["epoch"], stats["batches"], stats["samples"], stats["bytes"]) == (0, 6, 22, 22 * 16)
    assert 0.0 <= stats["wait_share"] <= 1.0


def test_moves_before_within_and_after_an_epoch(store):
    loader = memfeed.Loader(store, 4, shuffle=True, seed=2)
    whole = rows(loader)
    loader = memfeed.Loader(store, 4, shuffle=True, seed=2)
    loader.skip(2)
    assert rows(loader) == whole[2:]
    loader.set_epoch(0)
    found = []
    for batch in loader:
        found.append(batch["x"][:, 0].tolist())
        if len(found) == 2:
            loader.rewind(1)
    assert found == whole[:2] + whole[1:]


def test_a_move_without_an_iterator(store):
    loader = memfeed.Loader(store, 4)
    iterator = iter(loader)
    next(iterator)
    iterator.close() if hasattr(iterator, "close") else None
    del iterator
    with pytest.raises(LoaderError, match="found no running iterator: that of epoch 0 is gone"):
        loader.skip(1)
    loader.load_state_dict(loader.state_dict())
    assert rows(loader)[0] == [4, 5, 6, 7]


def test_a_state_before_within_and_after_an_epoch(store):
    loader = memfeed.Loader(store, 4, shuffle=True)
    iterator = iter(loader)
    state = loader.state_dict()  # the seed is drawn, because this iterator waits
    assert isinstance(state["seed"], int)
    whole = rows(iterator)
    after = loader.state_dict()
    assert (after["epoch"], after["row"]) == (1, 0)
    other = memfeed.Loader(store, 4, shuffle=True)
    other.load_state_dict(state)
    assert rows(other) == whole
    other.load_state_dict(after)
    assert rows(other) == rows(loader)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": False}, "order"),
        ({"seed": 9}, "seed"),
        ({"batch_sampler": [[1]], "batch_size": 1, "shuffle": None}, "order"),
    ],
)
def test_a_state_of_another_loader(store, options, message):
    state = memfeed.Loader(store, 4, shuffle=True, seed=1).state_dict()
    with pytest.raises(LoaderError, match=f"found a state with {message}"):
        memfeed.Loader(store, **{"batch_size": 4, "shuffle": True, **options}).load_state_dict(state)


def test_a_state_of_another_store(store):
    state = memfeed.Loader(store.subset(range(20)), 4).state_dict()
    with pytest.raises(LoaderError, match="found a state with"):
        memfeed.Loader(store, 4).load_state_dict(state)


def test_a_state_at_the_end_of_an_epoch_leaves_nothing_of_it(store):
    loader = memfeed.Loader(store, 4, shuffle=True, seed=1)
    iterator = iter(loader)
    for _ in range(len(loader)):
        next(iterator)
    first, second = (memfeed.Loader(store, 4, shuffle=True, seed=1) for _ in range(2))
    first.load_state_dict(loader.state_dict())
    second.set_epoch(1)
    assert rows(first) == []
    assert rows(first) == rows(second)


def test_the_end_of_a_sampler_that_is_a_users_is_not_known(store):
    loader = memfeed.Loader(store, 4, sampler=RandomSampler(range(22)))
    assert loader._epochs._end_of(loader._settings, 0) == 0
    own = memfeed.Loader(store, 4, sampler=memfeed.Loader(store, 4, shuffle=True).sampler, drop_last=True)
    assert own._epochs._end_of(own._settings, 0) == 20


def nexts(loader):
    """The rows of each batch, or the class of the error that came in its place."""
    iterator, found = iter(loader), []
    while True:
        try:
            found += rows([next(iterator)])
        except StopIteration:
            return found
        except (KeyError, KeyboardInterrupt, LoaderError) as error:
            found.append(type(error))


@pytest.mark.parametrize(("error", "left_out"), [(KeyError, True), (KeyboardInterrupt, False)])
@pytest.mark.parametrize("own_sampler", [False, True])
@pytest.mark.parametrize("argument", ["transform", "collate_fn"])
def test_the_same_iterator_goes_on_after_an_error(store, error, left_out, own_sampler, argument):
    """As DataLoader's; after an interrupt no row is lost."""
    calls = []

    def fails(batch):
        calls.append(1)
        if len(calls) in (2, 3, 6):
            raise error("mine")
        return batch if argument == "transform" else default_collate(batch)

    def make():
        torch.manual_seed(4)
        order = {"sampler": RandomSampler(range(22))} if own_sampler else {"shuffle": True}
        return memfeed.Loader(store, 4, **order, **{argument: fails})

    found = nexts(make())
    first, *rest = rows(make())
    if left_out:
        assert found == [first, error, error, *rest[2:4], error]
    else:
        assert found == [first, error, error, *rest[:2], error, *rest[2:]]


def test_after_an_error_of_a_sampler_nothing_comes(store):
    """As with DataLoader, whose sampler has ended."""

    class Fails(Sampler):
        def __init__(self):
            pass

        def __iter__(self):
            yield from range(8)
            raise KeyError("mine")

    assert nexts(memfeed.Loader(store, 4, sampler=Fails())) == [[0, 1, 2, 3], [4, 5, 6, 7], KeyError]
    calls = iter([0, 1])
    once = memfeed.Loader(store, 4, sampler=iter(range(22)), transform=lambda batch: {0: batch}[next(calls)])
    assert nexts(once) == [[0, 1, 2, 3], KeyError, LoaderError], "it cannot be started again"


def test_the_state_after_an_error_has_the_batch_that_failed(store):
    calls = iter([0, 1, 0, 0, 0])
    loader = memfeed.Loader(store, 4, transform=lambda batch: {0: batch}[next(calls, 0)])
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(KeyError):
        next(iterator)
    state = loader.state_dict()
    assert rows([next(iterator)]) == [[8, 9, 10, 11]]
    loader.load_state_dict(state)
    assert rows(loader)[0] == [4, 5, 6, 7]


def test_a_batch_that_failed_may_be_skipped(store):
    calls = iter([0, 1])
    loader = memfeed.Loader(store, 4, transform=lambda batch: {0: batch}[next(calls, 0)])
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(KeyError):
        next(iterator)
    loader.skip(1)
    assert rows([next(iterator)]) == [[8, 9, 10, 11]], "not two batches"


@pytest.mark.parametrize(("workers", "next_rows"), [(0, [8, 9, 10, 11]), (2, [4, 5, 6, 7])])
@pytest.mark.parametrize("options", [{"shuffle": False}, {"sampler": range(22)}])
def test_a_time_limit_of_the_caller_keeps_the_batch_that_was_due(store, workers, next_rows, options):
    """As from a DataLoader, whose workers go on; without workers its batch is lost."""

    def too_long(*_):
        raise TimeoutError

    calls = iter([lambda: 0, partial(signal.raise_signal, signal.SIGALRM)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = memfeed.Loader(
            store, 4, num_workers=workers, transform=lambda batch: (next(calls, int)(), batch)[1], **options
        )
    before = signal.signal(signal.SIGALRM, too_long)
    try:
        iterator = iter(loader)
        assert rows([next(iterator)]) == [[0, 1, 2, 3]]
        with pytest.raises(TimeoutError):
            next(iterator)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert rows([next(iterator)]) == [next_rows]


def test_an_interrupt_of_the_start_of_an_epoch_uses_no_epoch(store, monkeypatch):
    def interrupted(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    expected = rows(memfeed.Loader(store, 4, shuffle=True, seed=1))
    loader = memfeed.Loader(store, 4, shuffle=True, seed=1)
    monkeypatch.setattr(EpochReader, "prepare_epoch", interrupted)
    iterator = iter(loader)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert rows(iterator) == expected


@pytest.mark.parametrize("argument", ["transform", "collate_fn"])
def test_a_function_that_raises_stop_iteration_ends_no_epoch(store, argument):
    loader = memfeed.Loader(store, 4, **{argument: lambda batch: next(iter(()))})
    with pytest.raises(LoaderError, match=r"found StopIteration from the user's .*; expected a batch"):
        list(loader)
