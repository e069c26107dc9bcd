"""Loops over many small rows: lists, DataLoader with and without ``__getitems__``, NumPy, and a store."""

import random
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import memfeed

ROWS, BATCH = 60_000, 300


class Rows(Dataset):
    """One row at a time."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class RowsTogether(Rows):
    """The rows of a batch in one read."""

    def __getitems__(self, indices):
        return self.data[indices]


def epoch(batches):
    """Return the seconds of an epoch, in which each row came once."""
    started, total = time.perf_counter(), 0
    for batch in batches:
        total += int(batch.sum()) if hasattr(batch, "sum") else sum(batch)
    assert total == ROWS * (ROWS - 1) // 2
    return time.perf_counter() - started


def lists():
    rows = random.sample(range(ROWS), ROWS)
    return (rows[first : first + BATCH] for first in range(0, ROWS, BATCH))


def numpy():
    return np.random.default_rng().permutation(np.arange(ROWS)).reshape(-1, BATCH)


if __name__ == "__main__":
    data = torch.arange(ROWS)
    store = memfeed.cache(data, "rows.mf", progress=False)
    shuffled = memfeed.Loader(store, BATCH, shuffle=True)
    by_groups = memfeed.Loader(store, BATCH, shuffle=memfeed.Blocks(1000))
    loops = {
        "lists": lists,
        "DataLoader": lambda: DataLoader(Rows(data), BATCH, shuffle=True),
        "DataLoader, __getitems__": lambda: DataLoader(RowsTogether(data), BATCH, shuffle=True, collate_fn=lambda x: x),
        "NumPy": numpy,
        "memfeed": lambda: shuffled,
        "memfeed, by groups": lambda: by_groups,
    }
    seconds = {name: min(epoch(loop()) for _ in range(3)) for name, loop in loops.items()}
    for name in loops:
        print(f"{name}: {seconds['DataLoader'] / seconds[name]:.1f} times as fast as DataLoader")
    assert seconds["memfeed"] < seconds["DataLoader"] / 5
    assert seconds["memfeed"] < 3 * seconds["DataLoader, __getitems__"]

    nested = {"im": {"image": torch.rand(3, 8, 8), "label": torch.rand(1)}, "more": [torch.rand(2), (torch.rand(3),)]}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    moved = memfeed.to_device(nested, device)  # any nesting, in one call
    assert torch.equal(moved["more"][1][0].cpu(), nested["more"][1][0])
    assert moved["im"]["image"].device.type == device
