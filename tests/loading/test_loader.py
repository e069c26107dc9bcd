import gc
import threading
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import memfeed
from memfeed import Loader
from memfeed.errors import FieldError, LoaderError, RowError, SchemaError, StoreError, TransformError
from memfeed.order.orders import permutation
from memfeed.random import Keys
from memfeed.transforms import Transform
from support import Labelled, Made, Pair, Point, equal, rich_sample

N = 50
PLAIN = ("image", "label", "weight", "flag", "point", "text", "record.image")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return memfeed.cache(Made(rich_sample, N), tmp_path_factory.mktemp("s") / "a.mf", progress=False)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    samples = [(torch.full((3,), i), i) for i in range(N)]
    return memfeed.cache(Made(samples), tmp_path_factory.mktemp("s") / "b.mf", progress=False)


def labels(loader):
    return [batch[1].tolist() for batch in loader]


# --- what a batch is


leaf = st.sampled_from(
    [
        lambda i: i,
        lambda i: i / 3,
        lambda i: i % 2 == 0,
        lambda i: f"s{i}",
        lambda i: bytes([i]),
        lambda i: torch.full((2, 3), i, dtype=torch.int16),
        lambda i: torch.full((), i).to(torch.bfloat16),
        lambda i: torch.full((2,), i).to(torch.complex64),
        lambda i: np.full((4,), i, np.float32),
        lambda i: np.uint8(i),
        lambda i: np.float64(i),
        lambda i: torch.zeros(0, 2),
    ]
)
Triple = namedtuple("Triple", "a b c")


def nest(inner):
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda fs: lambda i: tuple(f(i) for f in fs)),
        # with a text at the end: a list of numbers is one column, see test_token_lists
        st.lists(inner, min_size=1, max_size=3).map(lambda fs: lambda i: [*(f(i) for f in fs), f"s{i}"]),
        st.dictionaries(st.sampled_from("zyxab"), inner, min_size=1, max_size=3).map(
            lambda fs: lambda i: {k: f(i) for k, f in fs.items()}
        ),
        st.tuples(inner, inner, inner).map(lambda fs: lambda i: Triple(*(f(i) for f in fs))),
    )


@settings(max_examples=60)
@given(st.recursive(leaf, nest, max_leaves=6), st.integers(1, 9), st.integers(1, 12), st.booleans())
def test_batches_are_those_of_a_dataloader(make, batch_size, n, drop_last):
    samples = [make(i) for i in range(n)]
    store = memfeed.cache(Made(samples), progress=False)
    ours = list(Loader(store, batch_size, drop_last=drop_last))
    theirs = list(DataLoader(Made(samples), batch_size, drop_last=drop_last))
    assert len(ours) == len(theirs) == len(Loader(store, batch_size, drop_last=drop_last))
    for mine, other in zip(ours, theirs, strict=True):
        assert equal(mine, listed(other))


def listed(batch):
    """default_collate gives a tuple's texts as a tuple and a dict's as a list; ours are always a list."""
    if isinstance(batch, tuple) and batch and isinstance(batch[0], str | bytes):
        return list(batch)
    if isinstance(batch, dict):
        return {key: listed(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(listed, batch))
    return list(map(listed, batch)) if isinstance(batch, list | tuple) else batch


def test_shuffled_batches_are_default_collate_of_their_rows(store):
    part = store.select(*PLAIN)
    for batch in Loader(part, 7, shuffle=True, seed=3):
        rows = batch["label"].tolist()
        expected = listed(default_collate([part[i] for i in rows]))
        expected["point"].y[1] = torch.stack(expected["point"].y[1], 1)  # a list of numbers is one column
        assert equal(batch, expected)


def test_ragged_text_and_optional_leaves(store):
    batch = next(iter(Loader(store, 6)))
    want = [rich_sample(i) for i in range(6)]
    assert batch["boxes"].is_nested
    assert batch["boxes"].layout == torch.jagged
    assert all(equal(a, b["boxes"]) for a, b in zip(batch["boxes"].unbind(), want, strict=True))
    assert [row.tolist() for row in batch["ids"].unbind()] == [b["ids"] for b in want]
    assert all(equal(a, b["picture"]) for a, b in zip(batch["picture"], want, strict=True))
    assert (batch["text"], batch["raw"], batch["meta"]) == tuple([b[k] for b in want] for k in ("text", "raw", "meta"))
    assert equal(batch["maybe"], [b["maybe"] for b in want])
    assert batch["nothing"] is None
    assert isinstance(batch["td"], TensorDict)
    assert batch["td"].batch_size == (6,)
    assert isinstance(batch["pair"], Pair)
    assert isinstance(batch["point"], Point)
    assert isinstance(batch["record"], Labelled)


def test_tensordict_samples_give_tensordict_batches(path):
    td = TensorDict({"a": torch.rand(10, 3), "b": TensorDict({"c": torch.arange(10)}, [10])}, [10])
    store = memfeed.cache(Made([td[i] for i in range(10)]), path, progress=False)
    for batch, want in zip(Loader(store, 4), td.split(4), strict=True):
        assert batch.batch_size == want.batch_size
        assert (batch == want).all()


# --- order, epochs, length


@pytest.mark.parametrize(
    ("n", "size", "drop"),
    [(50, 7, False), (50, 7, True), (50, 50, True), (50, 51, True), (50, 1, False), (50, 100, False)],
)
def test_every_row_once(pairs, n, size, drop):
    loader = Loader(pairs, size, shuffle=True, seed=0, drop_last=drop)
    batches = labels(loader)
    assert len(batches) == len(loader) == len(DataLoader(range(n), size, drop_last=drop))
    rows = sum(batches, [])
    assert len(rows) == (n - n % size if drop else n)
    assert len(set(rows)) == len(rows)


def test_epochs_differ_and_repeat_by_number(pairs):
    loader = Loader(pairs, 10, shuffle=True, seed=5)
    first, second = labels(loader), labels(loader)
    assert first != second
    assert (loader.epoch, sum(first, [])) == (1, permutation(N, 5, 0).tolist())
    loader.set_epoch(0)
    assert labels(loader) == first
    assert labels(Loader(pairs, 10, shuffle=True, seed=6)) != first
    assert sum(labels(Loader(pairs, 10)), []) == list(range(N))


def test_an_epoch_starts_with_iter_and_need_not_end(pairs):
    loader = Loader(pairs, 10, shuffle=True, seed=0)
    next(iter(loader))
    assert loader.epoch == 0
    iter(loader)
    assert loader.epoch == 0, "no batch was asked for"
    next(iter(loader))
    assert loader.epoch == 1
    one, other = iter(loader), iter(loader)
    assert next(one)[1].tolist() != next(other)[1].tolist()


def test_the_global_generators_are_not_used(pairs):
    torch.manual_seed(3)
    want = torch.rand(3)
    torch.manual_seed(3)
    list(Loader(pairs, 10, shuffle=True, seed=0))
    assert torch.equal(torch.rand(3), want)


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: [3, 3, 1],
        lambda: SubsetRandomSampler(range(0, N, 2), generator=torch.Generator().manual_seed(1)),
        lambda: WeightedRandomSampler(torch.ones(N), 30, generator=torch.Generator().manual_seed(1)),
    ],
)
def test_samplers_of_torch(pairs, sampler):
    loader = Loader(pairs, 4, sampler=sampler())
    theirs = [batch[1].tolist() for batch in DataLoader(Made([(0, i) for i in range(N)]), 4, sampler=sampler())]
    assert labels(loader) == theirs
    assert len(loader) == len(theirs)


def test_a_batch_sampler(pairs):
    sampler = BatchSampler(SequentialSampler(range(11)), 4, drop_last=False)
    assert labels(Loader(pairs, batch_sampler=sampler)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert len(Loader(pairs, batch_sampler=sampler)) == 3


def test_an_empty_batch_of_a_batch_sampler(store):
    first, nothing = Loader(store, batch_sampler=[[1, 2], []])
    assert first["label"].tolist() == [1, 2]
    assert nothing["label"].tolist() == list(nothing["boxes"].unbind()) == []
    assert nothing["text"] == []


def test_views(pairs):
    part = pairs.subset(range(10, 30))
    assert sorted(sum(labels(Loader(part, 4, shuffle=True, seed=0)), [])) == list(range(10, 30))
    assert labels(Loader(Subset(Subset(pairs, list(range(20))), [3, 1]), 2)) == [[3, 1]]


@pytest.mark.parametrize(
    ("source", "first"),
    [
        (torch.arange(10), lambda b: b),
        ((torch.arange(10), torch.rand(10, 2)), lambda b: b[0]),
        ({"x": np.arange(10)}, lambda b: b["x"]),
        (TensorDataset(torch.arange(10)), lambda b: b[0]),
        (TensorDict({"x": torch.arange(10)}, [10]), lambda b: b["x"]),
        (Pair(images=torch.arange(10), targets=torch.rand(10), batch_size=[10]), lambda b: b.images),
    ],
    ids=["tensor", "tuple", "dict", "TensorDataset", "TensorDict", "tensorclass"],
)
def test_columns_in_memory_are_read_in_place(source, first):
    rows = [first(batch) for batch in Loader(source, 4, shuffle=True, seed=0)]
    assert sorted(torch.cat(rows).tolist()) == list(range(10))
    assert type(next(iter(Loader(source, 4)))).__name__ in ("Tensor", "list", "dict", "TensorDict", "Pair")


def test_a_tensor_that_changes_is_seen():
    data = torch.zeros(4)
    loader = Loader(data, 4)
    data.fill_(3)
    assert next(iter(loader)).tolist() == [3, 3, 3, 3]


# --- memory


def test_batches_that_are_held_keep_their_values(pairs):
    loader = Loader(pairs, 7, shuffle=True, seed=0)
    held = list(loader)
    views = [batch[0][1:3] for batch in loader]
    arrays = [batch[0].numpy() for batch in loader]
    for epoch in range(3, 6):
        list(loader)
        del epoch
    for batches, epoch in ((held, 0), (views, 1), (arrays, 2)):
        rows = permutation(N, 0, epoch).tolist()
        for i, batch in enumerate(batches):
            want = rows[7 * i : 7 * i + 7]
            got = batch[0] if epoch == 0 else batch
            assert [int(row[0]) for row in got] == (want[1:3] if epoch == 1 else want)


def test_a_batch_may_be_changed_without_touching_the_store(pairs):
    for batch in Loader(pairs, 10):
        batch[0].fill_(-1)
    assert pairs[3][0].tolist() == [3, 3, 3]


def test_no_thread_is_started(pairs):
    before = threading.active_count()
    iterator = iter(Loader(pairs, 10, shuffle=True, seed=0))
    next(iterator)
    assert threading.active_count() == before
    del iterator
    gc.collect()


# --- transforms and devices


def test_any_callable_gets_the_batch(pairs):
    doubled = Loader(pairs, 10, transform=lambda batch: [batch[0] * 2, batch[1]])
    assert next(iter(doubled))[0][3].tolist() == [6, 6, 6]


def test_a_callable_for_one_field(store):
    loader = Loader(store, 10, transform={"image": lambda x: x.float() / 255})
    assert next(iter(loader))["image"].dtype == torch.float32
    named = memfeed.cache(Made([(torch.ones(1), i) for i in range(4)]), fields=("images", "labels"), progress=False)
    assert next(
        iter(Loader(named, 2, transform={"images": torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU())}))
    )[0].tolist() == [[1], [1]]


class Spy(Transform):
    def __init__(self):
        super().__init__()
        self.keys: list[Keys] = []

    def apply(self, batch, keys, **_):
        self.keys.append(keys)
        return batch


def test_keyed_transforms_get_seed_epoch_and_base_rows(pairs):
    spy = Spy()
    loader = Loader(pairs.subset(range(40, 50)), 5, shuffle=True, seed=9, transform=spy)
    for epoch in range(2):
        batches = labels(loader)
        for keys, batch in zip(spy.keys[2 * epoch :], batches, strict=True):
            assert (keys.seed, keys.epoch, keys.rows.tolist()) == (9, epoch, batch)
    spy.keys.clear()
    list(Loader(pairs, 2, sampler=[3, 3, 3], transform=spy))
    assert torch.cat([keys.occurrence for keys in spy.keys]).tolist() == [0, 1, 2], "repeats of a row must differ"
    spy.keys.clear()
    list(Loader(pairs.subset([3] * 6), 2, shuffle=True, transform=spy))
    assert len(set(torch.cat([keys.occurrence for keys in spy.keys]).tolist())) == 6, "also those of a view"


def test_an_exception_in_a_transform_reaches_the_caller_and_the_next_epoch_works(pairs):
    calls = []

    def fails_once(batch):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("mine")
        return batch

    loader = Loader(pairs, 10, transform=fails_once)
    with pytest.raises(KeyError, match="mine"):
        list(loader)
    assert len(list(loader)) == 5


def test_device_cpu(store):
    batch = next(iter(Loader(store, 4, device="cpu")))
    assert batch["td"].device == torch.device("cpu")
    assert batch["boxes"].is_nested


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
def test_a_device_that_is_not_there(pairs):
    with pytest.raises(LoaderError, match="found device cuda:7; this machine has 0 CUDA devices"):
        Loader(pairs, 4, device="cuda:7")


# --- bad arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "found batch_size=0; expected an int of at least 1"),
        ({"batch_size": -3}, "found batch_size=-3"),
        ({"batch_size": 2.0}, "found batch_size=2.0"),
        ({"batch_size": True}, "found batch_size=True"),
        ({"shuffle": True, "seed": 0, "sampler": [1]}, "found a sampler and shuffle=True"),
        ({"batch_sampler": [[1]], "batch_size": 3}, "found a batch_sampler; expected no batch_size"),
    ],
)
def test_arguments_that_do_not_fit(pairs, options, message):
    with pytest.raises(LoaderError, match=message):
        Loader(pairs, **options)


@pytest.mark.parametrize("source", [[1, 2], Made([1, 2])])
def test_a_map_style_dataset_becomes_a_store(source):
    assert [batch.tolist() for batch in Loader(source, 2)] == [[1, 2]]


@pytest.mark.parametrize("source", [{"a": 1}, None])
def test_sources_that_are_none(source):
    with pytest.raises(LoaderError, match=r"expected a dataset with len and \[\], a Store"):
        Loader(source, 2)


@pytest.mark.parametrize("source", [(i for i in range(3)), map(int, "123"), {1, 2}, {1: 2}.values()])
def test_iterables_without_rows_say_to_make_a_list(source):
    with pytest.raises(LoaderError, match=r"found \w+, which has no .*; expected a dataset .*: Loader\(list\(...\)\)"):
        Loader(source, 2)


@pytest.mark.parametrize("length", [2.5, "7", None, -3, 2**70])
def test_a_length_that_is_no_number_of_samples(length):
    dataset = Made([1, 2])
    type(dataset).__len__, own = (lambda self: length), type(dataset).__len__
    try:
        for make in (lambda: Loader(dataset, 2), lambda: memfeed.cache(dataset, "unused.mf")):
            with pytest.raises(SchemaError, match=rf"found {length!r} from __len__ of Made; expected the number"):
                make()
    finally:
        type(dataset).__len__ = own


def test_an_error_in_a_length_is_that_of_the_dataset():
    class Unread(torch.utils.data.Dataset):
        def __len__(self):
            return len(None)

        def __getitem__(self, index):
            return index

    with pytest.raises(TypeError, match="object of type 'NoneType' has no len"):
        Loader(Unread(), 2)
    with pytest.raises(SchemaError, match=r"found a Tensor of no dims.*x\.reshape\(1\)"):
        Loader(torch.tensor(3), 2)


def test_other_mistakes(pairs):
    with pytest.raises(RowError, match=r"found row 50; expected 0 to 49"):
        list(Loader(pairs, 2, sampler=[0, 50]))
    with pytest.raises(RowError, match=r"found row -1"):
        list(Loader(pairs, 2, sampler=[-1]))
    with pytest.raises(LoaderError, match="found epoch -1"):
        Loader(pairs).set_epoch(-1)
    with pytest.raises(TransformError, match="found int as transform="):
        Loader(pairs, transform=3)
    with pytest.raises(FieldError, match="found no field 'zebra'; expected one of: 0, 1"):
        Loader(pairs, transform={"zebra": torch.relu})


def test_weights_without_rows_say_why(tmp_path):
    TensorDict({"w": torch.rand(3, 3)}, []).memmap(str(tmp_path / "w"))
    with pytest.raises(StoreError, match=r"batch_size \[\], which has no rows"):
        Loader(memfeed.open(tmp_path / "w"), 2)
