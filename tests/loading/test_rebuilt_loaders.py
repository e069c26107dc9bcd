"""Each way in which a framework makes another loader of one: the rows, their order and the transform stay.

Lightning and Accelerate are called; ignite and Opacus, which are not installed, in a few lines that do what they do.
"""

import tempfile
from functools import partial

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

import memfeed
from memfeed import Blocks, Loader
from memfeed.errors import LoaderError, RowError
from memfeed.system.threads import end_all
from support import Made

N = 30


def sample(i):
    return torch.full((4,), float(i)), i


def plus_1000(numbers):
    return numbers + 1000


OPTIONS = {"batch_size": 7, "shuffle": True, "seed": 3, "transform": {"0": plus_1000}}


@pytest.fixture
def make(request, tmp_path, monkeypatch):
    """Return what makes a loader of the source that the test asks for."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path, dataset = tmp_path / "s.mf", Made(sample, N)
    sources = {
        "store": lambda: {"dataset": memfeed.cache(dataset, path, progress=False)},
        "view": lambda: {"dataset": memfeed.cache(dataset, path, progress=False).subset(range(N))},
        "columns": lambda: {"dataset": (torch.arange(N).float().repeat(4, 1).T.contiguous(), torch.arange(N))},
        "dataset": lambda: {"dataset": dataset},
        "dataset and cache": lambda: {"dataset": dataset, "cache": path},
    }
    given = sources[request.param]()
    yield lambda **options: Loader(**given, **{**OPTIONS, **options})
    end_all()


SOURCES = pytest.mark.parametrize("make", ["store", "view", "columns", "dataset", "dataset and cache"], indirect=True)


def read(loader):
    """Return the rows of each batch, after a look at what the transform has made of them."""
    batches = [(numbers, rows.tolist()) for numbers, rows in loader]
    for numbers, rows in batches:
        assert numbers.tolist() == [[row + 1000.0] * 4 for row in rows]
    return [rows for _, rows in batches]


# --- ignite: type(loader)(**its public attributes), with a batch sampler that draws from the loader's


class Repeatable(BatchSampler):
    """As ignite's ReproducibleBatchSampler: all batches are drawn when the epoch begins."""

    def __init__(self, batch_sampler):
        self.batch_sampler, self.sampler = batch_sampler, batch_sampler.sampler

    def __iter__(self):
        yield from list(self.batch_sampler)

    def __len__(self):
        return len(self.batch_sampler)


def by_ignite(loader):
    left_out = ("batch_size", "sampler", "drop_last", "batch_sampler", "dataset_kind")
    kept = {name: value for name, value in vars(loader).items() if not name.startswith("_") and name not in left_out}
    return type(loader)(**kept, batch_sampler=Repeatable(loader.batch_sampler))


@SOURCES
def test_ignite(make):
    loader, alone = by_ignite(make()), make()
    for _ in range(2):
        assert read(loader) == read(alone)
    assert len(loader) == len(alone)


@pytest.mark.parametrize("make", ["store"], indirect=True)
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": Blocks(5)},
        {"shuffle": False},
        {"seed": None},
        {"batch_size": 4, "drop_last": True},
        {"return_rows": True, "transform": {}},
    ],
)
def test_ignite_with_other_arguments(make, options):
    torch.manual_seed(0)
    found = [batch[-1].tolist() for batch in by_ignite(make(**options))]
    torch.manual_seed(0)
    assert found == [batch[-1].tolist() for batch in make(**options)]


@pytest.mark.parametrize("make", ["store"], indirect=True)
def test_ignite_with_what_a_batch_sampler_cannot_keep(make):
    for options, message in (({"last": "pad"}, "found a batch_sampler"), ({"ranks": (0, 2)}, "and ranks")):
        with pytest.raises(LoaderError, match=message):
            by_ignite(make(**options))


# --- Opacus: a DataLoader of the parts, with a sampler of its own, or with a generator for ours


class Poisson:
    """As Opacus' UniformWithReplacementSampler: each row with a probability; a batch may be empty."""

    def __init__(self, generator):
        self.generator = generator

    def __iter__(self):
        yield []
        for _ in range(5):
            yield (torch.rand(N, generator=self.generator) < 0.3).nonzero().reshape(-1).tolist()

    def __len__(self):
        return 6


PARTS = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")


def parts(loader):
    return {name: getattr(loader, name) for name in (*PARTS, "persistent_workers", "dataset")}


def or_empty(collate_fn, shapes, samples):
    return collate_fn(samples) if len(samples) else [torch.zeros(shape) for shape in shapes]


@SOURCES
def test_opacus_poisson_batches(make):
    loader = make()
    shapes = [[0, *getattr(part, "shape", ())] for part in loader.dataset[0]]
    sampler = Poisson(torch.Generator().manual_seed(1))
    collate_fn = partial(or_empty, loader.collate_fn, shapes)
    found = read(DataLoader(**parts(loader), batch_sampler=sampler, collate_fn=collate_fn, generator=loader.generator))
    assert found == list(Poisson(torch.Generator().manual_seed(1)))


@SOURCES
def test_opacus_switches_the_generator(make):
    def order(seed):
        loader, generator = make(seed=None), torch.Generator().manual_seed(seed)
        loader.batch_sampler.sampler.generator = generator
        made = DataLoader(
            **parts(loader), batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn, generator=generator
        )
        found = read(made)
        assert sorted(sum(found, [])) == list(range(N))
        return found

    assert order(1) == order(1) != order(2)


# --- Lightning: type(loader)(**the attributes that are arguments), or the arguments that its hooks saw


def distributed(dataset, rank=0):
    return DistributedSampler(dataset, num_replicas=2, rank=rank, shuffle=True, seed=5)


@SOURCES
def test_lightning(make):
    data = pytest.importorskip("lightning.pytorch.utilities.data")
    of_fabric = pytest.importorskip("lightning.fabric.utilities.data")
    for update in (data._update_dataloader, of_fabric._update_dataloader):
        ranks = [read(update(make(), distributed(range(N), rank))) for rank in range(2)]
        assert ranks[0] == [*map(list, BatchSampler(distributed(range(N)), 7, False))]
        assert sorted(sum(ranks[0] + ranks[1], [])) == list(range(N))
        assert sum(read(update(make(), SequentialSampler(range(N)))), []) == list(range(N))


@SOURCES
@pytest.mark.parametrize("is_known", [True, False])
def test_lightning_in_a_hook(make, is_known, monkeypatch):
    """Unless a program has used Loader before, its class is imported in the hook, which records those that it knows."""
    of_fabric = pytest.importorskip("lightning.fabric.utilities.data")
    if not is_known:
        monkeypatch.setattr(of_fabric, "get_all_subclasses", lambda cls: set())
    with of_fabric._replace_dunder_methods(DataLoader, "dataset"), of_fabric._replace_dunder_methods(BatchSampler):
        loaders = [make(), make()]
    ranks = [read(of_fabric._update_dataloader(loaders[rank], distributed(range(N), rank))) for rank in range(2)]
    assert ranks[0] == [*map(list, BatchSampler(distributed(range(N)), 7, False))]
    assert sorted(sum(ranks[0] + ranks[1], [])) == list(range(N))


# --- Accelerate: a DataLoader of the parts


@pytest.fixture
def prepared():
    accelerate = pytest.importorskip("accelerate")
    accelerate.PartialState()
    data = pytest.importorskip("accelerate.data_loader")
    return partial(data.prepare_data_loader, put_on_device=False)


@SOURCES
@pytest.mark.parametrize("seedable", [False, True])
def test_accelerate(make, prepared, seedable):
    loader = prepared(make(), num_processes=1, process_index=0, use_seedable_sampler=seedable)
    found = [read(loader) for _ in range(2)]
    assert all(sorted(sum(one, [])) == list(range(N)) for one in found)
    assert found[0] != found[1]
    if not seedable:
        alone = make()
        assert found == [read(alone), read(alone)]


@SOURCES
@pytest.mark.parametrize("seed", [3, None])
def test_accelerate_with_two_processes(make, prepared, seed):
    def ranks():
        torch.manual_seed(1)
        for rank in range(2):
            loader = make(seed=seed)
            if seed is None:  # what Accelerate synchronises when an epoch begins
                loader.sampler.generator = torch.Generator().manual_seed(9)
            yield prepared(loader, num_processes=2, process_index=rank, even_batches=False, rng_types=[])

    found = [read(loader) for loader in ranks()]
    assert sorted(sum(found[0] + found[1], [])) == list(range(N))
    if seed is not None:
        alone = read(make())
        assert found == [alone[::2], alone[1::2]]


@pytest.mark.parametrize("make", ["store", "dataset"], indirect=True)
@pytest.mark.parametrize("shuffle", [False, True])
def test_accelerate_goes_on_in_the_epoch_of_a_state_though_it_counts_another_one(make, shuffle):
    """As its loaders with ``use_stateful_dataloader``, which set the epoch of our sampler to the count of passes."""
    first = make(shuffle=shuffle, transform=None)
    parts = {"batch_sampler": first.batch_sampler, "collate_fn": first.collate_fn}
    loader = make(batch_size=1, shuffle=None, seed=None, transform=None, **parts)
    running = iter(loader)
    next(running), next(running)
    state, left = loader.state_dict(), [rows.tolist() for _, rows in running]
    loader.load_state_dict(state)
    loader.batch_sampler.sampler.set_epoch(1)
    assert [rows.tolist() for _, rows in loader] == left
    loader.load_state_dict({**state, "_iterator_finished": True})
    loader.batch_sampler.sampler.set_epoch(1)
    assert len([*loader]) == len(loader)


# --- samplers as torch's documentation shows them


class WithoutLength:
    """As PyTorch Geometric's DynamicBatchSampler, whose ``__len__`` raises ValueError."""

    batches = ([0, 1, 2], [5], [3, 4])

    def __iter__(self):
        yield from self.batches

    def __len__(self):
        raise ValueError("the number of steps is ambiguous")


@SOURCES
def test_a_batch_sampler_whose_length_raises(make):
    loader = make(batch_size=1, shuffle=False, seed=None, batch_sampler=WithoutLength())
    assert read(loader) == [*WithoutLength.batches]
    assert "? batches an epoch" in repr(loader)
    with pytest.raises(ValueError, match="ambiguous"):
        len(loader)
    running_now = iter(loader)
    next(running_now)
    state, left = loader.state_dict(), read(running_now)
    other = make(batch_size=1, shuffle=False, seed=None, batch_sampler=WithoutLength())
    other.load_state_dict(state)
    assert read(other) == left == [*WithoutLength.batches[1:]]


def test_dynamic_batches_of_graphs(tmp_path):
    geometric = pytest.importorskip("torch_geometric")
    graphs = [geometric.data.Data(x=torch.full((1 + i % 3, 2), i)) for i in range(9)]
    store = memfeed.cache(Made(graphs), tmp_path / "g.mf", progress=False)

    def batches():
        return geometric.loader.DynamicBatchSampler(graphs, max_num=5)

    found = [batch.x[:, 0].unique().tolist() for batch in Loader(store, batch_sampler=batches())]
    assert found == [batch for batch in batches()]  # noqa: C416  list() would ask for the length, which raises
    assert sum(found, []) == list(range(9))


@SOURCES
def test_lists_of_rows_without_automatic_batching(make):
    """``sampler=BatchSampler(...), batch_size=None``, where DataLoader calls ``dataset[list]``."""
    rows = list(range(N))[::-1]
    sampler = BatchSampler(rows, 7, drop_last=False)
    loader = make(batch_size=None, shuffle=False, seed=None, sampler=sampler)
    assert read(loader) == list(sampler)
    assert (loader.sampler, loader.batch_sampler, loader.batch_size) == (sampler, None, None)
    assert len(loader) == 5
    plain = make(batch_size=None, shuffle=False, seed=None, sampler=sampler, transform={})
    theirs = list(DataLoader(plain.dataset, batch_size=None, sampler=sampler))
    rebuilt = list(DataLoader(plain.dataset, batch_size=None, sampler=sampler, collate_fn=plain.collate_fn))
    seen = make(
        batch_size=None, shuffle=False, seed=None, sampler=sampler, transform={}, collate_fn=lambda batch: batch
    )
    for found in (plain, rebuilt, seen):
        for batch, other in zip(found, theirs, strict=True):
            assert type(batch) is type(other)
            assert all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))
    with pytest.raises(LoaderError, match="found batch_size=None on a loader whose rows another component draws"):
        next(iter(DataLoader(loader.dataset, batch_size=None, sampler=sampler, collate_fn=loader.collate_fn)))


@pytest.mark.parametrize("make", ["store"], indirect=True)
def test_lists_of_rows_go_to_another_process(make):
    import pickle

    sampler = BatchSampler(range(N), 7, drop_last=False)
    loader = make(batch_size=None, shuffle=False, seed=None, sampler=sampler)
    other = pickle.loads(pickle.dumps(loader))
    assert read(other) == list(sampler)
    assert (type(other.sampler), other.batch_sampler, other.batch_size) == (BatchSampler, None, None)


@SOURCES
def test_lists_of_rows_as_rows_are_refused_before_the_first_batch(make):
    for options in (
        {"sampler": BatchSampler(RandomSampler(range(N)), 7, False)},
        {"sampler": [[0, 1], [2, 3]], "batch_size": None},
    ):
        with pytest.raises(RowError, match="from a sampler; expected row numbers: lists of rows are batches"):
            next(iter(make(**{"shuffle": False, "seed": None, **options})))


@pytest.mark.parametrize("make", ["store"], indirect=True)
def test_arguments_of_stateful_dataloader(make):
    loader = make(snapshot_every_n_steps=5)
    assert loader.snapshot_every_n_steps == 5
    running_now = iter(loader)
    next(running_now)
    other = make()
    other.load_state_dict(loader.state_dict())
    assert read(other) == read(running_now)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("make", ["store"], indirect=True)
def test_lightning_makes_a_loader_for_each_epoch(make, tmp_path):
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(4, 1), [[], []]

        def train_dataloader(self):
            return make(seed=None)

        def training_step(self, batch):
            self.seen[self.current_epoch] += batch[1].tolist()
            return self.layer(batch[0]).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-9)

    def train():
        lightning.seed_everything(5, verbose=False)
        model = Model()
        trainer = lightning.Trainer(
            max_epochs=2,
            reload_dataloaders_every_n_epochs=1,
            accelerator="cpu",
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model)
        return model.seen

    first, second = found = train()
    assert sorted(first) == sorted(second) == list(range(N))
    assert first != second
    assert train() == found
