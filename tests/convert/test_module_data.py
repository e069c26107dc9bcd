"""Data that methods of a dataset read by name in their modules: a change of it is an error, as of an attribute's."""

import argparse
import os
import sys
import types
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
    assert (found["WORDS"], found["base.WORDS"]) == (WORDS, base.WORDS)


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
