"""Settings of a dataset's pipelines and configs: a change of one is noticed when the next epoch begins."""

import dataclasses
import functools
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from test_changes import OTHER, Labelled, N, Scale

from memfeed import Loader
from memfeed.convert.changes import Watched
from memfeed.convert.dataset_settings import settings_of
from memfeed.errors import StaleStoreError
from memfeed.splitting.places import CallablePlace


def test_settings_are_those_of_the_pipelines():
    scale = Scale(3)
    add = functools.partial(lambda x, by, *, of: x + by, by=2, of=scale)

    def closing(x):
        return x * scale.factor

    dataset = Labelled()
    dataset.transform = torch.nn.Sequential(torch.nn.Dropout(0.25), torch.nn.BatchNorm1d(2))
    dataset.target_transform, dataset.steps, dataset.other = add, [scale, closing], {"a": 1}
    found = settings_of(dataset)
    assert found["transform[0]"] is torch.nn.Dropout
    assert found["transform[0].p"] == 0.25
    assert found["target_transform.keywords['by']"] == 2
    assert found["target_transform.keywords['of'].factor"] == 3
    assert found["steps[1]"] is closing.__code__
    assert not any(path.startswith(("other", "targets", "epoch")) for path in found)
    before = dict(found)
    with torch.no_grad():
        dataset.transform[1].weight[0] = 7
    assert [path for path, one in settings_of(dataset).items() if before[path] != one] == ["transform[1][weight]"]


class Mapped(Labelled):
    """Samples that pass a table, and a config, by which one of them may differ."""

    level = 0

    def __init__(self, table=None, config=None):
        super().__init__()
        self.transform, self.args, self.hard, self.soft = table, config, set(), None

    def __getitem__(self, index):
        label = -1 if index == OTHER and (self.level or getattr(self.args, "level", 0)) else index
        label = -2 if index in self.hard else label if self.soft is None else self.soft[index]
        return torch.tensor(self.transform(label) if self.transform else label)


class Table:
    def __init__(self, values):
        self.values = values

    def __call__(self, label):
        return float(self.values[label])


def by_table(label, *, values):
    return values[label]


def by_default(label, *, values=list(range(N))):  # noqa: B006
    return values[label]


def third_epoch(dataset, change, path):
    loader = Loader(dataset, 100, cache=path)
    for _ in range(2):
        assert torch.cat(list(loader)).tolist() == list(range(N))
    change(dataset)
    list(loader)


@pytest.mark.parametrize(
    ("step", "table"),
    [
        (Table(list(range(N))), lambda step: step.values),
        (Table(np.arange(100_000.0)), lambda step: step.values),
        (Table(dict(enumerate(range(N)))), lambda step: step.values),
        (functools.partial(by_table, values=list(range(N))), lambda step: step.keywords["values"]),
        (by_default, lambda step: step.__kwdefaults__["values"]),
    ],
)
def test_one_entry_of_a_table_of_a_pipeline(path, step, table):
    def change(dataset):
        table(dataset.transform)[OTHER] = -1

    with pytest.raises(StaleStoreError, match=r"dataset\.transform|by_default\(values=\)"):
        third_epoch(Mapped(step), change, path)


@dataclasses.dataclass(slots=True)
class Config:
    level: int = 0
    folder: Path = Path("data")
    inner: types.SimpleNamespace | None = None


@pytest.mark.parametrize(
    "config", [types.SimpleNamespace(level=0, names=["a"]), Config(), type("CFG", (), {"level": 0})]
)
def test_a_number_of_a_config_that_one_sample_depends_on(path, config):
    with pytest.raises(StaleStoreError, match=r"dataset\.args\.level is 1, and was 0"):
        third_epoch(Mapped(config=config), lambda dataset: setattr(config, "level", 1), path)


def test_an_own_attribute_in_the_place_of_that_of_the_class(path):
    with pytest.raises(StaleStoreError, match=r"dataset\.level is 1, and was 0 in its class"):
        third_epoch(Mapped(), lambda dataset: setattr(dataset, "level", 1), path)


def test_an_own_attribute_with_the_value_of_the_class_is_no_change(path):
    third_epoch(Mapped(), lambda dataset: setattr(dataset, "level", dataset.level), path)


def test_a_method_that_a_cut_pipeline_calls_is_replaced():
    class Moved(Labelled):
        def moved(self, image):
            return image

    dataset, place = Moved(), CallablePlace((("method", "moved"),), Moved.moved)
    before = settings_of(dataset, [place])
    Moved.moved = lambda self, image: image + 1
    after = settings_of(dataset, [place])
    assert after["moved"] != before["moved"]
    for other in (lambda image: image - 1, functools.partial(max, 0)):
        dataset.moved = other
        assert settings_of(dataset, [place])["moved"] not in (before["moved"], after["moved"])


def test_an_object_takes_the_place_of_a_list_of_steps():
    dataset = Labelled()
    dataset.transform = [torch.nn.ReLU(), torch.nn.Tanh()]
    before = settings_of(dataset)
    dataset.transform = torch.nn.Sequential(*dataset.transform, torch.nn.Sigmoid())
    assert [path for path, one in settings_of(dataset).items() if before.get(path, one) != one] == ["transform"]


@pytest.mark.parametrize("keep", [lambda one: [0, one], lambda one: {"a": 0, 1: one}, lambda one: (one,)])
def test_a_number_of_a_config_in_a_list_or_dict(path, keep):
    dataset, config = Labelled(), Config()
    dataset.stages = keep(config)
    watched = Watched(dataset, path)
    watched.follow()
    assert watched.changed() is None
    config.level = 1
    assert watched.changed()[0].endswith("].level is 1, and was 0")


@pytest.mark.parametrize(("value", "other"), [(3, None), ([1, 2], []), ({"a": 1}, {}), ("a", None)])
def test_a_setting_that_is_empty_later(path, value, other):
    dataset = Labelled()
    dataset.side = value
    watched = Watched(dataset, path)
    watched.follow()
    assert watched.changed() is None
    dataset.side = other
    assert watched.changed()[0] == "dataset.side is None or empty, and had content"
    dataset.side = value
    assert watched.changed() is None
    del dataset.side
    assert watched.changed() is None


def test_a_dataset_in_a_dict_and_a_set_in_a_closure(path):
    inner, few = Mapped(config=types.SimpleNamespace(level=0)), {3}
    dataset = Labelled()
    dataset.parts, dataset.transform = {"train": inner}, lambda index: index in few
    watched = Watched(dataset, path)
    watched.follow()
    assert watched.changed() is None
    inner.args.level = 1
    assert watched.changed()[0] == "dataset.parts['train'].args.level is 1, and was 0"
    inner.args.level = 0
    few.add(4)
    assert "dataset.transform.few" in watched.changed()[0]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda dataset: dataset.hard.add(OTHER), r"dataset\.hard"),
        (lambda dataset: setattr(dataset, "soft", [-2 if i == OTHER else i for i in range(N)]), r"dataset\.soft"),
    ],
)
def test_what_was_empty_and_is_filled_is_told_once(path, change, name):
    """It may be labels, or what reading keeps."""
    dataset = Mapped()
    loader = Loader(dataset, 100, cache=path)
    list(loader)
    change(dataset)
    with pytest.warns(UserWarning, match=rf"{name} was None or empty when the loader was made"):
        list(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)


def test_what_a_step_keeps_in_the_place_of_none_is_no_alarm(path):
    class Keeping:
        def __init__(self):
            self.mask = None  # too large for a setting later

        def __call__(self, label):
            return label

    step = Keeping()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        third_epoch(Mapped(step), lambda dataset: setattr(step, "mask", np.zeros(1 << 18)), path)


def test_what_a_program_counts_in_tools_is_no_alarm(path, tmp_path):
    class Log:
        def __init__(self):
            self.file, self.lines = open(tmp_path / "log", "w"), 0  # noqa: SIM115

    dataset = Mapped()
    dataset.log, dataset.trainer = Log(), types.SimpleNamespace(step=0, model=torch.nn.Linear(1, 1))

    def change(dataset):
        dataset.log.lines += 1
        dataset.trainer.step += 1

    third_epoch(dataset, change, path)
    dataset.log.file.close()
