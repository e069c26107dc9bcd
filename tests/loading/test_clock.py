import pytest
import torch

from memfeed.errors import LoaderError
from memfeed.loading.clock import EpochClock


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


def test_the_epoch_after_one_that_is_finished_is_whole():
    clock = EpochClock(0)
    clock.load(3, 100, at_end=True)
    clock.set_sampler_epoch(4)
    assert clock.start(1) == (4, None)


def test_seeds():
    assert EpochClock(5).resolve_seed(1) == 5
    torch.manual_seed(9)
    assert EpochClock(None).resolve_seed(1) == 9
    assert EpochClock(None).resolve_seed(2) == 0
    drawn = [EpochClock(None, torch.Generator().manual_seed(1)).resolve_seed(n) for n in (1, 2)]
    assert drawn[0] == drawn[1]
    clock = EpochClock(None)
    first = clock.resolve_seed(1)
    torch.manual_seed(10)
    assert clock.resolve_seed(1) == first, "a loader keeps its seed"


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
