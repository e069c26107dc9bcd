"""Hugging Face: a DatasetDict names the splits; images, class labels, streams, and datasets beside other columns."""

import pytest
import torch

import memfeed
from memfeed.errors import SchemaError, StoreError
from support import cache, equal

datasets = pytest.importorskip("datasets")
image = pytest.importorskip("PIL.Image")


def split(n):
    pictures = [image.new("RGB", (4, 5), (i, 0, 0)) for i in range(n)]
    rows = {"x": range(n), "image": pictures, "label": [i % 2 for i in range(n)]}
    features = datasets.Features(
        {"x": datasets.Value("int64"), "image": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee"])}
    )
    return datasets.Dataset.from_dict(rows, features=features)


def test_a_dataset_dict_becomes_one_store_per_split(path):
    splits = datasets.DatasetDict(train=split(20), test=split(5))
    stores = cache(splits, path)
    assert {name: len(store) for name, store in stores.items()} == {"train": 20, "test": 5}
    assert {name: store.path for name, store in stores.items()} == {name: path / name for name in splits}
    assert stores["train"][3]["image"].shape == (3, 5, 4)  # decoded, as the dataset gives it
    assert (int(stores["train"][3]["image"][0, 0, 0]), stores["train"][3]["label"]) == (3, 1)
    assert cache(splits, path) == stores
    assert {name: len(store) for name, store in cache(splits).items()} == {"train": 20, "test": 5}
    with pytest.raises(StoreError, match=r"a folder of stores \(test, train\).*memfeed\.open\('.*/test'\)"):
        memfeed.open(path)
    cache(torch.arange(3), path.with_name("one.mf"))
    with pytest.raises(StoreError, match="found a store; expected a folder for the stores of train, test"):
        cache(splits, path.with_name("one.mf"))


def test_a_split_that_fails_leaves_the_others(path):
    splits = datasets.DatasetDict(train=split(20), test=split(0))
    with pytest.raises(SchemaError, match="empty"):
        cache(splits, path)
    assert len(memfeed.open(path / "train")) == 20


def test_streams(path):
    streams = datasets.IterableDatasetDict(train=split(20).to_iterable_dataset())
    assert equal(cache(streams, path)["train"][7], cache(split(20), path.with_name("b.mf"))[7])


def test_a_dataset_beside_other_columns(path):
    store = cache({"row": split(9), "weight": torch.arange(9.0)}, path)
    want = {"row": cache(split(9), path.with_name("b.mf"))[4], "weight": torch.tensor(4.0)}
    assert equal(store[4], want)
    with pytest.raises(SchemaError, match=r"different lengths \(row: 9, weight: 8\)"):
        cache({"row": split(9), "weight": torch.arange(8.0)}, path.with_name("c.mf"))
