"""Data that is memory-mapped already is copied only on request, whoever mapped it."""

import sys

import numpy as np
import pytest
import torch
from tensordict import MemoryMappedTensor, TensorDict
from torch.utils.data import TensorDataset

import memfeed
from memfeed.errors import CopyError
from support import Made, Pair, cache

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which file memory is mapped from")


def array(folder):
    np.save(folder / "a.npy", np.arange(20).reshape(10, 2))
    return np.load(folder / "a.npy", mmap_mode="r+")


def arrow(folder, columns):
    pa = pytest.importorskip("pyarrow")
    table = pa.table(columns)
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write(table)
    return pa.ipc.open_file(pa.memory_map(str(folder / "a.arrow"))).read_all()


def records(folder):
    return np.memmap(folder / "a.bin", "i1,i4", "w+", shape=10)


MAPPED = {
    "array": array,
    "view": lambda folder: array(folder)[2:, :1],
    "tensor of an array": lambda folder: torch.from_numpy(array(folder)),
    "from_file": lambda folder: torch.from_file(str(folder / "a.bin"), shared=True, size=10, dtype=torch.int64),
    "MemoryMappedTensor": lambda folder: MemoryMappedTensor.from_tensor(torch.arange(10), filename=folder / "a.memmap"),
    "dict": lambda folder: {"a": torch.arange(10), "b": array(folder)},
    "tuple": lambda folder: (torch.arange(10), array(folder)),
    "nested": lambda folder: {"a": (array(folder), {"b": torch.arange(10)})},
    "list of samples": lambda folder: list(array(folder)),
    "list of dicts": lambda folder: [{"a": row} for row in array(folder)],
    "TensorDataset": lambda folder: TensorDataset(torch.arange(10), torch.from_numpy(array(folder))),
    "TensorDict of mapped": lambda folder: TensorDict({"a": torch.from_numpy(array(folder))}, [10]),
    "TensorDict": lambda folder: TensorDict({"a": torch.arange(10)}, [10]).memmap(folder / "td"),
    "tensorclass": lambda folder: Pair(torch.rand(10), torch.arange(10), batch_size=[10]).memmap(folder / "td"),
    "column of a store": lambda folder: cache(torch.arange(10), folder / "s.mf").column(()),
    "structured": records,
    "arrow": lambda folder: arrow(folder, {"a": range(10)}),
    "arrow text": lambda folder: arrow(folder, {"s": ["a"] * 10}),
}


@pytest.mark.parametrize("kind", MAPPED)
def test_mapped_data_is_copied_only_on_request(path, tmp_path, kind):
    data = MAPPED[kind](tmp_path)
    with pytest.raises(CopyError, match=rf"memory-mapped already, (at|from) {tmp_path}.*allow='copy'") as caught:
        cache(data, path)
    assert len(str(caught.value)) < 400
    assert ("memfeed.Loader(data)" in str(caught.value)) == (
        kind not in ("list of samples", "list of dicts", "TensorDict", "tensorclass", "arrow text")
    )
    assert not path.exists()
    store = cache(data, path, allow="copy")
    assert len(store) == (8 if kind == "view" else 10)


def test_memory_that_is_not_mapped_from_a_file_is_copied(path, tmp_path):
    mapped = array(tmp_path)
    gone = np.memmap(tmp_path / "gone", np.int64, "w+", shape=10)
    (tmp_path / "gone").unlink()
    for i, data in enumerate(
        [
            mapped.copy(),
            torch.arange(10).share_memory_(),
            (torch.from_numpy(mapped) + 1, mapped * 2),
            Made(list(mapped)),  # a dataset decodes, whatever it reads from
            [1, 2, 3],
        ]
    ):
        assert len(cache(data, tmp_path / f"{i}.mf")) in (3, 10)
    assert len(gone) == 10


def test_a_store_is_not_written_over_the_file_that_its_data_come_from(tmp_path):
    store = cache(torch.arange(10), tmp_path / "s.mf")
    with pytest.raises(CopyError, match="found the source of the data itself"):
        cache(store.column(()), tmp_path / "s.mf", allow="copy", overwrite=True)
    assert memfeed.open(tmp_path / "s.mf")[9] == 9
