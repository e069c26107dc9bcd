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


def dump_of_steps(path, filled, written=None, batch=(10, 4)):
    """As a buffer with a storage of several batch dims is written, with the counts of its writer."""
    obs = torch.arange(batch[0]).view(-1, *[1] * (len(batch) - 1)).expand(batch).contiguous()
    TensorDict({"more": {"obs": obs}}, batch).memmap(str(path / "storage"))
    (path / "storage" / "storage_metadata.json").write_text(json.dumps({"len": filled}))
    if written is not None:
        (path / "writer").mkdir()
        (path / "writer" / "metadata.json").write_text(json.dumps(written))
    return path / "storage"


@pytest.mark.parametrize(
    ("filled", "written", "batch", "rows"),
    [
        (24, None, (10, 4), 6),  # ndim=2: TorchRL counts the steps of all environments
        (24, None, (10, 2, 3), 4),
        (0, None, (10, 4), 0),
        (40, None, (10, 4), 10),
        (7, None, (10, 4), 7),  # ndim=1: each row has 4 of something
        (4, {"cursor": 1, "write_count": 1}, (10, 4), 1),
        (4, {"cursor": 4, "write_count": 4}, (10, 4), 4),
        (8, {"cursor": 3, "write_count": 21}, (8, 4), 8),
    ],
)
def test_filled_rows_of_several_environments(tmp_path, filled, written, batch, rows):
    store = memfeed.open(dump_of_steps(tmp_path, filled, written, batch))
    assert [int(store[i]["more", "obs"].flatten()[0]) for i in range(len(store))] == list(range(rows))


@pytest.mark.parametrize(
    ("filled", "written"),
    [
        (4, None),
        (4, {"cursor": 1}),
        (4, {"cursor": "a", "write_count": 4}),
        (4, {"cursor": 2, "write_count": 1}),
        (41, None),
    ],
)
def test_a_number_of_steps_that_can_mean_several_numbers_of_rows(tmp_path, filled, written):
    path = dump_of_steps(tmp_path, filled, written)
    with pytest.raises(StoreError, match=rf"found len {filled} for a storage of \[10, 4\].*memfeed.cache\(rb.storage"):
        memfeed.open(path)
