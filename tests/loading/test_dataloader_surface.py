"""A Loader is a DataLoader: its signature, its attributes, and what frameworks do with the parts of it."""

import copy
import inspect
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

import memfeed
import memfeed.transforms as T
from forked_programs import Program
from memfeed import Blocks, Loader
from memfeed.errors import LoaderError
from memfeed.loading.ranks import draw_seed
from support import Made, equal

N = 40


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    samples = [(torch.full((3, 8, 8), i, dtype=torch.uint8), i) for i in range(N)]
    return memfeed.cache(Made(samples), tmp_path_factory.mktemp("s") / "a.mf", progress=False)


def rows(batches):
    return [batch[1].tolist() for batch in batches]


def rebuild(loader, **changes):
    """As Lightning makes a loader anew: from the attributes that have the names of the arguments."""
    kept = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
    parameters = inspect.signature(type(loader).__init__).parameters
    arguments = {name: kept[name] for name in parameters if name in kept}
    arguments |= {"batch_sampler": None, "sampler": None, "multiprocessing_context": None} | changes
    return type(loader)(**arguments)


# --- the signature and the attributes


def test_the_signature_begins_as_dataloaders():
    theirs = list(inspect.signature(DataLoader.__init__).parameters)
    ours = inspect.signature(Loader.__init__).parameters
    assert list(ours)[: len(theirs)] == theirs
    assert not any(one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in ours.values())


def test_every_argument_is_an_attribute_as_it_was_given(store):
    loader = Loader(store, 4, True, seed=3, transform=T.RandomHorizontalFlip(), return_rows=True)
    missing = [name for name in inspect.signature(Loader.__init__).parameters if name not in ("self", *vars(loader))]
    assert missing == ["multiprocessing_context"], "which DataLoader keeps under another name"
    assert (loader.batch_size, loader.shuffle, loader.seed, loader.ranks) == (4, True, 3, None)
    assert (loader.num_workers, loader.prefetch_factor, loader.pin_memory) == (0, None, False)
    assert isinstance(loader, DataLoader)
    assert len(loader.dataset) == N


def test_positional_arguments(store):
    assert rows(Loader(store, 7, True, seed=1)) == rows(Loader(store, batch_size=7, shuffle=True, seed=1))
    assert Loader[int](store, 7).batch_size == 7


def test_arguments_of_worker_processes_are_accepted_and_named_once(tmp_path):
    code = (
        "import memfeed, torch\n"
        "for _ in range(2):\n"
        "    memfeed.Loader(torch.arange(9), 2, num_workers=2, pin_memory=True, persistent_workers=True)\n"
    )
    program = Program(code, at=tmp_path)
    assert program.wait() == 0, program.err.read_text()
    assert program.err.read_text().count("without effect: num_workers, pin_memory, persistent_workers") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": -1},
        {"persistent_workers": True},
        {"drop_last": 3},
        {"shuffle": "yes"},
        {"shuffle": "blocks"},
        {"last": "keep"},
        {"sampler": [1], "shuffle": True},
        {"batch_size": None, "drop_last": True},
        {"as_": "tensorflow"},
        {"last": "uneven", "drop_last": True},
    ],
)
def test_wrong_arguments_are_value_errors(store, wrong):
    with pytest.raises(ValueError, match="found"):
        Loader(store, **wrong)


@pytest.mark.parametrize("name", ["batch_size", "drop_last", "shuffle", "seed", "sampler", "dataset", "transform"])
def test_what_is_read_at_the_start_cannot_be_assigned(store, name):
    loader = Loader(store, 4)
    with pytest.raises(ValueError, match=f"{name} attribute should not be set after Loader is initialized"):
        setattr(loader, name, getattr(loader, name))
    loader._iterator = None  # Lightning does


def test_the_length_of_an_iterator(store):
    assert len(iter(Loader(store, 7))) == len(Loader(store, 7)) == 6


def test_shuffle_none_is_false(store):
    assert rows(Loader(store, 7, shuffle=None)) == rows(Loader(store, 7))


# --- samplers


@pytest.mark.parametrize("options", [{"shuffle": True}, {}, {"shuffle": Blocks(4)}])
def test_the_sampler_gives_the_order_that_the_loader_reads(store, options):
    loader, other = Loader(store, 7, seed=5, **options), Loader(store, 7, seed=5, **options)
    for _ in range(3):
        assert list(other.sampler) == sum(rows(loader), [])
    other.sampler.set_epoch(1)
    loader.set_epoch(1)
    assert list(other.batch_sampler) == rows(loader)
    assert loader.epoch == other.epoch == other.sampler.epoch == 1


def test_what_frameworks_ask_of_samplers(store):
    assert isinstance(Loader(store, shuffle=True).sampler, RandomSampler)
    assert isinstance(Loader(store).sampler, SequentialSampler)
    assert type(Loader(store, 4).batch_sampler) is BatchSampler
    blocks = Loader(store, shuffle=Blocks()).sampler
    assert isinstance(blocks, Sampler)
    assert not isinstance(blocks, RandomSampler), "frameworks throw those away"


def test_samplers_know_no_rank(store):
    loader = Loader(store, 5, shuffle=True, seed=1, ranks=(1, 2))
    assert sorted(loader.sampler) == list(range(N))


def test_a_distributed_sampler_is_not_sharded_again(store):
    read = []
    for rank in range(2):
        sampler = DistributedSampler(store, 2, rank, shuffle=True)
        read += sum(rows(Loader(store, 5, sampler=sampler)), [])
    assert sorted(read) == list(range(N))


class Driven(Sampler):
    """A sampler whose user calls set_epoch."""

    def __init__(self):
        self.epoch, self.called = 0, []

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.called.append(epoch)

    def __iter__(self):
        return iter(torch.randperm(N, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self):
        return N


def test_the_users_set_epoch_wins(store):
    sampler = Driven()
    loader = Loader(store, 8, sampler=sampler)
    sampler.set_epoch(5)
    first = rows(loader)
    assert loader.epoch == 5
    sampler.set_epoch(5)
    assert rows(loader) == first, "also the same epoch again"
    assert sampler.called == [5, 5]
    loader.set_epoch(2)
    list(loader)
    assert sampler.called == [5, 5, 2]


def test_an_epoch_that_a_sampler_had_before_the_loader_counts(store):
    def at(epoch):
        sampler = Driven()
        sampler.set_epoch(epoch)
        return sampler

    sampler = at(5)
    loader = Loader(store, 8, sampler=sampler)
    assert loader.epoch == 5
    assert sum(rows(loader), []) == list(at(5))
    assert sum(rows(loader), []) == list(at(6)), "nobody calls it, so each pass is the next epoch"
    assert sampler.called == [5, 5, 6]

    sampler = at(5)
    loader = Loader(store, batch_sampler=BatchSampler(sampler, 8, False))
    sampler.set_epoch(7)
    assert sum(rows(loader), []) == list(at(7))
    assert loader.epoch == 7

    sampler = at(5)
    loader = Loader(store, 8, sampler=sampler)
    loader.set_epoch(2)
    assert sum(rows(loader), []) == list(at(2)), "a call of the user's"


def test_a_state_counts_more_than_the_epoch_that_a_sampler_had_before_the_loader(store):
    sampler = torch.utils.data.DistributedSampler(store, num_replicas=1, rank=0)
    loader = Loader(store, 8, sampler=sampler)
    running = iter(loader)
    next(running)
    state, left = loader.state_dict(), rows(running)
    sampler.set_epoch(3)
    other = Loader(store, 8, sampler=sampler)
    other.load_state_dict(state)
    assert rows(other) == left
    assert sampler.epoch == other.epoch == 0


def test_a_sampler_that_hides_its_epoch_is_not_set_to_the_first(store):
    class Hidden:
        def __init__(self):
            self.called = []

        def set_epoch(self, epoch):
            self.called.append(epoch)

        def __iter__(self):
            return iter(range(N))

    sampler = Hidden()
    sampler.set_epoch(1)
    loader = Loader(store, 8, sampler=sampler)
    for _ in range(3):
        list(loader)
    assert sampler.called == [1, 1, 2]


def test_a_sampler_that_nobody_drives_gets_each_epoch(store):
    sampler = Driven()
    loader = Loader(store, 8, sampler=sampler)
    assert rows(loader) != rows(loader)
    assert sampler.called == [0, 1]


# --- what frameworks make of the parts


AUGMENT = T.Compose([T.RandomCrop(6), T.RandomHorizontalFlip()])


def test_a_dataloader_of_the_parts_gives_the_same_batches(store):
    loader = Loader(store, 7, shuffle=True, seed=2, transform=AUGMENT)
    of_parts = Loader(store, 7, shuffle=True, seed=2, transform=AUGMENT)
    theirs = DataLoader(of_parts.dataset, batch_sampler=of_parts.batch_sampler, collate_fn=of_parts.collate_fn)
    for _ in range(2):
        assert equal(list(loader), list(theirs))


def test_a_loader_made_anew_with_another_sampler_keeps_the_rest(store):
    loader = Loader(store, 7, shuffle=True, seed=2, transform=AUGMENT, return_rows=True)
    other = rebuild(loader, sampler=SequentialSampler(store), shuffle=False)
    batches = list(other)
    assert torch.cat([batch[1] for batch in batches]).tolist() == list(range(N))
    assert batches[0][0][0].shape == (7, 3, 6, 6)
    assert other.transform is AUGMENT
    assert other.state_dict()["seed"] == 2


def test_a_loader_made_anew_without_changes_is_equal(store):
    for options in ({"shuffle": True}, {"shuffle": Blocks(4)}, {"drop_last": True}, {"last": "pad"}):
        loader = Loader(store, 7, seed=2, **options)
        assert equal(list(rebuild(loader)), list(Loader(store, 7, seed=2, **options)))


def test_a_sampler_that_is_put_in_decides(store, capsys):
    loader = Loader(store, 7, shuffle=True, seed=2, transform=AUGMENT)
    loader.batch_sampler.sampler = SequentialSampler(store)  # as Accelerate does
    assert rows(loader) == rows(Loader(store, 7))
    assert next(iter(loader))[0].shape == (7, 3, 6, 6)


def test_padding_cannot_be_lost_silently(store):
    loader = Loader(store, 7, last="pad")
    theirs = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)
    with pytest.raises(LoaderError, match='found last="pad" on a loader whose batches another component draws'):
        next(iter(theirs))


# --- collate_fn, single samples, rows, arrays


def test_a_collate_fn_gets_a_list_of_samples(store):
    found = list(Loader(store, 7, shuffle=True, seed=1, collate_fn=lambda samples: (type(samples), len(samples))))
    assert found == [(list, 7)] * 5 + [(list, 5)]
    summed = Loader(store, 7, shuffle=True, seed=1, collate_fn=lambda samples: sum(label for _, label in samples))
    assert list(summed) == [sum(labels) for labels in rows(Loader(store, 7, shuffle=True, seed=1))]


def test_a_collate_fn_assigned_later_is_used(store):
    loader = Loader(store, 7)
    loader.collate_fn = len
    assert list(loader) == [7] * 5 + [5]


def test_batch_size_none_gives_samples(store):
    found = list(Loader(store, None, shuffle=True, seed=4))
    assert len(found) == N
    assert [label for _, label in found] == sum(rows(Loader(store, 1, shuffle=True, seed=4)), [])
    assert found[0][0].shape == (3, 8, 8)
    theirs = list(DataLoader(store, None))
    assert equal(list(Loader(store, None)), theirs)


def test_tensordict_samples_move_as_their_batch():
    td = TensorDict({"a": torch.arange(10)}, [10])
    held = memfeed.cache(Made([td[i] for i in range(10)]), progress=False)
    for loader in (DataLoader, Loader):
        batches = list(loader(held, batch_size=4, collate_fn=lambda x: x.to("cpu")))
        assert [batch["a"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert all(isinstance(batch, TensorDict) for batch in batches)


def test_stores_add_up(store):
    both = store + store.subset(range(5))
    assert isinstance(both, ConcatDataset)
    assert sum(rows(Loader(both, 9)), []) == [*range(N), *range(5)]


def test_a_batch_can_say_its_rows(store):
    part = store.subset([30, 10, 20])
    for (_, labels), found in Loader(part, 2, shuffle=True, seed=0, return_rows=True):
        assert [[30, 10, 20][row] for row in found.tolist()] == labels.tolist()
    padded = list(Loader(part, 2, last="pad", return_rows=True))
    assert [len(batch) for batch in padded] == [3, 3]
    assert padded[1][1].tolist() == [True, False]
    named = memfeed.cache({"x": torch.arange(4)}, progress=False)
    assert next(iter(Loader(named, 3, return_rows=True)))["rows"].tolist() == [0, 1, 2]


def test_numpy_arrays_share_the_memory_of_the_batch(store):
    images, labels = next(iter(Loader(store, 4, as_="numpy")))
    assert isinstance(images, np.ndarray)
    assert images.shape == (4, 3, 8, 8)
    assert labels.tolist() == [0, 1, 2, 3]
    kept = [batch[1] for batch in Loader(store, 4, as_="numpy")]
    assert np.concatenate(kept).tolist() == list(range(N))


def test_empty_datasets_give_empty_loaders(store):
    for empty in (Subset(store, []), store.subset([]), torch.zeros(0, 3)):
        for options in ({}, {"shuffle": True}, {"shuffle": Blocks()}, {"drop_last": True}, {"last": "pad"}):
            loader = Loader(empty, 4, **options)
            assert (len(loader), list(loader)) == (0, [])


# --- seeds and epochs


def test_torchs_seed_decides_where_no_seed_is_given(store):
    def order(seed):
        torch.manual_seed(seed)
        return rows(Loader(store, 7, shuffle=True))

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_the_seed_is_taken_when_the_first_batch_is_asked_for(store):
    loader = Loader(store, 7, shuffle=True)
    iter(loader)
    torch.manual_seed(11)
    first = rows(loader)
    torch.manual_seed(11)
    assert rows(Loader(store, 7, shuffle=True)) == first


def test_a_generator_seeds(store):
    def order(seed):
        before = torch.get_rng_state()
        found = rows(Loader(store, 7, shuffle=True, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(torch.get_rng_state(), before)
        return found

    assert order(1) == order(1) != order(2)


def test_loaders_made_one_after_the_other_differ(store):
    """For each epoch, for each fold of a cross-validation, for each of two domains: orders and crops of their own."""
    options = {"transform": T.RandomCrop(8, padding=2, on=0)}
    found = []
    for _ in range(2):
        torch.manual_seed(4)
        loaders = [Loader(store, 40, shuffle=True, **options) for _ in range(2)]
        found.append([batch for loader in loaders for batch in loader])
    (first, second), again = found
    assert first[1].tolist() != second[1].tolist()
    in_rows = [batch[0][batch[1].argsort()] for batch in (first, second)]
    assert not torch.equal(*in_rows)
    for batch, other in zip((first, second), again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))


def test_a_seed_is_drawn_in_the_first_pass_and_only_there(store):
    torch.manual_seed(4)
    before = torch.get_rng_state()
    loader = Loader(store, 7, shuffle=True)
    len(loader), repr(loader), loader.state_dict(), iter(loader), loader.skip(0)
    assert torch.equal(torch.get_rng_state(), before)
    rows(loader)
    after = torch.get_rng_state()
    assert not torch.equal(after, before)
    first = loader.state_dict()["seed"]
    torch.manual_seed(4)
    rows(loader)
    assert torch.equal(torch.get_rng_state(), before), "a second pass draws nothing"
    assert loader.state_dict()["seed"] == first


@pytest.mark.parametrize("part", ["loader", "sampler"])
def test_a_generator_that_is_put_in_seeds_the_next_pass(store, part):
    def order(seed):
        loader = Loader(store, 7, shuffle=True)
        first, generator = rows(loader), torch.Generator().manual_seed(seed)
        (loader if part == "loader" else loader.sampler).generator = generator
        assert loader.sampler.generator is generator
        loader.set_epoch(0)
        before = torch.get_rng_state()
        found = rows(loader)
        assert found != first
        assert torch.equal(torch.get_rng_state(), before)
        loader.set_epoch(0)
        assert list(loader.sampler) == sum(found, [])
        return found

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize("cls", [DataLoader, Loader])
def test_a_sampler_that_draws_nothing_has_no_generator_to_replace(store, cls):
    """Opacus' secure mode, which puts another generator in, refuses such a loader."""
    generator = torch.Generator()
    assert not hasattr(cls(store, 7, generator=generator).sampler, "generator")
    assert cls(store, 7, shuffle=True, generator=generator).sampler.generator is generator


def test_a_generator_that_is_put_into_a_sampler_that_draws_nothing_seeds_transforms(store):
    loader = Loader(store, 7)
    loader.sampler.generator = torch.Generator().manual_seed(5)
    rows(loader)
    assert loader.state_dict()["seed"] == draw_seed(torch.Generator().manual_seed(5))


def test_a_generator_beside_a_seed_is_refused(store):
    with pytest.raises(LoaderError, match=r"found a generator for a loader with seed=3.*leave seed= out"):
        Loader(store, 7, shuffle=True, seed=3).sampler.generator = torch.Generator()


@pytest.mark.parametrize("name", ["replacement", "data_source", "_num_samples"])
def test_what_a_sampler_of_ours_draws_cannot_be_assigned(store, name):
    sampler = Loader(store, 7, shuffle=True).sampler
    setattr(sampler, name, getattr(sampler, name))
    with pytest.raises(LoaderError, match=rf"found {name} assigned to the sampler of a loader; .* sampler=Random"):
        setattr(sampler, name, 5)


def test_a_state_brings_its_seed(store):
    torch.manual_seed(1)
    loader = Loader(store, 7, shuffle=True)
    whole, running = None, iter(loader)
    next(running)
    state = loader.state_dict()
    whole = rows(running)
    torch.manual_seed(2)
    other = Loader(store, 7, shuffle=True)
    other.load_state_dict(state)
    assert rows(other) == whole
    with pytest.raises(LoaderError, match=r"found a state with seed \d+; this loader has seed 9"):
        Loader(store, 7, shuffle=True, seed=9).load_state_dict(state)


def test_a_second_iter_before_a_batch_uses_no_epoch(store):
    loader, other = Loader(store, 7, shuffle=True, seed=0), Loader(store, 7, shuffle=True, seed=0)
    iter(loader)
    iter(loader)
    assert rows(loader) == rows(other)
    assert loader.epoch == other.epoch == 0


def test_set_epoch_after_iter_counts(store):
    loader, other = Loader(store, 7, shuffle=True, seed=0), Loader(store, 7, shuffle=True, seed=0)
    running = iter(loader)
    loader.sampler.set_epoch(3)
    other.set_epoch(3)
    assert rows(running) == rows(other)
    assert loader.epoch == 3


def test_set_epoch_of_the_epoch_that_is_resumed_keeps_the_position(store):
    loader = Loader(store, 7, shuffle=True, seed=0)
    loader.set_epoch(2)
    running = iter(loader)
    next(running)
    state, rest = loader.state_dict(), rows(running)
    for name in ("loader", "sampler"):
        other = Loader(store, 7, shuffle=True, seed=0)
        other.load_state_dict(state)
        (other if name == "loader" else other.sampler).set_epoch(2)
        assert rows(other) == rest
    other = Loader(store, 7, shuffle=True, seed=0)
    other.load_state_dict(state)
    other.set_epoch(3)
    loader.set_epoch(3)
    assert rows(other) == rows(loader), "another epoch begins at its beginning"


def test_a_framework_that_counts_from_zero_after_a_resume_does_not_lose_the_position(store, capsys):
    loader = Loader(store, 7, shuffle=True, seed=0)
    loader.set_epoch(2)
    running = iter(loader)
    next(running)
    state, rest = loader.state_dict(), rows(running)
    other = Loader(store, 7, shuffle=True, seed=0)
    other.load_state_dict(state)
    other.sampler.set_epoch(0)
    assert rows(other) == rest
    other.sampler.set_epoch(1)
    loader.set_epoch(3)
    assert rows(other) == rows(loader)
    assert "2 is added" in capsys.readouterr().err


def test_an_empty_state_changes_nothing(store):
    loader = Loader(store, 7, seed=0)
    loader.load_state_dict({})
    assert len(rows(loader)) == 6


# --- ranks


def test_ranks_are_read_when_an_epoch_starts(store, monkeypatch):
    loader = Loader(store, 5, shuffle=True, seed=1)
    assert len(loader) == 8
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("memfeed.loading.own_rows.has_own_rows", lambda *_, **__: False)
    assert len(loader) == 4
    assert rows(loader) == rows(Loader(store, 5, shuffle=True, seed=1, ranks=(1, 2)))
    assert Loader(store, 5).state_dict()["seed"] == ""


def test_the_launchers_ranks_hold_before_the_process_group(store, monkeypatch, capsys):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert rows(Loader(store, 5, seed=1)) == rows(Loader(store, 5, seed=1, ranks=(1, 2)))
    assert sorted(sum(rows(Loader(store, 5, ranks=(0, 1))), [])) == list(range(N))


def test_a_loader_that_changes_its_world_size_says_so(store, monkeypatch):
    loader = Loader(store, 5, seed=1)
    list(loader)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("memfeed.loading.own_rows.has_own_rows", lambda *_, **__: False)
    with pytest.warns(UserWarning, match="found 2 ranks where this loader gave its last epoch to 1"):
        list(loader)


def test_by_default_every_rank_gives_as_many_batches():
    loaders = [Loader(torch.arange(101), 10, shuffle=True, seed=0, ranks=(r, 2)) for r in range(2)]
    with pytest.warns(UserWarning, match="found 101 rows for 2 ranks: 1 rows from the beginning .* last='uneven'"):
        read = [list(loader) for loader in loaders]
    assert [len(batches) for batches in read] == [len(loader) for loader in loaders] == [6, 6]
    assert len(torch.cat(read[0])) == len(torch.cat(read[1])) == 51
    order = torch.cat(list(Loader(torch.arange(101), 10, shuffle=True, seed=0)))
    assert read[1][-1].tolist() == order[:1].tolist(), "the first row of the order comes again"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uneven = [torch.cat(list(Loader(torch.arange(101), 10, ranks=(r, 2), last="uneven"))) for r in range(2)]
    assert sorted(torch.cat(uneven).tolist()) == list(range(101))


# --- pickles, copies, threads


def test_a_pickle_keeps_the_arguments(store):
    loader = Loader(store, 7, shuffle=True, transform=AUGMENT, return_rows=True, drop_last=True)
    other = pickle.loads(pickle.dumps(loader))
    assert (other.batch_size, other.drop_last, other.return_rows, other.seed, other.ranks) == (
        7,
        True,
        True,
        None,
        None,
    )
    joined = pickle.loads(pickle.dumps(Loader([(store, 0.5), (store, 0.5)], 7, seed=1)))
    assert rows(joined) == rows(Loader([(store, 0.5), (store, 0.5)], 7, seed=1))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, that Lightning causes
@pytest.mark.parametrize("cls", [DataLoader, Loader])
def test_trainers_know_an_iterator_by_its_class_and_leave_it_out_of_a_pickle(store, cls):
    combined = pytest.importorskip("lightning.pytorch.utilities").CombinedLoader([cls(store, 7)])
    next(iter(combined))
    assert pickle.loads(pickle.dumps(combined))._iterator.iterators == [None]
    with pytest.raises(NotImplementedError, match="cannot be pickled"):
        pickle.dumps(iter(cls(store, 7)))


@pytest.mark.parametrize("keep", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_iterator_is_not_pickled_or_copied(store, keep):
    with pytest.raises(LoaderError, match=r"found a pickle or a copy of an iterator.*expected.*pickle.dumps\(loader\)"):
        keep(iter(Loader(store, 7)))


def test_a_copy_reads_the_same(store):
    loader = Loader(store, 7, shuffle=True, seed=1)
    assert rows(copy.deepcopy(loader)) == rows(copy.copy(loader))


def test_no_worker_process_and_no_thread_is_left(store):
    before = threading.active_count()
    list(Loader(store, 4, num_workers=4))
    assert threading.active_count() == before


def test_a_state_that_a_framework_marks_as_finished_leads_to_the_next_epoch(store):
    loader = Loader(store, 7, shuffle=True, seed=0)
    running = iter(loader)
    for _ in range(len(loader)):
        next(running)
    state = loader.state_dict()
    other = Loader(store, 7, shuffle=True, seed=0)
    other.load_state_dict(state)
    assert rows(other) == [], "as torchdata's: the end was not noticed yet"
    other.load_state_dict(state | {"_iterator_finished": True})
    loader.set_epoch(1)
    assert rows(other) == rows(loader)
