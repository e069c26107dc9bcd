"""A store that is being filled goes to other processes: as an argument of `mp.spawn`, or to workers of a DataLoader."""

import copy
import gc
import pickle
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.utils.data import DataLoader

import memfeed
from memfeed import Loader
from memfeed.errors import StoreError
from memfeed.store.store import with_parts
from support import Made, cache, wait_until

ROWS, PROBED = 240, 16


class Slow(Made):
    """Takes 2 ms a sample, and writes the number of each that is read to a file."""

    def __init__(self, log):
        super().__init__(sample, ROWS)
        self.log = str(log)

    def __getitem__(self, index):
        time.sleep(0.002)
        with open(self.log, "a") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)


def sample(i):
    return {"x": torch.full((5,), i), "r": torch.arange(i % 4)}


def read_of(log):
    return list(map(int, Path(log).read_text().split()))


def train(rank, loader, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    assert len(loader) == ROWS // 20
    for epoch in range(2):
        rows = [row for batch in loader for row in batch["x"][:, 0].tolist()]
        (Path(folder) / f"{epoch}.{rank}").write_text(" ".join(map(str, rows)))
    dist.destroy_process_group()


@pytest.mark.long
def test_a_loader_that_fills_is_an_argument_of_spawn(tmp_path):
    store = cache(Slow(tmp_path / "log"), tmp_path / "s.mf", lazily=True, workers=1)
    loader = Loader(store, 10, shuffle=True, seed=3)
    torch.multiprocessing.spawn(train, (loader, str(tmp_path)), 2)
    orders = []
    for epoch in range(2):
        ranks = [list(map(int, (tmp_path / f"{epoch}.{rank}").read_text().split())) for rank in range(2)]
        assert sorted(sum(ranks, [])) == list(range(ROWS))
        orders.append(ranks)
    assert orders[0] != orders[1]
    store.finish()
    counts = np.bincount(read_of(tmp_path / "log"))
    assert counts.sum() <= ROWS + 2 * PROBED + 2 * PROBED, "beyond the probes of three processes no row is read twice"
    assert len(memfeed.open(tmp_path / "s.mf")) == ROWS


def unpickled(store, folder):
    (Path(folder) / "seen").write_text(str(len([store[row] for row in range(ROWS)])))


@pytest.mark.long
def test_a_process_unpickles_a_store_that_the_one_which_starts_it_still_fills(tmp_path):
    store = cache(Slow(tmp_path / "log"), tmp_path / "s.mf", lazily=True, workers=0)  # fills no row by itself
    child = torch.multiprocessing.get_context("spawn").Process(target=unpickled, args=(store, str(tmp_path)))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert (tmp_path / "seen").read_text() == str(ROWS)


@pytest.mark.long
def test_workers_of_a_dataloader_that_are_spawned_read_it(tmp_path):
    store = cache(Slow(tmp_path / "log"), tmp_path / "s.mf", lazily=True, workers=1)
    loader = DataLoader(store, 20, num_workers=1, collate_fn=memfeed.Collate(), multiprocessing_context="spawn")
    assert [row for batch in loader for row in batch["x"][:, 0].tolist()] == list(range(ROWS))


def test_a_copy_in_the_same_process_has_the_same_workers(tmp_path):
    store = cache(Slow(tmp_path / "log"), tmp_path / "s.mf", lazily=True, workers=1)
    other = copy.deepcopy(store.subset(range(40)))
    assert other._view.supply is store._view.supply
    assert other[39]["x"].tolist() == [39] * 5
    assert with_parts(other, transform=memfeed.transforms.RandomHorizontalFlip()).transform is not None
    assert store.transform is None
    store.finish()
    assert other.progress().present == ROWS
    assert other.column("x").shape == (40, 5)


def test_without_the_store_and_its_build_the_pickle_is_refused(tmp_path):
    store = cache(Slow(tmp_path / "log"), tmp_path / "s.mf", lazily=True, workers=0)
    pickled = pickle.dumps(store)
    assert len(pickle.loads(pickled)) == ROWS
    with pytest.raises(StoreError, match=r"t\.mf: found neither the store nor its unfinished build"):
        pickle.loads(pickled.replace(b"s.mf", b"t.mf"))  # as on another machine


def test_a_loader_of_a_removed_build_does_not_claim_the_one_that_came_after_it(tmp_path):
    path, dataset = tmp_path / "s.mf", [torch.full((3,), row) for row in range(40)]
    _leader, joined = (Loader(dataset, 4, cache=path) for _ in range(2))
    shutil.rmtree(tmp_path / "s.mf.build")
    next(iter(Loader(dataset, 4, cache=path)))  # another build, whose process leads it no more
    gc.collect()
    thread = joined.store._view.supply._thread
    wait_until(lambda: not thread.is_alive(), 20)  # it has found that the build is not the one that it joined
    assert len(list(Loader(dataset, 4, cache=path))) == 10
