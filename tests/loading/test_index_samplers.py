"""The samplers that a loader shows, and the cuts of epochs into pieces."""

import pickle

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

import memfeed
from memfeed.errors import LoaderError
from memfeed.loading.index_samplers import (
    Cuts,
    MixedSampler,
    OrderedSampler,
    RowOrder,
    ShuffledSampler,
    make_sampler,
    wraps_own_sampler,
)
from memfeed.order.choice import Blocks, orders_of
from memfeed.order.pieces import RankCut
from support import Made


def test_a_cut_stays_until_its_epoch_ends():
    cuts = Cuts(8)
    assert cuts.begin(0, 0, 2) == RankCut(2, 8)
    assert cuts.begin(0, 16, 4) == RankCut(2, 8)  # other ranks continue
    assert cuts.of(0, 4) == RankCut(2, 8)
    assert cuts.begin(0, 0, 4) == RankCut(4, 8)  # from the beginning again
    assert cuts.begin(1, 0, 3) == RankCut(3, 8)
    assert cuts.begin(2, 5, 3) == RankCut(3, 8)  # nobody knows how it was begun


def test_a_cut_in_a_state():
    cuts = Cuts(8)
    assert cuts.state(0, 5) == ""
    cuts.begin(0, 0, 2)
    assert (cuts.state(0, 0), cuts.state(1, 5), cuts.state(0, 5)) == ("", "", "2x8")
    other = Cuts(4)
    other.load(0, "2x8")
    assert other.begin(0, 5, 9) == RankCut(2, 8)
    other.load(0, "")
    assert other.begin(0, 5, 9) == RankCut(9, 4)


@pytest.mark.parametrize(
    "saved", [None, 3, "2", "2x", "x8", "0x8", "2x0", "2x8x1", "-2x8", "ax8", "2.0x8", " 2x8", ["2x8"]]
)
def test_what_is_no_cut(saved):
    with pytest.raises(LoaderError, match="found a state with pieces"):
        Cuts(8).load(0, saved)


def test_orders_are_made_once_and_not_pickled():
    rows = RowOrder([10], None, True, 4)
    assert rows.row_count == 10
    assert rows.orders(1) is rows.orders(1)
    made = rows.orders(2)
    again = pickle.loads(pickle.dumps(rows))
    assert again._made is None
    assert again.orders(2)(3)(0, 10).tolist() == made(3)(0, 10).tolist()


@pytest.mark.parametrize(
    ("rows", "kind", "of_torch"),
    [
        (RowOrder([5], None, True, 4), ShuffledSampler, RandomSampler),
        (RowOrder([5], None, False, 4), OrderedSampler, SequentialSampler),
        (RowOrder([5], None, Blocks(4), 4), MixedSampler, None),
        (RowOrder([5, 5], [3, 2], True, 4), MixedSampler, None),
        (RowOrder([5], None, True, 4, Cuts(2)), MixedSampler, None),
    ],
)
def test_kinds(rows, kind, of_torch):
    sampler = make_sampler(range(5), rows, None)
    assert type(sampler) is kind
    assert isinstance(sampler, RandomSampler) == (of_torch is RandomSampler)
    assert isinstance(sampler, SequentialSampler) == (of_torch is SequentialSampler)
    assert len(sampler) == rows.row_count


@pytest.fixture
def loader(tmp_path):
    return memfeed.Loader(
        memfeed.cache(Made(list(range(50))), tmp_path / "s.mf", progress=False), 4, shuffle=True, seed=3
    )


def test_a_pass_is_the_order_of_the_loader(loader):
    expected = orders_of(50, True, 3, 1)
    assert list(loader.sampler) == expected(0)(0, 50).tolist()
    assert loader.sampler.epoch == 0
    assert list(loader.sampler) == expected(1)(0, 50).tolist()
    loader.sampler.set_epoch(7)
    assert list(loader.sampler) == expected(7)(0, 50).tolist()


def test_what_a_sampler_draws_cannot_be_changed(loader):
    for name, value in (("data_source", [1]), ("replacement", True), ("_num_samples", 3)):
        with pytest.raises(LoaderError, match=f"found {name} assigned to the sampler of a loader"):
            setattr(loader.sampler, name, value)
    loader.sampler.replacement = loader.sampler.replacement
    loader.sampler.own_attribute = 3


def test_generators(tmp_path):
    store = memfeed.cache(Made(list(range(20))), tmp_path / "s.mf", progress=False)
    one, other = (memfeed.Loader(store, 4, shuffle=True) for _ in range(2))
    one.sampler.generator, other.sampler.generator = (torch.Generator().manual_seed(5) for _ in range(2))
    assert list(one.sampler) == list(other.sampler)
    ordered = memfeed.Loader(store, 4).sampler
    assert not hasattr(ordered, "generator")
    assert list(ordered) == list(range(20))


def test_a_sampler_of_ours_is_found_inside_others(loader):
    assert wraps_own_sampler(loader.sampler)
    assert wraps_own_sampler(BatchSampler(loader.sampler, 2, False))
    assert not wraps_own_sampler(BatchSampler(RandomSampler(range(3)), 2, False))
    assert not wraps_own_sampler(None)
