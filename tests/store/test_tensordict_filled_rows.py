import json
import os

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import memfeed
from memfeed.errors import CorruptStoreError, StoreError


def dump(path, filled, **more):
    """As `ReplayBuffer.dumps` of torchrl 0.14 writes the storage of a buffer."""
    TensorDict({"step": torch.arange(10), "obs": torch.rand(10, 3)}, [10]).memmap(str(path / "storage"))
    metadata = {"metadata": {}, "is_pytree": False, "len": filled, **more}
    (path / "storage" / "storage_metadata.json").write_text(json.dumps(metadata))
    return path / "storage"


@pytest.mark.parametrize("filled", [0, 7, 10, 12])
def test_only_the_filled_rows_are_there(tmp_path, filled):
    store = memfeed.open(dump(tmp_path, filled))
    rows = min(filled, 10)
    assert len(store) == rows
    assert store.column("step").tolist() == list(range(rows))
    read = [batch["step"] for batch in memfeed.Loader(store, 4, shuffle=True, seed=0)]
    assert sorted(np.concatenate([torch.empty(0), *read]).tolist()) == list(range(rows))


@pytest.mark.parametrize("text", ["", "[]", '{"len": "many"}', '{"len": -1}', "{" * 99])
def test_metadata_that_cannot_be_read(tmp_path, text):
    path = dump(tmp_path, 7)
    (path / "storage_metadata.json").write_text(text)
    with pytest.raises(CorruptStoreError, match=r"storage_metadata\.json: found .*dump the replay buffer again"):
        memfeed.open(path)


def test_a_link_in_the_place_of_the_metadata_is_not_followed(tmp_path):
    path = dump(tmp_path, 7)
    os.rename(path / "storage_metadata.json", tmp_path / "elsewhere.json")
    os.symlink(tmp_path / "elsewhere.json", path / "storage_metadata.json")
    with pytest.raises(CorruptStoreError):
        memfeed.open(path)


def test_the_directory_above_names_the_storage(tmp_path):
    dump(tmp_path, 7)
    with pytest.raises(StoreError, match=r"found the dump of a TorchRL replay buffer; .* open .*storage"):
        memfeed.open(tmp_path)
