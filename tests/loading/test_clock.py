import json

import numpy as np
import pytest
import torch

from memfeed import Loader
from memfeed.errors import LoaderError
from memfeed.loading.position import EpochClock


def test_epochs_follow_each_other():
    clock = EpochClock(0)
    assert [clock.start(1) for _ in range(3)] == [(0, None), (1, None), (2, None)]
    clock.set_epoch(7)
    assert (clock.epoch, clock.next) == (7, (7, None))
    assert [clock.start(1)[0] for _ in range(2)] == [7, 8]
    with pytest.raises(LoaderError, match="found epoch -1"):
        clock.set_epoch(-1)


def test_a_loaded_position_is_kept_for_its_own_epoch_only():
    for epoch, position in ((3, 50), (4, None), (0, None)):
        clock = EpochClock(0)
        clock.load(3, 50, at_end=False)
        clock.set_epoch(epoch)
        assert clock.start(1) == (epoch, position)


def test_a_framework_that_counts_in_its_own_way_keeps_the_position(capsys):
    for counted in (0, 5):
        clock = EpochClock(0)
        clock.load(3, 50, at_end=False)
        clock.set_sampler_epoch(counted)
        assert clock.start(1) == (3, 50)
        clock.set_sampler_epoch(counted + 1)
        assert clock.start(1) == (4, None)
    assert "3 is added" in capsys.readouterr().err


@pytest.mark.parametrize("epoch", [3, np.int64(3), torch.tensor(3)])
def test_an_epoch_of_numpy_or_torch_is_an_int(epoch):
    loader = Loader(torch.arange(5), 2, shuffle=True, seed=0)
    loader.set_epoch(epoch)
    assert json.loads(json.dumps(loader.state_dict()))["epoch"] == 3
    loader.sampler.set_epoch(epoch)
    assert type(loader.sampler.epoch) is int


@pytest.mark.parametrize("epoch", [1.5, "1", None, torch.tensor(1.5), -1])
def test_what_is_no_epoch_is_refused_at_once(epoch):
    with pytest.raises(LoaderError, match=r"expected 0 to 2\*\*63 - 1, an int"):
        Loader(torch.arange(5), 2).set_epoch(epoch)


def test_the_epoch_after_one_that_is_finished_is_whole():
    clock = EpochClock(0)
    clock.load(3, 100, at_end=True)
    clock.set_sampler_epoch(4)
    assert clock.start(1) == (4, None)


def test_a_seed_is_drawn_once():
    assert EpochClock(5).resolve_seed(1) == 5
    torch.manual_seed(9)
    expected = [int(torch.empty((), dtype=torch.int64).random_()) for _ in range(2)]
    torch.manual_seed(9)
    clocks = [EpochClock(None), EpochClock(None)]
    assert [clock.resolve_seed(1) for clock in clocks] == expected, "as DataLoader draws its base seed"
    assert [clock.resolve_seed(1) for clock in clocks] == expected, "a loader keeps its seed"


def test_a_generator_that_is_assigned_gives_the_seed_of_the_next_pass_from_the_beginning():
    def generator():
        return torch.Generator().manual_seed(1)

    clock = EpochClock(None, generator())
    before = torch.get_rng_state()
    first = clock.resolve_seed(1)
    assert torch.equal(torch.get_rng_state(), before)
    clock.generator = other = torch.Generator().manual_seed(2)
    clock.move(30)
    clock.start(1)
    assert clock.seed == first, "the rest of an epoch has the order of its beginning"
    clock.start(1)
    assert clock.generator is other
    assert clock.seed not in (None, first)
    assert clock.seed == EpochClock(None, torch.Generator().manual_seed(2)).resolve_seed(1)


def test_a_given_seed_shows_a_generator_and_takes_no_other():
    for seed in (7, -1, 2**70):
        clock = EpochClock(seed)
        shown = clock.generator
        clock.generator = shown
        assert isinstance(clock.generator, torch.Generator)
        with pytest.raises(LoaderError, match=f"found a generator for a loader with seed={seed}.*leave seed= out"):
            clock.generator = torch.Generator()
        assert clock.resolve_seed(1) == seed


def test_a_lent_epoch_is_the_loaders():
    clock = EpochClock(0)
    clock.start(1)
    clock.lend()
    assert clock.start_sampler(1) == (0, None)
    assert clock.start_sampler(1) == (1, None)


def test_the_epoch_in_shared_memory():
    clock = EpochClock(0)
    shared = clock.share()
    clock.set_epoch(4)
    assert int(shared) == 4


@pytest.mark.parametrize("last", ["drop", "repeat", "uneven"])
def test_the_epoch_after_a_state_of_the_last_batch_is_the_one_that_a_trainer_names(last, capsys):
    """Lightning saves after the last batch, and sets the next epoch when it resumes: that one has all its batches."""
    loader = Loader(torch.arange(11), 4, shuffle=True, seed=3, last=last)
    running = iter(loader)
    for _ in range(len(loader)):
        next(running)
    state = loader.state_dict()
    resumed = Loader(torch.arange(11), 4, shuffle=True, seed=3, last=last)
    resumed.load_state_dict(state)
    resumed.sampler.set_epoch(1)
    loader.set_epoch(1)
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in loader]
    assert "is added to" not in capsys.readouterr().err
