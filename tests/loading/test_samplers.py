"""The user's samplers: whose calls of ``set_epoch`` count, the loader's or those of somebody else."""

import copy
import pickle
import time
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from memfeed import Loader

N = 20
ROWS = torch.arange(N)


def distributed():
    return DistributedSampler(range(N), 1, 0, seed=0)


def epochs():
    sampler, orders = distributed(), []
    for epoch in range(9):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    return orders


ORDERS = epochs()


def epoch_of(loader):
    """Return the number of the epoch whose order a pass has."""
    return ORDERS.index(torch.cat(list(loader)).tolist())


class Wrapped(Sampler):
    """A sampler that hands everything on to another one, and has no epoch of its own."""

    def __init__(self):
        self.inner = distributed()

    def __iter__(self):
        return iter(self.inner)

    def __len__(self):
        return N

    def set_epoch(self, epoch):
        self.inner.set_epoch(epoch)


class Slots(Wrapped):
    """It lets nobody set an attribute."""

    def __setattr__(self, name, value):
        if "inner" in self.__dict__:
            raise AttributeError(name)
        super().__setattr__(name, value)


class InDict(Sampler):
    """A sampler that keeps its epoch in a dict."""

    def __init__(self):
        self.kept = {"number": 0}

    def __iter__(self):
        return iter(ORDERS[self.kept["number"]])

    def __len__(self):
        return N

    def set_epoch(self, epoch):
        self.kept["number"] = epoch


class InGenerator(Sampler):
    """A sampler whose epoch shows only in the state of a generator."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self):
        return iter(ORDERS[self.generator.initial_seed()])

    def __len__(self):
        return N

    def set_epoch(self, epoch):
        self.generator.manual_seed(epoch)


class Batches(BatchSampler):
    """A batch sampler that hands the epoch on."""

    def __init__(self):
        super().__init__(distributed(), 4, False)

    def set_epoch(self, epoch):
        self.sampler.set_epoch(epoch)


class Inside:
    """It draws from another sampler, and has no epoch."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(self.sampler)

    def __len__(self):
        return N


def nested(inner, depth):
    """Return a sampler that has another one so many levels deep."""
    for _ in range(depth):
        inner = Inside(inner)
    return inner


KINDS = [distributed, Wrapped, Slots, InDict, InGenerator, Batches]
every_kind = pytest.mark.parametrize("kind", KINDS)


def loader_of(sampler, cls=Loader):
    return cls(ROWS, batch_sampler=sampler) if isinstance(sampler, BatchSampler) else cls(ROWS, 4, sampler=sampler)


@every_kind
@pytest.mark.parametrize("called", [[5, 6, 7], [0, 0, 1, 1], [3, None, None, 1], [2, 0, 5]])
def test_epochs_that_somebody_else_sets_are_those_of_dataloader(kind, called):
    found = []
    for cls in (DataLoader, Loader):
        sampler = kind()
        loader, orders = loader_of(sampler, cls), []
        for epoch in called:
            if epoch is not None:
                sampler.set_epoch(epoch)
            orders.append(epoch_of(loader))
        found.append(orders)
    assert found[0] == found[1]


@every_kind
def test_a_call_in_the_last_batch_counts(kind):
    sampler = kind()
    loader = loader_of(sampler)
    for epoch in (0, 0, 3):
        batches = []
        for batch in loader:
            batches.append(batch)
            if len(batches) == len(loader):
                sampler.set_epoch(epoch)
    assert epoch_of(loader) == 3


@every_kind
def test_epochs_that_nobody_sets_are_those_of_the_loader(kind):
    loader = loader_of(kind())
    assert [epoch_of(loader) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("kind", [distributed, Wrapped, Slots, Batches])
def test_an_epoch_that_was_set_before_the_loader_was_made(kind):
    sampler = kind()
    sampler.set_epoch(5)
    loader = loader_of(sampler)
    assert loader.epoch == 5
    assert [epoch_of(loader) for _ in range(2)] == [5, 6]


@pytest.mark.parametrize("inner", [lambda sampler: sampler.inner, lambda sampler: sampler.sampler])
def test_a_call_of_the_inner_sampler_counts(inner):
    sampler = Wrapped() if "inner" in inner.__code__.co_names else Batches()
    loader, found = loader_of(sampler), []
    for epoch in (0, 0, 4):
        inner(sampler).set_epoch(epoch)
        found.append(epoch_of(loader))
    assert found == [0, 0, 4]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_sampler_deep_inside_of_others_has_the_epochs_of_the_loader(depth):
    inner = distributed()
    loader = loader_of(nested(inner, depth))
    assert [epoch_of(loader) for _ in range(3)] == [0, 1, 2]
    inner.set_epoch(6)
    assert (epoch_of(loader), loader.epoch) == (6, 6)


@pytest.mark.parametrize("loops", [False, True])
def test_samplers_without_an_end(loops):
    """A mock makes a sampler of any name; a sampler may name itself."""
    sampler = Inside(distributed())
    sampler.batch_sampler = sampler if loops else Mock()
    started = time.monotonic()
    assert epoch_of(loader_of(sampler)) == 0
    assert time.monotonic() - started < 5


def test_what_an_outer_sampler_makes_of_an_epoch_counts():
    class Halved(Inside):
        def set_epoch(self, epoch):
            self.sampler.set_epoch(epoch // 2)

    loader = loader_of(Halved(distributed()))
    assert [epoch_of(loader) for _ in range(4)] == [0, 0, 1, 1]


def test_an_inner_sampler_that_was_set_before_is_not_set_back():
    """Accelerate puts the batch sampler of a loader, with its own count of epochs, into another one."""

    class Counting(Inside):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

    inner = distributed()
    inner.set_epoch(1)
    loader = loader_of(nested(Counting(inner), 1))
    assert [epoch_of(loader) for _ in range(2)] == [1, 2]


@every_kind
def test_the_epoch_of_the_loader_and_of_a_state_count_until_the_next_call(kind):
    sampler = kind()
    loader = loader_of(sampler)
    sampler.set_epoch(4)
    running = iter(loader)
    next(running)
    state, left = loader.state_dict(), torch.cat(list(running)).tolist()
    sampler.set_epoch(6)
    assert epoch_of(loader) == 6
    loader.set_epoch(2)
    assert [epoch_of(loader), epoch_of(loader)] == [2, 2]
    sampler.set_epoch(7)
    loader.load_state_dict(state)
    assert torch.cat(list(loader)).tolist() == left
    loader.load_state_dict(state)
    sampler.set_epoch(4)
    assert torch.cat(list(loader)).tolist() == left, "the position is kept"
    loader.load_state_dict(state)
    sampler.set_epoch(5)
    assert epoch_of(loader) == 5


@every_kind
def test_a_framework_that_counts_epochs_anew_after_a_state_was_loaded(kind, capsys):
    """As Fabric, whose first call is always that of epoch 0."""
    loader = loader_of(kind())
    loader.set_epoch(3)
    running = iter(loader)
    next(running)
    state, left = loader.state_dict(), torch.cat(list(running)).tolist()
    sampler = kind()
    loader, found = loader_of(sampler), []
    loader.load_state_dict(state)
    for epoch in (0, None, 1, 2):
        if epoch is not None:
            sampler.set_epoch(epoch)
        found.append(torch.cat(list(loader)).tolist())
    assert found == [left, ORDERS[3], ORDERS[4], ORDERS[5]]
    assert "set to epoch 0 after a state of epoch 3 was loaded; 3 is added to this and later" in capsys.readouterr().err


def test_two_loaders_of_one_sampler_follow_its_user():
    sampler = Wrapped()
    one, other = Loader(ROWS, 4, sampler=sampler), Loader(ROWS, 5, sampler=sampler)
    for epoch in (0, 0, 3):
        sampler.set_epoch(epoch)
        assert epoch_of(one) == epoch_of(other) == epoch


def test_an_epoch_that_is_assigned():
    sampler = distributed()
    loader, found = loader_of(sampler), []
    for epoch in (3, 1):
        sampler.epoch = epoch
        found.append(epoch_of(loader))
    assert found == [3, 1]


def test_a_curriculum_of_batch_sizes_is_no_call():
    sampler = Batches()
    loader, found = loader_of(sampler), []
    for size in (4, 5, 10):
        sampler.batch_size = size
        found.append(epoch_of(loader))
    assert found == [0, 1, 2]


def test_a_method_of_the_object_alone_is_seen_by_what_it_changes():
    sampler = Wrapped()
    sampler.set_epoch = lambda epoch: setattr(sampler.inner, "epoch", epoch)
    loader, found = loader_of(sampler), []
    for epoch in (5, 6, 7):
        sampler.set_epoch(epoch)
        found.append(epoch_of(loader))
    assert found == [5, 6, 7]


@pytest.mark.parametrize("cls", [DataLoader, Loader])
def test_a_mock_in_the_place_of_a_method_counts_the_calls_of_its_user(cls):
    sampler = distributed()
    sampler.set_epoch = Mock()
    loader = loader_of(sampler, cls)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert epoch_of(loader) == 0
    assert sampler.set_epoch.call_count == 2


def test_the_argument_may_be_named():
    sampler = InDict()
    loader = loader_of(sampler)
    sampler.set_epoch(epoch=5)
    assert epoch_of(loader) == loader.epoch == 5


@every_kind
def test_samplers_and_their_copies_stay_as_they_were(kind):
    sampler = kind()
    before = set(vars(sampler))
    loader = loader_of(sampler)
    assert set(vars(sampler)) == before
    assert type(sampler).set_epoch.__name__ == "set_epoch"
    for other in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
        other.set_epoch(5)
        assert epoch_of(loader_of(other)) == 5
    assert [epoch_of(loader) for _ in range(2)] == [0, 1], "calls of a copy are no calls of this one"
