"""A TensorDict as the source of a loader and of a conversion: its batches are those of the directory it would write."""

from __future__ import annotations

import warnings

import pytest
import tensordict
import torch
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    UnbatchedTensor,
    lazy_stack,
    tensorclass,
)

import memfeed
from memfeed.errors import CopyError, LoaderError, SchemaError, StoreError
from memfeed.testing import equal
from tensordicts import ENCODED, KINDS, numbers, plain

has_typed = hasattr(tensordict, "TypedTensorDict")


def _batches(source, **options):
    return list(memfeed.Loader(source, 2, shuffle=True, seed=3, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_the_directory(kind, tmp_path):
    made = KINDS[kind]()
    made.memmap(tmp_path / "td", **ENCODED)
    ours = [plain(batch) for batch in _batches(made)]
    theirs = [plain(batch) for batch in _batches(memfeed.open(tmp_path / "td"))]

    assert ours == theirs


@pytest.mark.parametrize("device", [None, "cpu"])
def test_batches_have_the_device_of_the_tensordict(device):
    source = TensorDict({"x": numbers(4), "of": TensorDict({"y": numbers(4)}, [4], device=device)}, [4], device=device)
    for batch in _batches(source):
        assert batch.device == source[:2].device
        assert batch["of"].device == source[:2]["of"].device


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout, tmp_path):
    rows = [numbers(n, 2) + n for n in (2, 0, 3, 1)]
    nested = torch.nested.nested_tensor(rows, layout=layout)
    source = TensorDict({"x": nested, "y": numbers(4)}, [4])
    for batch in (*_batches(source), *_batches(memfeed.cache(source, tmp_path / "a.mf", progress=False))):
        for row, number in zip(batch["x"].unbind(), batch["y"].tolist(), strict=True):
            assert torch.equal(row, rows[int(number)])
    before = memfeed.Loader(source, 2)
    if layout == torch.jagged:
        assert next(iter(before))["x"].is_nested
        part = torch.nested.narrow(numbers(2, 6), 1, torch.tensor([1, 3]), torch.tensor([2, 3]), layout=torch.jagged)
        (batch,) = memfeed.Loader(TensorDict({"x": part}, [2]), 2)
        assert [row.tolist() for row in batch["x"].unbind()] == [row.tolist() for row in part.unbind()]


def test_an_unbatched_tensor_belongs_to_the_whole_batch(tmp_path):
    whole = torch.arange(4.0)
    for length in (4, 3):  # its first dim may be as long as the batch
        source = TensorDict({"x": torch.arange(4), "u": UnbatchedTensor(whole[:length])}, [4])
        for batch in _batches(source):
            assert batch.batch_size == (2,)
            assert batch["x"].shape == (2,)
            assert torch.equal(torch.as_tensor(batch["u"]), whole[:length])
            assert isinstance(batch.get("u"), UnbatchedTensor)
        with pytest.raises(SchemaError, match=r"the UnbatchedTensor u, which belongs to no row.*td\.exclude\('u'\)"):
            memfeed.cache(source, tmp_path / "u.mf", progress=False)
        store = memfeed.cache(source.exclude("u"), tmp_path / f"{length}.mf", progress=False)
        assert store[:]["x"].tolist() == [0, 1, 2, 3]
    with pytest.raises(SchemaError, match="UnbatchedTensor td.u"):
        memfeed.Loader({"td": source, "y": torch.arange(4)}, 2)
    with pytest.raises(StoreError, match="found an UnbatchedTensor at u inside a lazy stack"):
        memfeed.Loader(lazy_stack([TensorDict({"u": UnbatchedTensor(whole)}, []) for _ in range(2)]), 2)


def test_values_that_are_no_tensors(tmp_path):
    source = TensorDict(
        {
            "x": torch.arange(4),
            "word": NonTensorStack("a", "b", "c", "d"),
            "same": NonTensorData({"k": [1]}, batch_size=[4]),
            "empty": TensorDict({}, [4]),
            "deep": {"only": NonTensorStack(1, None, 3, 4)},
        },
        [4],
    )
    MetaData = getattr(tensordict, "MetaData", None)  # newer than 0.8
    if MetaData is not None:
        source["meta"] = MetaData("all", batch_size=[4])
        source["typed"] = MetaData[str]("text", batch_size=[4])
        source.memmap(tmp_path / "td")
        assert memfeed.open(tmp_path / "td")[1]["typed"] == "text"
    store = memfeed.cache(source, tmp_path / "a.mf", progress=False)
    for batch, stored in zip(_batches(source), _batches(store), strict=True):
        rows = batch["x"].tolist()
        assert batch["word"] == stored["word"] == ["abcd"[row] for row in rows]
        assert batch["same"] == {"k": [1]}
        assert list(batch["empty"].keys()) == list(stored["empty"].keys()) == []
        assert batch["deep", "only"] == stored["deep", "only"] == [[1, None, 3, 4][row] for row in rows]
        assert MetaData is None or (batch["meta"], batch["typed"]) == ("all", "text")


def test_lazy_stacks(tmp_path):
    ragged = lazy_stack([TensorDict({"x": torch.arange(n) + n, "y": torch.tensor(n)}, []) for n in range(5)])
    inside = TensorDict({"z": torch.arange(5), "l": ragged}, [5])
    assert isinstance(inside.get("l"), LazyStackedTensorDict)
    for number, source in enumerate((ragged, inside)):
        store = memfeed.cache(source, tmp_path / f"{number}.mf", progress=False)
        for batch, stored in zip(_batches(source), _batches(store), strict=True):
            one, other = (batch, stored) if number == 0 else (batch["l"], stored["l"])
            assert one["y"].tolist() == other["y"].tolist()
            for row, again, n in zip(one["x"].unbind(), other["x"].unbind(), one["y"].tolist(), strict=True):
                assert row.tolist() == again.tolist() == list(range(n, 2 * n))
    with pytest.raises(StoreError, match=r"lazy stack along dim 1, at value; expected dim 0.*\.contiguous\(\)"):
        memfeed.Loader(lazy_stack([TensorDict({"x": torch.zeros(3)}, [3])] * 2, 1), 2)
    with pytest.raises(StoreError, match=r"value/1: found the key 'y' more"):
        memfeed.Loader(lazy_stack([TensorDict({"x": torch.zeros(3)}), TensorDict({"x": torch.zeros(3), "y": 1.0})]), 2)


@tensorclass
class Photos:
    images: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def from_dataset(cls, dataset):
        """As the tutorials make it: maps without a file, filled batch by batch."""
        n = len(dataset)
        data = cls(
            images=MemoryMappedTensor.empty((n, *dataset[0][0].shape), dtype=torch.uint8),
            targets=MemoryMappedTensor.empty((n,), dtype=torch.int64),
            batch_size=[n],
        )
        data.memmap_()
        for i, (image, target) in enumerate(dataset):
            data[i] = cls(images=image, targets=torch.tensor(target), batch_size=[])
        return data


def test_maps_without_a_file(tmp_path):
    dataset = [(torch.full((2, 3), i, dtype=torch.uint8), i) for i in range(5)]
    photos = Photos.from_dataset(dataset)
    assert photos.is_memmap()
    for source in (photos, memfeed.cache(photos, tmp_path / "a.mf", progress=False)):
        for batch in _batches(source):
            assert type(batch) is Photos
            assert torch.equal(batch.images[:, 0, 0].long(), batch.targets)
    column = MemoryMappedTensor.empty((4, 2), dtype=torch.float32).fill_(3.0)
    for columns in ({"x": column}, (column, column), column):
        store = memfeed.cache(columns, tmp_path / f"{type(columns).__name__}.mf", progress=False)
        assert equal(store[:], next(iter(memfeed.Loader(columns, 4))))
    td = TensorDict({"x": torch.arange(4)}, [4]).memmap_()
    assert memfeed.cache(td, tmp_path / "td.mf", progress=False)[2]["x"] == 2
    mapped = lazy_stack([TensorDict({"x": torch.arange(n)}, []) for n in range(3)]).memmap(tmp_path / "lazy")
    with pytest.raises(CopyError, match="lazy"):
        memfeed.cache(mapped, tmp_path / "copy.mf", progress=False)


def test_names_of_dims_are_kept(tmp_path):
    source = TensorDict({"x": torch.zeros(4, 3), "d": TensorDict({"y": torch.zeros(4, 3, 2)}, [4, 3, 2])}, [4, 3])
    source.names = ["row", "time"]
    assert _batches(source)[0].names == ["row", "time"]
    store = memfeed.cache(source, tmp_path / "a.mf", progress=False)
    assert store[1].names == ["time"]
    assert memfeed.open(tmp_path / "a.mf")[:2].names == [None, "time"]
    assert store.select("x")[0].names == ["time"]
    source.memmap(tmp_path / "td")
    if tensordict.TensorDict.load_memmap(tmp_path / "td").names[0] == "row":  # older versions do not save them
        opened = memfeed.open(tmp_path / "td")
        assert opened[0].names == ["time"]
        assert opened[[2, 0]].names == opened.tensordict().names == ["row", "time"]
    lazy = lazy_stack([TensorDict({"x": torch.zeros(2)}, [2]) for _ in range(3)])
    lazy.names = ["row", "time"]
    assert _batches(lazy)[0].names == ["row", "time"]


@pytest.mark.skipif(not has_typed, reason="this tensordict has no TypedTensorDict")
def test_classes_of_typed_tensordicts_are_kept(tmp_path):
    class Typed(tensordict.TypedTensorDict):
        x: torch.Tensor

    source = Typed(x=torch.arange(4), batch_size=[4])
    assert {type(batch) for batch in _batches(source)} == {Typed}
    store = memfeed.cache(source, tmp_path / "a.mf", progress=False)
    assert type(store[0]) is type(store[:2]) is Typed
    assert type(memfeed.open(tmp_path / "a.mf")[0]) is TensorDict
    again = memfeed.open(tmp_path / "a.mf", types=(Typed,))
    assert type(again[0]) is Typed
    assert again[0].x == 0


def test_columns_without_rows_and_without_batch_size():
    assert _batches(TensorDict({"x": torch.zeros(0, 2), "d": {"y": torch.zeros(0)}}, [0])) == []
    with pytest.raises(LoaderError, match="found TensorDict; expected a dataset"):
        memfeed.Loader(TensorDict({"x": torch.zeros(3)}, []), 2)


def test_a_tensordict_of_another_file(tmp_path):
    h5py = pytest.importorskip("h5py")
    assert h5py
    source = TensorDict({"x": torch.arange(6.0).view(3, 2), "deep": {"y": torch.arange(3)}}, [3])
    source.to_h5(tmp_path / "x.h5")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(StoreError, match=r"in an h5 or zarr file, at value; .* memfeed\.cache\(td, path\)"):
            memfeed.Loader(TensorDict.from_h5(tmp_path / "x.h5"), 2)
        store = memfeed.cache(TensorDict.from_h5(tmp_path / "x.h5"), tmp_path / "x.mf", progress=False)
    assert store[1]["deep", "y"] == 1
