"""Columns and indices that a loader reads in place, and that are replaced between two epochs."""

import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.utils.data import Subset, TensorDataset

import memfeed
from memfeed import Loader
from memfeed.errors import StaleStoreError

N = 30


def columns():
    return {"x": torch.rand(N, 2), "of": {"y": torch.arange(N)}}


def read(loader):
    return sum(len(batch) for batch in loader)


def append(indices):
    indices.append(3)


def change(indices):
    indices[2] = 7


@pytest.mark.parametrize(
    ("make", "edit", "message"),
    [
        (lambda: list(range(9)), append, r"it has 10 indices, and had 9"),
        (lambda: list(range(9)), change, r"its indices have other values"),
        (lambda: np.arange(9), change, r"its indices have other values"),
        (lambda: torch.arange(9), change, r"its indices have other values"),
    ],
)
@pytest.mark.parametrize("parts", [False, True])
def test_indices_that_change(make, edit, message, parts):
    rows, indices = torch.arange(N), make()
    subset = Subset(rows, indices)
    loader = Loader([subset, Subset(rows, [1])] if parts else subset, 4)
    assert read(loader) == read(loader) == 9 + parts
    edit(indices)
    with pytest.raises(StaleStoreError, match=rf"the Subset has changed since its loader was made: {message}"):
        read(loader)


def test_a_subset_that_gets_other_indices_or_another_dataset(tmp_path):
    store = memfeed.cache(torch.arange(N), tmp_path / "s.mf", progress=False)
    subset = Subset(store, range(9))
    loader = Loader(subset, 4)
    subset.indices = list(range(9))
    assert read(loader) == 9, "equal ones are no change"
    subset.indices = range(1, 10)
    with pytest.raises(StaleStoreError, match="its indices have other values"):
        read(loader)
    subset.indices = range(9)
    assert read(loader) == 9
    subset.dataset = store.subset(range(20))
    with pytest.raises(StaleStoreError, match="its dataset was replaced"):
        read(loader)
    assert read(Loader(store, 4)) == N, "other views of the store compare nothing"


def test_a_subset_of_columns_compares_both():
    data, indices = TensorDataset(torch.arange(N)), [1, 2]
    loader = Loader(Subset(data, indices), 1)
    data.tensors = (torch.arange(N) + 1,)
    with pytest.raises(StaleStoreError, match="the TensorDataset has changed"):
        read(loader)


def test_tensors_that_are_replaced():
    data = TensorDataset(torch.rand(N, 2), torch.arange(N))
    loader = Loader(data, N)
    data.tensors = tuple(data.tensors)
    assert read(loader) == 2
    data.tensors = (data.tensors[0], data.tensors[1] + 1000)
    with pytest.raises(StaleStoreError, match=r"the TensorDataset has changed since its loader was made: 1 was replac"):
        read(loader)


@pytest.mark.parametrize("kind", [dict, lambda data: TensorDict(data, [N])])
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data["of"].update({"y": torch.zeros(N)}), r"of\.y was replaced or changed"),
        (lambda data: data.update({"z": torch.zeros(N)}), "z is new"),
        (lambda data: data.pop("x"), "x was removed"),
        (lambda data: setattr(data["x"], "data", torch.zeros(N, 2)), "x was replaced or changed"),
    ],
)
def test_keys_that_are_replaced(kind, edit, message):
    data = kind(columns())
    loader = Loader(data, N)
    assert read(loader) == read(loader)
    edit(data)
    with pytest.raises(StaleStoreError, match=f"has changed since its loader was made: {message}; expected"):
        read(loader)


@pytest.mark.parametrize("kind", [dict, lambda data: TensorDict(data, [N])])
def test_values_that_change_in_place_are_read(kind):
    data = kind(columns())
    loader = Loader(data, N)
    read(loader)
    data["of"]["y"] += 5
    (batch,) = loader
    assert batch["of"]["y"].tolist() == list(range(5, N + 5))


def test_values_of_a_tensordict_that_are_no_tensors():
    data = TensorDict(columns(), [N])
    data["name"] = "a"
    loader = Loader(data, N)
    data["name"] = "a"
    read(loader)
    data["name"] = "b"
    with pytest.raises(StaleStoreError, match="name was replaced"):
        read(loader)


def test_a_lazy_stack_that_grows():
    pieces = [TensorDict({"x": torch.rand(2)}, []) for _ in range(3)]
    stack = lazy_stack(pieces)
    loader = Loader(stack, 3)
    assert read(loader) == read(loader)
    stack.append(pieces[0].clone())
    with pytest.raises(StaleStoreError, match="value was replaced"):
        read(loader)


def test_it_costs_nothing():
    order = torch.randperm(1_000_000).tolist()
    check = Loader(Subset(torch.arange(1_000_000), order), 8).store._view.check_dataset
    small = Loader(TensorDataset(torch.arange(N), torch.rand(N)), 8).store._view.check_dataset
    for most, one in ((0.1, check), (0.005, small)):  # ten times what was measured, at least
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            one()
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < most
