"""Several stores read as one, mixed or not."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, StackDataset, Subset

import memfeed
from memfeed import Blocks, Loader
from memfeed.errors import LoaderError
from memfeed.loading.sources import join
from memfeed.random import Keys
from memfeed.store.store import with_parts
from memfeed.transforms import Transform
from support import Made, equal, rich_sample


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    root = tmp_path_factory.mktemp("s")
    spans = [(0, 20), (20, 31), (31, 40)]
    return [
        memfeed.cache(Made([rich_sample(i) for i in range(a, b)]), root / f"{a}.mf", progress=False) for a, b in spans
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return memfeed.cache(Made(rich_sample, 40), tmp_path_factory.mktemp("s") / "all.mf", progress=False)


@settings(max_examples=30)
@given(st.integers(1, 13), st.sampled_from([False, True, Blocks()]))
def test_several_stores_are_read_as_one(three, whole, batch_size, shuffle):
    ours = list(Loader(three, batch_size, shuffle=shuffle, seed=2))
    theirs = list(Loader(whole, batch_size, shuffle=shuffle, seed=2))
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        for key in JAGGED:
            assert equal(mine.pop(key).unbind(), other.pop(key).unbind())
        assert equal(mine, other)


JAGGED = ("boxes", "classes", "ids")


def test_views_of_several_stores(three, whole):
    parts = [three[0].subset([3, 1]), three[2].subset(range(9))]
    labels = [batch["label"].tolist() for batch in Loader(parts, 4)]
    assert labels == [[3, 1, 31, 32], [33, 34, 35, 36], [37, 38, 39]]
    assert [b["label"].tolist() for b in Loader([p.select("label") for p in three], 40)] == [list(range(40))]


def test_a_view_of_joined_stores_is_joined_again(three, whole):
    joined = join([join(three[:2]).subset(range(4, 31)), three[2]])
    for ours, theirs in zip(Loader(joined, 7), Loader(whole.subset(range(4, 40)), 7), strict=True):
        for key in JAGGED:
            assert equal(ours.pop(key).unbind(), theirs.pop(key).unbind())
        assert equal(ours, theirs)


def test_weights_mix_and_every_epoch_is_as_long_as_the_stores(three):
    loader = Loader([*zip(three, [0.2, 0.3, 0.5], strict=True)], 10, shuffle=True, seed=0)
    drawn = torch.cat([batch["label"] for batch in loader])
    assert len(drawn) == 40
    assert np.histogram(drawn, [0, 20, 31, 40])[0].tolist() == [8, 12, 20]


def test_rows_that_come_twice_in_an_epoch_are_transformed_differently(three):
    class Spy(Transform):
        def __init__(self):
            super().__init__()
            self.seen = []

        def apply(self, batch, keys: Keys, **_):
            self.seen += list(zip(keys.rows.tolist(), keys.occurrence.tolist(), strict=True))
            return batch

    spy = Spy()
    list(Loader([*zip(three, [0, 0.0, 1], strict=True)], 7, shuffle=True, seed=0, transform=spy))
    assert len({row for row, _ in spy.seen}) == 9
    assert len(set(spy.seen)) == len(spy.seen) == 40


class Negated(Transform):
    def apply(self, batch, keys: Keys, **_):
        return {**batch, "label": -batch["label"]}


def test_views_of_several_stores_keep_their_transform(three):
    own = [with_parts(store, transform=Negated()) for store in three]
    whole = Loader(own, 4).dataset
    sources = [
        own,
        own[0] + own[1] + own[2],  # a ConcatDataset in a ConcatDataset
        Subset(own[0] + own[1] + own[2], range(40)),
        [own[0] + own[1], own[2]],
        Subset(whole, range(40)),
        whole.subset(range(40)),
        whole.select(["label", "td"]),
        pickle.loads(pickle.dumps(whole.subset(range(40)))),
    ]
    for source in sources:
        labels = [-label for batch in Loader(source, 16) for label in batch["label"].tolist()]
        assert labels == list(range(40))
    others = Loader([own[0], three[1]], 4, transform={}).dataset
    with pytest.raises(LoaderError, match="found stores with different transforms of their own"):
        Loader(others.subset([0, 30]), 2)


def test_a_part_of_several_stores(three, whole):
    rows = [39, 0, 25, -1]
    for source in (Subset(ConcatDataset(three), rows), Subset(three[0] + three[1] + three[2], rows)):
        labels = [batch["label"].tolist() for batch in Loader(source, 3)]
        assert labels == [batch["label"].tolist() for batch in Loader(Subset(whole, rows), 3)]


def test_stores_that_differ_are_refused(three, tmp_path):
    other = memfeed.cache(Made([(torch.zeros(3), i) for i in range(4)]), tmp_path / "o.mf", progress=False)
    wide = memfeed.cache(Made([(torch.zeros(4), i) for i in range(4)]), tmp_path / "w.mf", progress=False)
    with pytest.raises(
        LoaderError, match=r"w.mf: .* of .*o.mf: field 0: found float32 \[4\], expected float32 \[3\]\. A"
    ):
        Loader([other, wide], 2)
    with pytest.raises(LoaderError, match=r"found the fields 0, 1; expected .*image.* of one schema: select\(\) the"):
        Loader([three[0], other], 2)
    nested = memfeed.cache(Made([[torch.zeros(3), i] for i in range(4)]), tmp_path / "n.mf", progress=False)
    with pytest.raises(LoaderError, match="found other containers around the same fields"):
        Loader([other, nested], 2)
    with pytest.raises(LoaderError, match="a weight beside one without"):
        Loader([(other, 0.5), other], 2)
    with pytest.raises(LoaderError, match="which sum to 0.9"):
        Loader([(other, 0.4), (other, 0.5)], 2)
    with pytest.raises(LoaderError, match="found a sampler and weights"):
        Loader([(other, 0.5), (other, 0.5)], 2, sampler=[1])


@pytest.mark.parametrize("other", [["cat", "dog"], ["dog", "cat"], ["cat", "dog", "emu"], None])
def test_labels_that_mean_other_classes_are_told(tmp_path, capsys, other):
    stores = []
    for name, classes in (("a", ["cat", "dog"]), ("b", other)):
        dataset = Made([(torch.ones(2), i % 2) for i in range(6)])
        if classes:
            dataset.classes = classes
        stores.append(memfeed.cache(dataset, tmp_path / name, progress=False))
    capsys.readouterr()
    assert len(list(Loader(stores, 4))) == 3
    is_told = "b has other classes, or in another order, than" in capsys.readouterr().err
    assert is_told == (other not in (None, ["cat", "dog"]))


def test_stores_whose_rows_may_be_none_and_others(tmp_path):
    samples = [("a", torch.zeros(1, 2)), (None, None)], [("b", torch.ones(2, 1)), ("c", torch.ones(3, 2))]
    none, some = (memfeed.cache(Made(given), tmp_path / f"{i}.mf", progress=False) for i, given in enumerate(samples))
    assert [field.optional for field in (*none.schema, *some.schema)] == [True, True, False, False]
    for stores in ([none, some], [some, none]):
        texts, values = next(iter(Loader(stores, 4)))
        assert texts == [sample[0] for store in stores for sample in store]
        assert equal(values, [sample[1] for store in stores for sample in store])


def test_lengths_that_are_equal_in_one_store_alone(tmp_path):
    def store(name, more):
        samples = [{"a": torch.arange(i % 3), "b": torch.arange(i % 3 + more * (i == 5))} for i in range(6)]
        return memfeed.cache(Made(samples), tmp_path / name, progress=False)

    equal_lengths, other_lengths = store("one.mf", 0), store("other.mf", 1)
    assert [field.lengths_of for field in join([equal_lengths, equal_lengths]).schema] == [0, 0]
    for stores in ([equal_lengths, other_lengths], [other_lengths, equal_lengths]):
        assert len({field.lengths_of for field in join(stores).schema}) == 2
        batch = next(iter(Loader(stores, 12)))
        assert [len(row) for row in batch["b"].unbind()] == [len(row["b"]) for one in stores for row in one]


def test_columns_in_memory_and_a_tuple_of_them_are_no_list_of_stores():
    assert len(Loader((torch.arange(4), torch.arange(4)), 2)) == 2


def test_a_dataset_without_a_length():
    class Endless(torch.utils.data.Dataset):
        def __getitem__(self, i):
            return i

    with pytest.raises(LoaderError, match=r"found Endless, which has \[\] and no len; expected .* def __len__"):
        Loader(Endless(), 2, sampler=[3, 1])


class Around(torch.utils.data.Dataset):
    """A dataset that reads another one."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        return self.inner[i]["label"]


@pytest.mark.parametrize(
    "wrap", [Around, lambda store: Subset(Around(store), range(3)), lambda store: StackDataset(a=Around(store))]
)
def test_a_transform_of_a_store_in_a_dataset_is_missed(three, wrap, capsys):
    own = with_parts(three[0], transform=Negated())
    Loader(wrap(three[0]), 2)
    Loader(wrap(own), 2, transform={})
    assert "transform of its own" not in capsys.readouterr().err
    Loader(wrap(own), 2)
    assert "found a store in it with a transform of its own" in capsys.readouterr().err


def test_a_source_that_is_none_gets_the_line_to_write(tmp_path):
    data = torch.utils.data.DataLoader(range(6), 2)
    for source, line in (
        (torch.utils.data.TensorDataset, r"found the class TensorDataset itself; .*Loader\(TensorDataset\(\.\.\.\)\)"),
        (tmp_path / "a.mf", r"found '.*a\.mf', a path; expected a store: Loader\(memfeed\.open\('"),
        (data, r"found a DataLoader; expected its dataset: Loader\(loader\.dataset"),
    ):
        with pytest.raises(LoaderError, match=line):
            memfeed.Loader(source, 2)
