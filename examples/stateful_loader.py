"""A script written for torchdata's StatefulDataLoader: the import changes, the states keep their meaning."""

import json
import tempfile
from pathlib import Path

import torch

import memfeed

ROWS, BATCH_SIZE = 100, 8


def loader_of(store: memfeed.Store) -> memfeed.Loader:
    return memfeed.Loader(store, batch_size=BATCH_SIZE, shuffle=True, num_workers=0)


def rows_of(batches) -> list[int]:
    return [row for _, rows in batches for row in rows.tolist()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store = memfeed.cache((torch.randn(ROWS, 8), torch.arange(ROWS)), Path(folder) / "data.mf", progress=False)
        first = loader_of(store)
        batches, seen = iter(first), []
        for _ in range(5):
            seen += next(batches)[1].tolist()
        state = json.loads(json.dumps(first.state_dict()))  # in the middle of an epoch

        second = loader_of(store)  # of another process, with another seed
        second.load_state_dict(state)
        left = rows_of(second)
        assert left == rows_of(batches), "the loader that was resumed gives another order"
        assert sorted(seen + left) == list(range(ROWS)), "the epoch lost or doubled rows"

        batches = iter(first)
        for _ in range(len(first)):
            next(batches)
        state = first.state_dict()  # behind the last batch, before the end is noticed
        third = loader_of(store)
        third.load_state_dict(state)
        assert rows_of(third) == [], "a state taken behind the last batch resumes to an empty epoch"
        assert sorted(rows_of(third)) == list(range(ROWS)), "and the epoch after that is whole"
