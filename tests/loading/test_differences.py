"""A Loader beside DataLoader, over kinds of samples and ways of use: batches are equal, or the page says otherwise."""

import collections
import runpy
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from cells import Cells, short_cells
from differences import InAnyOrder, Raised, differences
from known_differences import SAMPLES, STORE, USE, Known
from memfeed.errors import LoaderError
from sample_kinds import KINDS, Photo
from ways_of_use import WAYS

PAGE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "draw_differences.py"))


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    cells = Cells(tmp_path_factory.mktemp("stores"))
    return [cells.run(*cell) for cell in short_cells()]


def test_there_are_40_kinds_and_30_ways():
    assert len(KINDS) >= 40
    assert len(WAYS) >= 30


def test_a_cell_is_equal_or_the_page_says_how_it_differs(short):
    # DataLoader makes no batches of the TensorDicts of older versions
    left_out = ("tensorclass", "TensorDict") if version("tensordict").startswith("0.8.") else ()
    unknown = [str(cell) for cell in short if cell.unknown and cell.kind not in left_out]
    assert not unknown, "\n".join(unknown)


def test_each_row_of_the_page_is_found(short):
    found = frozenset().union(*(cell.rows for cell in short))
    missing = [row.dataloader for number, row in enumerate((*SAMPLES, *USE)) if number not in found]
    assert not missing


def test_the_page_has_these_rows():
    assert PAGE["tables"]() in PAGE["PAGE"].read_text(), "run python docs/draw_differences.py"


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_all_cells_are_equal_or_the_page_says_how_they_differ(kind):
    unknown = PAGE["unknown"](kind)
    assert not unknown, "\n".join(unknown)


# --- what counts as a difference

PHOTO = Photo(pixels=torch.zeros(2, 3), label=torch.zeros(2), batch_size=[2])
PAIRS = [
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    (torch.zeros(2), torch.zeros(2, 1)),
    (torch.zeros(2), torch.tensor([0.0, 1e-9])),
    (torch.tensor([0.0]), torch.tensor([-0.0])),
    (torch.zeros(2), np.zeros(2, np.float32)),
    (torch.zeros(2), [torch.zeros(2)]),
    tuple(torch.nested.nested_tensor([x], layout=torch.jagged) for x in (torch.zeros(1), torch.ones(1))),
    ([1, 2], (1, 2)),
    ([1, 2], [2, 1]),
    ([1, 2], [1]),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    (collections.OrderedDict(a=1), {"a": 1}),
    (1, 1.0),
    (1, True),
    ("a", b"a"),
    (None, []),
    (PHOTO, PHOTO.clone().zero_() + 1),
    ([1], Raised(KeyError("a"))),
    (Raised(LoaderError("a")), [1]),
    (Raised(ValueError("a")), Raised(KeyError("a"))),
    (InAnyOrder([0, 1], [], []), InAnyOrder([0, 0], [], [])),
    (InAnyOrder([0], [], []), InAnyOrder([0], [torch.zeros(1)], [torch.ones(1)])),
]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=range(len(PAIRS)))
def test_what_differs(one, other):
    assert list(differences(one, other))
    assert not list(differences(one, one))


def test_what_is_no_difference():
    assert not list(differences(float("nan"), float("nan")))
    assert not list(differences(Raised(TypeError("a")), Raised(LoaderError("found a; expected b"))))
    assert not list(differences(Raised(TypeError("a")), Raised(TypeError("another text"))))


def test_a_wrong_order_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr("memfeed.loading.loader.Loader.__iter__", lambda loader: reversed(list(loader.store)))
    assert Cells(tmp_path).run("tensor", "batch_size=None", STORE).unknown


def test_a_row_is_about_the_cells_that_it_names():
    row = Known("", "", "", "-> int", kinds=["tensor"], ways=["batches"])
    assert row.covers("tensor", "batches", STORE, ": str -> int")
    assert not row.covers("int", "batches", STORE, ": str -> int")
    assert not row.covers("tensor", "shuffle", STORE, ": str -> int")
    assert not row.covers("tensor", "batches", STORE, ": int -> str")
