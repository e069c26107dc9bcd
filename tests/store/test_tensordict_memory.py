"""TensorDicts in memory as columns: nothing is copied, and what has no rows is refused."""

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, UnbatchedTensor

from memfeed.errors import MemfeedError, StoreError
from memfeed.store.tensordict_memory import read
from support import Pair


def test_memory_is_shared():
    data = TensorDict({"a": torch.arange(6).view(3, 2), "in": {"b": torch.zeros(3)}}, [3])
    contents, types = read(data)
    assert types == ()
    assert [field.path for field in contents.schema] == [("a",), ("in", "b")]
    data["a"][1] = 9
    assert contents.columns[0].read_row(1).tolist() == [9, 9]


def test_records():
    contents, types = read(Pair(images=torch.zeros(2, 3), targets=torch.zeros(2), batch_size=[2]))
    assert types == (Pair,)
    assert (contents.schema.structure.kind, contents.schema.structure.name) == ("tensorclass", "Pair")


def test_values_that_are_no_tensors():
    data = TensorDict(
        {"a": torch.zeros(2), "s": NonTensorData("x", batch_size=[2]), "u": UnbatchedTensor(torch.ones(5))}, [2]
    )
    data["p"] = NonTensorStack("a", "b")
    contents, _ = read(data)
    assert {field.name: field.kind for field in contents.schema} == {"a": "fixed", "p": "str"}
    assert contents.columns[1].read_row(1) == "b"


@pytest.mark.parametrize("lengths", [(2, 3), (2, 2), (0, 1)])
def test_nested_tensors(lengths):
    rows = [torch.arange(n) + i for i, n in enumerate(lengths)]
    whole = torch.nested.nested_tensor([*rows, torch.arange(4)], layout=torch.jagged)
    (column,) = read(TensorDict({"a": whole}, [3]))[0].columns
    assert [column.read_row(i).tolist() for i in range(3)] == [*(row.tolist() for row in rows), [0, 1, 2, 3]]
    some = torch.nested.nested_tensor_from_jagged(torch.arange(9), torch.tensor([2, 4]), torch.tensor([2, 3][:1]))
    (column,) = read(TensorDict({"a": some}, [1]))[0].columns
    assert column.read_row(0).tolist() == [2, 3]


def test_lazy_stacks():
    pieces = [TensorDict({"a": torch.arange(n)}, []) for n in (1, 3)]
    (column,) = read(LazyStackedTensorDict(*pieces))[0].columns
    assert [column.read_row(i).tolist() for i in (0, 1)] == [[0], [0, 1, 2]]
    along = LazyStackedTensorDict(*(TensorDict({"a": torch.zeros(2)}, [2]) for _ in range(2)), stack_dim=1)
    with pytest.raises(StoreError, match="found a lazy stack along dim 1"):
        read(along)


def test_tensors_that_no_store_holds():
    with pytest.raises(MemfeedError, match="sparse"):
        read(TensorDict({"a": torch.eye(2).to_sparse()}, [2]))


def test_files_of_other_libraries(tmp_path):
    pytest.importorskip("h5py")
    from tensordict import PersistentTensorDict

    kept = PersistentTensorDict.from_dict(TensorDict({"a": torch.zeros(2)}, [2]), filename=str(tmp_path / "a.h5"))
    with pytest.raises(StoreError, match="found a TensorDict whose tensors are in an h5 or zarr file"):
        read(kept)
    kept.close()
