import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import TensorDataset

import memfeed
from memfeed.errors import SchemaError
from memfeed.store.in_memory import as_columns, existing_path
from support import Point, equal

X, Y = torch.arange(12).view(4, 3), np.arange(4) * 10


@pytest.mark.parametrize(
    ("data", "sample"),
    [
        (X, torch.tensor([3, 4, 5])),
        (Y, np.int64(10)),
        ((X, Y), (torch.tensor([3, 4, 5]), np.int64(10))),
        ({"x": X, "more": (Y,)}, {"x": torch.tensor([3, 4, 5]), "more": (np.int64(10),)}),
        (Point(X, X), Point(torch.tensor([3, 4, 5]), torch.tensor([3, 4, 5]))),
        (TensorDataset(X, X), (torch.tensor([3, 4, 5]), torch.tensor([3, 4, 5]))),
        (TensorDict({"x": X}, [4]), TensorDict({"x": torch.tensor([3, 4, 5])}, [])),
    ],
    ids=["tensor", "array", "tuple", "dict", "namedtuple", "dataset", "tensordict"],
)
def test_columns_are_a_dataset_of_their_own_structure(data, sample):
    columns = as_columns(data)
    assert len(columns) == 4
    assert equal(columns[1], sample)


@pytest.mark.parametrize(
    "data",
    [
        [X, X],
        ["a", "b"],
        torch.tensor(3),
        {"x": "text"},
        {},
        TensorDict({"x": X}, []),
        torch.nested.nested_tensor([X[0], X[0, :2]], layout=torch.jagged),
    ],
    ids=["list", "texts", "scalar", "values", "nothing", "no batch", "nested"],
)
def test_other_data_are_no_columns(data):
    assert as_columns(data) is None


def test_columns_that_do_not_fit_together():
    with pytest.raises(SchemaError, match=r"found columns of different lengths \(x: 4, y: 3\)"):
        as_columns({"x": X, "y": torch.arange(3)})
    with pytest.raises(SchemaError, match="found columns of which y is a str; expected tensors or arrays"):
        as_columns({"x": X, "y": "text"})


def test_a_loader_reads_them_in_place():
    schema, columns = as_columns((X, Y)).in_memory()
    assert [field.kind for field in schema] == ["fixed", "fixed"]
    assert columns[0].data.data_ptr() == X.data_ptr()
    assert columns[1].data.data_ptr() == Y.ctypes.data
    assert [column.row_count for column in columns] == [4, 4]


def test_mapped_data_has_a_path(tmp_path):
    mapped = TensorDict({"x": X, "deep": {"y": X}}, [4]).memmap(str(tmp_path / "td"))
    assert existing_path(mapped) == str(tmp_path / "td")
    assert existing_path(TensorDict({"x": X}, [4])) is None
    assert existing_path(X) is None


def test_a_tensordict_without_rows_is_named(tmp_path):
    model = torch.nn.Linear(2, 3)
    td = TensorDict.from_module(model)
    with pytest.raises(SchemaError, match=r"found the weights of a model \(TensorDict\), which have no rows") as raised:
        memfeed.cache(td)
    line = str(raised.value).partition("load weights: ")[2]
    weight = model.weight.detach().clone()
    scope = {"td": td, "path": tmp_path / "w", "memfeed": memfeed, "model": torch.nn.Linear(2, 3)}
    exec(line, scope)  # the line that the message gives
    assert torch.equal(scope["model"].weight, weight)
    for empty in (TensorDict({"x": torch.arange(3)}, []), TensorDict({}, [])):
        with pytest.raises(SchemaError, match=r"a TensorDict with batch_size \[\], which has no rows; .*batch_size ="):
            memfeed.cache(empty, tmp_path / "a.mf")
