"""The keys of a store are those of the samples, for memfeed and for tensordict's own reader."""

from __future__ import annotations

import inspect

import pytest
import torch
from tensordict import TensorDict

import memfeed

KEYS = ["data", "meta", "start", "dims", "heap", "type", "dtype", "_names", "_tensordict", "stack_dim", "is_nested"]
KEYS += ["c0", "memfeed", "checksums", "a b", "a.b", "50%", "a/b", "x:y", "\xe9t\xe9", "layer.0.weight", "a\\b"]
RESERVED = ["shape", "device", "_type"]  # tensordict itself drops a leaf of such a name
encodes = "robust_key" in inspect.signature(TensorDict.memmap).parameters


def _samples(keys):
    return [
        {
            **{key: torch.tensor([i, k]) for k, key in enumerate(keys)},
            "deep": {key: torch.arange(i + k) for k, key in enumerate(keys)},
        }
        for i in range(3)
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_true_keys_are_shown(tmp_path, workers):
    samples = _samples(KEYS)
    store = memfeed.cache(samples, tmp_path / "a.mf", progress=False, workers=workers)
    again = memfeed.open(tmp_path / "a.mf")
    again.verify()
    assert torch.equal(again[2]["a b"], samples[2]["a b"])
    shown = [again.tensordict()]
    if encodes:
        shown.append(TensorDict.load_memmap(tmp_path / "a.mf"))
    for tree in shown:
        assert set(tree.keys()) == {*KEYS, "deep"}
        assert set(tree["deep"].keys()) == {*KEYS}
        for k, key in enumerate(KEYS):
            assert tree[key].tolist() == [[i, k] for i in range(3)]
            assert tree["deep", key, "dims"].flatten().tolist() == [i + k for i in range(3)]
    assert (tmp_path / "a.mf" / "a%20b.memmap").is_file()
    assert (tmp_path / "a.mf" / "deep" / "a%2Fb" / "heap.bin").is_file()
    assert store.schema.field_index(("deep", "a.b")) >= 0
    assert len(list(memfeed.Loader(again, 2))) == 2


def test_names_that_tensordict_reserves_and_names_that_differ_in_case(tmp_path):
    samples = [dict.fromkeys([*RESERVED, "x", "X", "", "..", ".build", "y.memmap"], i) for i in range(3)]
    store = memfeed.cache(samples, tmp_path / "a.mf", progress=False)
    assert store[2] == samples[2]
    assert set(store.tensordict().keys()) == {"x", *(f"c{i}" for i in range(8))}
    if encodes:
        assert set(TensorDict.load_memmap(tmp_path / "a.mf").keys()) == set(store.tensordict().keys())


def test_a_skipped_sample_and_a_repair(tmp_path):
    class Dataset:
        def __len__(self):
            return 6

        def __getitem__(self, index):
            if index == 3:
                raise ValueError("no")
            return {"a b": torch.tensor(index), "d.e": {"x y": "t" * index}}

    store = memfeed.cache(Dataset(), tmp_path / "a.mf", progress=False, on_error="skip")
    assert store[:]["a b"].tolist() == [0, 1, 2, 4, 5]
    assert store[3]["d.e"]["x y"] == "tttt"
    file = tmp_path / "a.mf" / "a%20b.memmap"
    file.chmod(0o644)
    file.write_bytes(b"\xff" + file.read_bytes()[1:])
    repaired = memfeed.repair(Dataset(), tmp_path / "a.mf", progress=False, on_error="skip")
    repaired.verify()
    assert repaired[:]["a b"].tolist() == [0, 1, 2, 4, 5]
