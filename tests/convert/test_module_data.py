"""Data that methods of a dataset read by name in their modules: a change of it is an error, as of an attribute's."""

import argparse
import functools
import io
import os
import sys
import types
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from memfeed import Loader
from memfeed.convert.module_data import folders_in_code, is_folder, values_read
from memfeed.convert.plain_data import LONG_TEXT, leaves_of
from memfeed.errors import StaleStoreError

N = 300
HERE = str(Path(__file__).parent)
NUMBERS, LABELS = np.arange(N * 2).reshape(N, 2), {f"name {i}": i for i in range(N)}
WORDS, SHORT, SLOTS = [f"word {i}" for i in range(N)], [1, 2, 3], [None] * N
TEXT, INNER = "0123456789" * LONG_TEXT, TensorDataset(torch.arange(N))
args = argparse.Namespace(folder=HERE, scale=1)
settings = types.ModuleType("settings")
settings.__file__, settings.SHIFTS = __file__, list(range(N))


class Paths:
    images = HERE + "/"


def word(index):
    return len(WORDS[index]) + SHORT[0]


class Reading(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        if SLOTS[index] is None:
            SLOTS[index] = NUMBERS[index] * args.scale
        numbers = SLOTS[index] + settings.SHIFTS[index] + LABELS[f"name {index}"]
        return numbers, word(index), int(TEXT[index]), INNER[index]

    def path(self, name):
        return os.path.join("./tests/convert/", name), args.folder + name, Paths.images + name


def test_what_methods_and_their_functions_read():
    found = values_read(Reading())
    assert found["WORDS"] is WORDS, "read by a function of the module"
    assert found["settings.SHIFTS"] is settings.SHIFTS
    assert found["args.folder"] == found["Paths.images"][:-1] == HERE
    assert values_read(INNER) == {}, "of a library"


def test_long_values_are_data():
    SLOTS[:] = [None] * N
    assert {leaf.path for leaf in leaves_of(Reading()) if leaf.path} == {
        *(f"module {name}" for name in ("NUMBERS", "LABELS", "WORDS", "TEXT", "settings.SHIFTS")),
        "module INNER.tensors[0]",
    }


class Raising(list):
    def __len__(self):
        raise RuntimeError


BROKEN = Raising()


def test_a_variable_whose_class_raises_is_left_out():
    class Asking(Reading):
        def __getitem__(self, index):
            return len(BROKEN) + SHORT[0]

    assert "module BROKEN" not in {leaf.path for leaf in leaves_of(Asking())}


def test_variables_around_a_class_are_read_too():
    files, folder = list(range(N)), HERE

    class Local(Reading):
        def __getitem__(self, index):
            return [os.path.join(folder, str(one)) for one in files[index:]]

    found = values_read(Local())
    assert (found["files"], found["folder"]) == (files, HERE)
    assert "module files" in {leaf.path for leaf in leaves_of(Local())}


def test_a_name_that_is_another_value_in_the_module_of_a_base_class():
    base = types.ModuleType("base")
    base.__file__, base.WORDS = __file__, list(range(N))
    exec("class Labelled:\n    def label(self, index):\n        return WORDS[index]", vars(base))

    class Derived(base.Labelled, Reading):
        pass

    found = values_read(Derived())
    assert (found["WORDS"], found[f"{__name__}.WORDS"]) == (base.WORDS, WORDS)


def test_folders(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    dataset = Reading()
    assert folders_in_code(dataset, values_read(dataset)) == ["./tests/convert/", HERE, HERE + "/"]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("is_dict", [False, True], ids=["object", "dict"])
def test_folders_of_settings_whose_names_a_method_has(tmp_path, is_dict, depth):
    class Named(Reading):
        def path(self, name):
            return self.given.inner.first + self.given["inner"]["first"] + name

    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    value = {name: str(tmp_path / name) for name in ("second", "first")}
    for _ in range(depth - 1):
        value = value if is_dict else argparse.Namespace(**value)
        value = {"inner": value}
    dataset = Named()
    dataset.given = value if is_dict else argparse.Namespace(**value)
    assert folders_in_code(dataset, {}) == [str(tmp_path / "first")], "not the second: no method reads it"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (HERE, True),
        (Path(HERE), True),
        ("./tests", True),
        ("tests", False),
        ("a\0/b", False),
        (3, False),
        (b"/", False),
    ],
)
def test_is_a_folder(value, expected):
    assert is_folder(value) is expected


@pytest.mark.parametrize(
    ("module", "name", "changed"),
    [
        (None, "NUMBERS", np.where(np.arange(N * 2).reshape(N, 2) == 401, 0, NUMBERS)),
        (None, "LABELS", LABELS | {"name 201": 7}),
        (None, "WORDS", [*WORDS[:201], "another", *WORDS[202:]]),
        (settings, "SHIFTS", [*settings.SHIFTS[:201], 7, *settings.SHIFTS[202:]]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("is_new", [False, True], ids=["the next epoch", "another loader"])
def test_a_change_is_an_error(tmp_path, monkeypatch, module, name, changed, is_new):
    module = module or sys.modules[__name__]
    SLOTS[:] = [None] * N
    loader = Loader(Reading(), 50, cache=tmp_path / "s.mf")
    first = [[leaf.clone() for leaf in batch[:3]] for batch in loader]
    again = list(loader)
    assert all(map(torch.equal, first[3], again[3][:3])), "what reading fills is no change"
    SLOTS[:] = [None] * N
    monkeypatch.setattr(module, name, changed)
    with pytest.raises(StaleStoreError, match=f"{name} has another content|other values in .*{name}"):
        list(Loader(Reading(), 50, cache=tmp_path / "s.mf") if is_new else loader)


TABLE = None


class Lazy(Dataset):
    """Loads its table when it is asked first."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        global TABLE
        if TABLE is None:
            TABLE = list(range(N))
        return TABLE[index]


def test_what_a_method_loads_into_a_variable_is_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TABLE", None)
    assert [torch.cat(list(Loader(Lazy(), 50, cache=tmp_path / "s.mf"))).tolist() for _ in range(2)] == [
        list(range(N))
    ] * 2
    monkeypatch.setattr(sys.modules[__name__], "TABLE", [*range(201), 7, *range(202, N)])
    with pytest.raises(StaleStoreError, match="other values in TABLE"):
        Loader(Lazy(), 50, cache=tmp_path / "s.mf")


TABLE = list(range(N))


def look_up(index, table=TABLE):
    return table[index]


class Step:
    """A step of a pipeline, or a reader, of the user's."""

    rows = tuple(TABLE)

    def __init__(self, table=()):
        self.table, self.order = table, list(TABLE)  # nothing reads the order

    def __call__(self, index):
        return self.table[index] if self.table else self.rows[index] + TABLE[index]


def around():
    table = list(TABLE)
    return lambda index: table[index]


def with_attribute(index):
    return with_attribute.table[index]


with_attribute.table = list(TABLE)


class Slotted:
    __slots__ = ("table",)

    def __init__(self):
        self.table = list(TABLE)

    def __getattr__(self, name):
        raise KeyError(name)  # as some classes of settings do


SLOTTED, READER, REGISTRY = Slotted(), Step(list(TABLE)), {"look_up": functools.partial(look_up, table=list(TABLE))}


class Holding(Dataset):
    def __init__(self, value=None):
        self.value = value

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.value(index)


class Naming(Holding):
    def __getitem__(self, index, *, table=None):
        return (
            READER(index) + REGISTRY["look_up"](index) + with_attribute(index) + Step.rows[index] + SLOTTED.table[index]
        )


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (look_up, {"module look_up(table=)"}),
        (functools.partial(look_up, table=[*TABLE]), {"value.keywords['table']", "module look_up(table=)"}),
        (functools.lru_cache(None)(look_up), {"module look_up(table=)"}),
        (around(), {"module table"}),
        (Step([*TABLE]), {"value.table", "value.__class__.rows"}),
        ([Step([*TABLE])], {"value[0].table", "value[0].__class__.rows"}),
        (Step().__call__, {"value.__self__.__class__.rows"}),
        (Step, {"value.rows"}),
        (weakref.ref(READER), {"value().table", "value().__class__.rows"}),
        (types.MappingProxyType(dict(enumerate(TABLE))), {"value"}),
        (io.BytesIO(bytes(N)), {"value"}),
        (torch.nn.Linear(2, N), set()),
    ],
)
def test_what_attributes_reach_is_data(value, paths):
    found = {leaf.path for leaf in leaves_of(Holding(value)) if leaf.kind == "data"}
    assert found - {"module TABLE"} == paths


def test_what_objects_functions_and_classes_of_a_module_hold_is_data():
    found = {leaf.path for leaf in leaves_of(Naming())}
    assert {
        "module READER.table",
        "module REGISTRY['look_up'].keywords['table']",
        "module with_attribute.table",
    } <= found
    assert "module Step.rows" in found or "module READER.rows" in found


def test_modules_that_a_method_imports_itself(tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text(f"TABLE = list(range({N}))\nOTHER = 1\n")
    monkeypatch.syspath_prepend(tmp_path)

    class Importing(Holding):
        def __getitem__(self, index):
            from imported_later import TABLE

            return TABLE[index]

    dataset = Importing()
    assert not any("imported_later" in name for name in values_read(dataset))
    dataset[0]
    assert values_read(dataset)["imported_later.TABLE"] == list(range(N))
    assert "imported_later.OTHER" not in values_read(dataset)


class OwnLoader(Loader):
    def __init__(self, dataset):
        super().__init__(dataset, batch_size=SHORT[1])


class WithLoader(Reading):
    def loader(self):
        return OwnLoader(self)


def test_variables_of_memfeed_are_no_data_of_a_dataset_that_makes_its_loader():
    """As a ``to_dataloader`` of a library. memfeed counts its loaders, and that count is no change of the dataset."""
    found = values_read(WithLoader())
    assert found["SHORT"] is SHORT
    assert not {"READ_ONLY", "MOST_WORKERS", "_made"} & set(found)


def test_a_chain_of_objects_ends():
    chain = Step([*TABLE])
    for _ in range(600):
        chain = Step(chain)
    assert 500 < len(values_read(Holding(chain))) < 3_000


def test_models_of_libraries_are_not_taken_apart_and_their_transforms_are():
    layers = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(20)))
    steps = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Identity())
    steps[1].look_up = Step(TABLE)

    def own(index):
        return layers(index), steps[1].look_up(index)

    found = values_read(Holding(own))
    assert not any(name.startswith("layers._modules") for name in found)
    assert found["steps._modules['1'].look_up.table"] is TABLE
