"""A loader's place: saved, restored, moved."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import memfeed
from memfeed import Blocks, Loader
from memfeed.errors import LoaderError
from support import cache, equal

N = 53
ROWS = torch.arange(N)


def rows(batches):
    return [batch.tolist() for batch in batches]


def through_json(state):
    return json.loads(json.dumps(state))


ORDERS = [
    {},
    {"shuffle": True, "seed": 7},
    {"shuffle": Blocks(4), "seed": 7},
    {"shuffle": True, "seed": 7, "drop_last": True},
    {"shuffle": True, "seed": 7, "prefetch_factor": 0},
]


@settings(max_examples=60)
@given(st.sampled_from(ORDERS), st.integers(1, 20), st.integers(0, 60), st.integers(0, 3), st.booleans())
def test_a_restored_loader_gives_what_was_left(options, batch_size, taken, epoch, threaded):
    loader = Loader(ROWS, batch_size, **options)
    loader.set_epoch(epoch)
    whole = rows(loader)
    loader.set_epoch(epoch)
    loader._epochs.policy.settled, loader._epochs.policy.threaded = True, threaded
    running = iter(loader)
    taken = min(taken, len(whole))
    for _ in range(taken):
        next(running)
    other = Loader(ROWS, batch_size, **options)
    other.load_state_dict(through_json(loader.state_dict()))
    assert other.state_dict() == loader.state_dict()
    assert len(other) == len(whole)
    assert rows(other) == whole[taken:]
    assert other.epoch == epoch
    assert rows(running) == whole[taken:], "the state of one is no matter of the other's"


def test_after_the_end_the_state_is_the_next_epochs_beginning():
    loader = Loader(ROWS, 10, shuffle=True, seed=0)
    list(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["row"]) == (1, 0)
    other = Loader(ROWS, 10, shuffle=True, seed=0)
    other.load_state_dict(state)
    assert rows(other) == rows(loader)


def test_the_last_batch_given_is_not_yet_the_end():
    loader = Loader(ROWS, 10)
    running = iter(loader)
    for _ in range(6):
        next(running)
    assert (loader.state_dict()["epoch"], loader.state_dict()["row"]) == (0, N)
    other = Loader(ROWS, 10)
    other.load_state_dict(loader.state_dict())
    assert list(other) == []
    assert next(iter(other)).tolist() == list(range(10))
    assert other.epoch == 1


def test_a_state_before_the_first_and_between_epochs():
    loader = Loader(ROWS, 10, shuffle=True, seed=0)
    assert (loader.state_dict()["epoch"], loader.state_dict()["row"]) == (0, 0)
    loader.set_epoch(4)
    assert loader.state_dict()["epoch"] == 4
    iter(loader)
    assert (loader.state_dict()["epoch"], loader.state_dict()["row"]) == (4, 0)
    next(iter(loader))
    assert (loader.state_dict()["epoch"], loader.state_dict()["row"]) == (4, 10), "the first iter() used up no epoch"


@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.integers(0, 10))
def test_elastic(batch_size, world, other_world, steps):
    """Some ranks read a while; others, of another number and batch size, go on; together that is the epoch."""
    options = {"shuffle": True, "seed": 0, "last": "uneven"}
    before = [Loader(ROWS, batch_size, **options, ranks=(r, world)) for r in range(world)]
    running = [iter(loader) for loader in before]
    steps = min(steps, *(len(loader) for loader in before))
    read = sum((next(one).tolist() for _ in range(steps) for one in running), [])
    states = [loader.state_dict() for loader in before]
    assert all(state == states[0] for state in states)
    after = [Loader(ROWS, batch_size, **options, ranks=(r, other_world)) for r in range(other_world)]
    for loader in after:
        loader.load_state_dict(through_json(states[0]))
    rest = sum((sum(rows(loader), []) for loader in after), [])
    order = sum(rows(Loader(ROWS, 1, shuffle=True, seed=0)), [])
    assert read == order[: len(read)]
    assert sorted(rest) == sorted(order[len(read) :])


# --- skip and rewind


def test_skip_and_rewind_within_the_loop():
    whole = rows(Loader(ROWS, 5, shuffle=True, seed=0))
    loader, seen = Loader(ROWS, 5, shuffle=True, seed=0), []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 3:
            loader.skip(4)
        if len(seen) == 5:
            loader.rewind(7)
    # 0 1 2 | 7 8 | then seven back from 9: 2 3 ...
    assert seen == whole[:3] + whole[7:9] + whole[2:]


@pytest.mark.parametrize("threaded", [False, True])
def test_moves_with_batches_made_ahead(threaded):
    whole = rows(Loader(ROWS, 5))
    loader = Loader(ROWS, 5)
    loader._epochs.policy.settled, loader._epochs.policy.threaded = True, threaded
    running = iter(loader)
    assert next(running).tolist() == whole[0]
    loader.skip(2)
    assert loader.state_dict()["row"] == 15
    assert next(running).tolist() == whole[3]
    loader.rewind(4)
    assert next(running).tolist() == whole[0]
    loader.skip(10)
    assert list(running) == []


def test_moves_before_an_epoch_and_from_a_short_last_batch():
    whole = rows(Loader(ROWS, 10))
    loader = Loader(ROWS, 10)
    loader.skip(4)
    assert rows(loader) == whole[4:]
    running = iter(loader)
    for _ in whole:
        next(running)
    loader.rewind(1)
    assert rows(running) == whole[-1:]


def test_moves_beyond_the_epoch_are_refused_and_change_nothing():
    loader = Loader(ROWS, 10)
    running = iter(loader)
    next(running)
    with pytest.raises(LoaderError, match=r"found skip\(6\) with 5 batches left in epoch 0; expected at most 5"):
        loader.skip(6)
    with pytest.raises(LoaderError, match=r"found rewind\(2\) at batch 1 of epoch 0"):
        loader.rewind(2)
    with pytest.raises(LoaderError, match="found n_batches=-1; expected an int of at least 0"):
        loader.skip(-1)
    assert next(running).tolist() == list(range(10, 20))


@pytest.mark.parametrize("last", ["repeat", "pad", "drop"])
def test_the_sampler_decides_where_its_epoch_ends(last):
    def skipped(batches, first):
        loader = Loader(ROWS, 4, sampler=list(range(9)), last=last)
        running = iter(loader)
        for _ in range(first):
            next(running)
        loader.skip(batches)
        return list(running), loader

    whole = 2 if last == "drop" else 3
    assert len(skipped(1, 0)[0]) == whole - 1  # before the first batch
    for first in range(whole):
        rest, loader = skipped(whole - first, first)
        assert rest == []
        again = Loader(ROWS, 4, sampler=list(range(9)), last=last)
        again.load_state_dict(loader.state_dict())
        assert len(list(again)) == whole  # the next epoch
        with pytest.raises(LoaderError, match=r"the sampler \(list\) draws 9 rows; expected .*: skip fewer batches"):
            skipped(whole + 1 - first, first)
    with pytest.raises(LoaderError, match=r"the sampler \(list\) draws 2 batches; expected at least 3"):
        loader = Loader(ROWS, batch_sampler=[[0, 1], [2]])
        loader.skip(3)
        list(loader)


def test_a_move_without_its_iterator_says_so():
    loader = Loader(ROWS, 10)
    for _ in loader:
        break
    with pytest.raises(LoaderError, match=r"that of epoch 0 is gone; expected skip and rewind within its loop"):
        loader.skip(1)


# --- samplers


def samplers():
    def generator():
        return torch.Generator().manual_seed(3)

    return {
        "list": lambda: [5, 3, 3, 1, 0, 7, 9],
        "random": lambda: RandomSampler(range(N)),
        "random, own generator": lambda: RandomSampler(range(N), generator=generator()),
        "subset": lambda: SubsetRandomSampler(range(0, N, 2)),
        "weighted": lambda: WeightedRandomSampler(torch.arange(1, N + 1), 30, generator=generator()),
    }


@pytest.mark.parametrize("name", samplers())
@pytest.mark.parametrize("batches", [False, True])
def test_a_sampler_goes_on_where_it_was(name, batches):
    sampler = samplers()[name]

    def make():
        if batches:
            return Loader(ROWS, batch_sampler=BatchSampler(sampler(), 4, drop_last=False))
        return Loader(ROWS, 4, sampler=sampler())

    torch.manual_seed(1)
    loader = make()
    running = iter(loader)
    first = [next(running).tolist() for _ in range(2)]
    state = through_json(loader.state_dict())
    torch.rand(10)  # training draws too
    left = rows(running)
    assert first
    torch.manual_seed(99)
    before = torch.get_rng_state()
    other = make()
    other.load_state_dict(state)
    assert rows(other) == left
    if "own" in name or name in ("list", "weighted"):
        assert torch.equal(torch.get_rng_state(), before), "the redraw leaves no trace in the global generator"


def test_a_state_of_an_iterator_that_has_given_nothing_has_its_order():
    loader = Loader(ROWS, 4, shuffle=True)
    assert loader.state_dict()["seed"] == "", "nothing is drawn for nobody"
    running = iter(loader)
    state, order = loader.state_dict(), rows(running)
    loader.load_state_dict(through_json(state))
    assert rows(loader) == order


def test_the_generator_of_a_sampler_deep_inside_of_others_goes_on_too():
    class Inside:
        def __init__(self, sampler):
            self.sampler = sampler

        def __iter__(self):
            return iter(self.sampler)

    def make(seed):
        sampler = RandomSampler(range(N), generator=torch.Generator().manual_seed(seed))
        return Loader(ROWS, batch_sampler=BatchSampler(Inside(Inside(sampler)), 4, drop_last=False))

    loader, other = make(3), make(4)
    running = iter(loader)
    next(running), next(running)
    other.load_state_dict(through_json(loader.state_dict()))
    assert rows(other) == rows(running)


def test_a_sampler_that_draws_something_else_is_refused():
    drawn = iter([[0, 1, 2, 3, 4, 5], [0, 1, 2, 9, 4, 5]])

    class Odd:
        def __iter__(self):
            return iter(next(drawn))

    loader = Loader(ROWS, 2, sampler=Odd())
    running = iter(loader)
    next(running), next(running)
    other = Loader(ROWS, 2, sampler=Odd())
    other.load_state_dict(loader.state_dict())
    with pytest.raises(LoaderError, match=r"the sampler \(Odd\) draws other rows than before"):
        list(other)


def test_a_sampler_is_told_the_epoch():
    sampler = torch.utils.data.DistributedSampler(range(N), num_replicas=2, rank=0, seed=1)
    loader = Loader(ROWS, 5, sampler=sampler)
    first, second = sum(rows(loader), []), sum(rows(loader), [])
    sampler.set_epoch(0)
    assert first == list(sampler)
    sampler.set_epoch(1)
    assert second == list(sampler)


def test_moves_under_a_sampler():
    loader = Loader(ROWS, 2, sampler=list(range(20)))
    running = iter(loader)
    next(running)
    loader.skip(2)
    assert next(running).tolist() == [6, 7]
    loader.rewind(3)
    assert next(running).tolist() == [2, 3]


# --- states of something else


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: Loader(torch.arange(N + 1), 5, shuffle=True, seed=0),
            "found a state with rows 53; this loader has rows 54",
        ),
        (lambda: Loader(ROWS, 5, shuffle=True, seed=1), "found a state with seed 0; this loader has seed 1"),
        (
            lambda: Loader(ROWS, 5),
            "found a state with order 'shuffle=True'; this loader has order 'shuffle=False'",
        ),
        (
            lambda: Loader(ROWS, 5, shuffle=Blocks(2), seed=0),
            "this loader has order 'shuffle=Blocks\\(rows=2\\)'",
        ),
    ],
)
def test_a_state_of_another_loader(other, message):
    loader = Loader(ROWS, 5, shuffle=True, seed=0)
    next(iter(loader))
    with pytest.raises(LoaderError, match=message):
        other().load_state_dict(loader.state_dict())


def test_a_state_of_another_store_or_view(tmp_path):
    one = memfeed.cache((ROWS,), tmp_path / "a.mf", progress=False)
    two = memfeed.cache((ROWS + 1,), tmp_path / "b.mf", progress=False)
    state = Loader(one, 5).state_dict()
    for other in (two, one.subset(range(N - 1, -1, -1))):
        with pytest.raises(LoaderError, match="found a state with store '"):
            Loader(other, 5).load_state_dict(state)
    Loader(memfeed.open(tmp_path / "a.mf"), 9).load_state_dict(state)


class Words(Dataset):
    def __init__(self, bad=()):
        self.bad = bad

    def __len__(self):
        return N

    def __getitem__(self, i):
        if i in self.bad:
            raise ValueError(i)
        return {"i": i, "text": "word " * (i % 7), "tokens": torch.arange(i % 5 * 3)}


def converted_in_two_orders(dataset, folder, **options):
    """Return two stores of a dataset whose bytes are in other places, as those of several workers are."""
    one = cache(dataset, folder / "a.mf", workers=0, **options)
    two = cache(dataset, folder / "b.mf", workers=0, lazily=True, **options)
    list(Loader(two, 8, shuffle=True, seed=1))
    two.finish()
    two = memfeed.open(folder / "b.mf")
    assert one.digest != two.digest
    return one, two


@pytest.mark.parametrize(
    "view",
    [
        lambda store: store,
        lambda store: store.subset(range(40, 3, -1)),
        lambda store: store.packed("tokens", 8),
        lambda store: store.windows({"i": [-1, 0]}, within=None),
        lambda store: [store, store.subset(range(9))],
    ],
    ids=["store", "subset", "packed", "windows", "several"],
)
def test_a_state_fits_every_conversion_of_the_dataset(tmp_path, view):
    one, two = (view(store) for store in converted_in_two_orders(Words(), tmp_path))
    loader, other = (Loader(source, 5, shuffle=True, seed=2) for source in (one, two))
    running = iter(loader)
    next(running)
    state = through_json(loader.state_dict())
    other.load_state_dict(state)
    assert equal(list(other), list(running))
    assert other.state_dict() == loader.state_dict()
    digest = one.digest if isinstance(one, memfeed.Store) else state["store"]
    loader.load_state_dict(state | {"store": digest})  # as states had it before


def test_a_state_fits_a_conversion_only_with_its_rows(tmp_path):
    _, two = converted_in_two_orders(Words(), tmp_path)
    state = Loader(two, 5).state_dict()
    stores = [two.subset(range(N)[::-1]), [two, two.subset(range(9))], two.packed("tokens", 8)]
    for name, bad in (("one.mf", [20]), ("other.mf", [21]), ("same.mf", [21])):
        stores.append(cache(Words(bad), tmp_path / name, workers=0, on_error="skip"))
    for other in stores:
        with pytest.raises(LoaderError, match="found a state"):
            Loader(other, 5).load_state_dict(state)
    *_, one, other, same = stores
    skipped = Loader(other, 5).state_dict()
    Loader(same, 5).load_state_dict(skipped)
    with pytest.raises(LoaderError, match="found a state with store"):
        Loader(one, 5).load_state_dict(skipped)
    with pytest.raises(LoaderError, match="found a state with store"):
        Loader([two, one], 5).load_state_dict(Loader([two, other], 5).state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "found a state of version 2; expected 1"),
        ({"row": 54}, "found a state at epoch 0, row 54"),
        ({"row": -1}, "row -1"),
        ({"epoch": "x"}, "found a state at epoch 'x'"),
        ({"sampler": "{"}, "whose sampler cannot be read"),
        (None, "found a state of NoneType"),
        ("gone", "found a state of .*expected the dict that state_dict"),
    ],
)
def test_a_state_that_was_tampered_with(change, message):
    loader = Loader(ROWS, 5)
    state = loader.state_dict()
    if isinstance(change, dict):
        state |= change
    elif change is None:
        state = None
    else:
        del state["row"]
    with pytest.raises(LoaderError, match=message):
        loader.load_state_dict(state)
    assert rows(loader)[0] == list(range(5)), "a refused state changes nothing"


def test_weights_resume_too():
    stores = [torch.arange(40), torch.arange(100, 130)]
    sources = [memfeed.cache((one,), progress=False) for one in stores]

    def make():
        return Loader([*zip(sources, [0.25, 0.75], strict=True)], 7, shuffle=True, seed=0)

    whole = [batch[0].tolist() for batch in make()]
    loader = make()
    running = iter(loader)
    for _ in range(3):
        next(running)
    other = make()
    other.load_state_dict(through_json(loader.state_dict()))
    assert [batch[0].tolist() for batch in other] == whole[3:]
    with pytest.raises(LoaderError, match="found a state with order"):
        Loader([(one, 0.5) for one in sources], 7, shuffle=True, seed=0).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("shuffle", [1, np.True_])
def test_what_equals_true_is_the_same_order(shuffle):
    state = Loader(torch.arange(9), 2, shuffle=shuffle, seed=0).state_dict()
    Loader(torch.arange(9), 2, shuffle=True, seed=0).load_state_dict(state)


def test_a_state_of_the_last_batch_of_a_sampler_says_that_nothing_is_left(capsys):
    """Lightning takes the pass without a batch for a whole epoch."""
    loader, resumed = (Loader(ROWS, 10, sampler=range(N)) for _ in range(2))
    loader.set_epoch(707)
    running = iter(loader)
    for _ in range(len(loader)):
        next(running)
    resumed.load_state_dict(loader.state_dict())
    assert "a pass had no batch" not in capsys.readouterr().err
    assert rows(resumed) == []
    assert "is that of the last batch of epoch 707" in capsys.readouterr().err
    assert len(rows(resumed)) == len(loader)
    assert "a pass had no batch" not in capsys.readouterr().err
