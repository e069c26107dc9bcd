"""What a store says about itself without reading a row."""

import pytest
import torch

import memfeed
from memfeed.errors import StoreError
from memfeed.schema.recipe import RecipeStep
from support import Made, cache


class Labelled(Made):
    def __init__(self, targets):
        super().__init__(lambda i: {"x": torch.ones(2) * i}, 4)
        self.classes, self.class_to_idx, self.targets = ["a", "b"], {"a": 0, "b": 1}, targets


@pytest.mark.parametrize("form", [list, torch.tensor])
def test_attributes_of_the_dataset(tmp_path, form):
    store = cache(Labelled(form([0, 1, 1, 0])), tmp_path / "s.mf", workers=0, metadata={"a": [1]})
    assert (store.classes, store.class_to_idx, store.metadata) == (["a", "b"], {"a": 0, "b": 1}, {"a": [1]})
    assert type(store.targets) is type(form([0]))
    assert list(map(int, store.targets)) == [0, 1, 1, 0]
    assert list(map(int, store.subset([2, 0]).targets)) == [1, 0]
    for change in (store.classes, store.class_to_idx, store.metadata["a"]):
        change.clear()
    assert (store.classes, store.class_to_idx, store.metadata) == (["a", "b"], {"a": 0, "b": 1}, {"a": [1]})


@pytest.mark.parametrize("name", ["classes", "class_to_idx", "targets"])
def test_attributes_that_the_dataset_had_not(tmp_path, name):
    store = cache(Made(list(range(3))), tmp_path / "s.mf", workers=0)
    assert not hasattr(store, name)
    with pytest.raises(AttributeError, match=f"found no {name} in .*; expected a dataset with .{name}"):
        getattr(store, name)
    assert store.metadata == {}


def test_columns_in_memory_have_no_attributes():
    store = memfeed.Loader(torch.arange(4), 2).store
    assert str(store.path) == "(memory)"
    assert store.metadata == {}
    assert store.transform is None
    assert not hasattr(store, "classes")


def test_text(tmp_path):
    store = cache(Made(lambda i: {f"f{k}": i for k in range(22)}, 3), tmp_path / "s.mf", workers=0)
    lines = repr(store).splitlines()
    assert lines[0] == f"Store('{tmp_path}/s.mf', 3 rows, 528 B)"
    assert lines[1] == "  f0: int64 []"
    assert lines[-1] == "  ... and 2 more"
    assert "windows: f0" in repr(store.windows({"f0": [0]}, within=None)).splitlines()[-1]


def test_a_finished_store_is_full(tmp_path):
    store = cache(Made(list(range(3))), tmp_path / "s.mf", workers=0)
    assert store.progress() == (3, 3, 0)
    store.finish()
    assert store.skipped == ()


def test_functions_of_the_dataset_cannot_come_from_a_store(tmp_path, monkeypatch):
    store = cache(Made(list(range(3))), tmp_path / "s.mf", workers=0)
    step = RecipeStep(name="", arguments={}, on=None, shown="my_augment")
    monkeypatch.setattr(type(store._view), "recipe", (step,))
    monkeypatch.setattr("memfeed.transforms.from_recipe.make_pipeline", lambda recipe: None)
    with pytest.raises(StoreError, match=r"whose pipeline goes on with functions of its dataset \(my_augment\)"):
        store.transform  # noqa: B018


def test_a_store_shows_the_classes_of_its_dataset(tmp_path):
    class Animals(list):
        classes = ["ants", "bees"]  # noqa: RUF012

    store = memfeed.cache(Animals([1, 2]), tmp_path / "a.mf", progress=False)
    assert repr(store).splitlines()[-1] == repr(memfeed.open(tmp_path / "a.mf")).splitlines()[-1]
    assert "  classes: ants, bees" in repr(store).splitlines()
