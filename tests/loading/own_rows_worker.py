"""The ranks of test_own_rows: each reads its loader of a list, and writes down what it read."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import TensorDataset

import memfeed
from memfeed import Loader
from memfeed.errors import LoaderError
from memfeed.loading import own_rows

WORLD_SIZE = 2


def rows_of(loader: Any) -> list[int]:
    return [row for batch in loader for row in batch.tolist()]


def error_of(loader: Any) -> str:
    try:
        rows_of(loader)
    except LoaderError as error:
        return str(error)
    return ""


def own_stores(rank: int, loaders: list[Loader], paths: list[str], uneven: list[Loader]) -> dict[str, Any]:
    loader = loaders[rank]
    found: dict[str, Any] = {"before": len(loader), "epoch": rows_of(loader), "after": len(loader)}
    batches = iter(loader)
    found["begun"] = next(batches).tolist()
    other = Loader(loader.store, 4, shuffle=True)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    found["left"] = rows_of(batches)
    found["resumed"] = rows_of(other)
    skipping = Loader(loader.store, 4)
    skipping.skip(2)
    found["skipped"] = rows_of(skipping)
    shared, chunk = memfeed.open(paths[0]), memfeed.open(paths[rank])
    found["shared"] = rows_of(Loader(shared, 4, last="uneven"))
    found["given"] = rows_of(Loader(chunk, 4, ranks=(rank, 2), last="uneven"))
    found["view"] = rows_of(Loader(shared.subset(range(rank * 4, rank * 4 + 4)), 2))
    found["memory"] = [row for (part,) in Loader(TensorDataset(torch.arange(4) + 4 * rank), 2) for row in part.tolist()]
    found["unequal"] = error_of(uneven[rank])
    found["allowed"] = rows_of(Loader(uneven[rank].store, 6, last="uneven"))
    return found


def late_rank(rank: int, loaders: list[Loader], paths: list[str], uneven: list[Loader]) -> dict[str, Any]:
    own_rows.ANSWER_SECONDS = 0.0
    if rank == 0:
        found = {"rows": rows_of(loaders[0])}
        dist.barrier()
        return found
    dist.barrier()
    return {"error": error_of(loaders[1])}


def one_store(rank: int, loaders: list[Loader], paths: list[str], uneven: list[Loader]) -> dict[str, Any]:
    """Both begin the loaders of the list one after the other: then the list is not one of a loader for each rank."""
    found: dict[str, Any] = {"folds": [rows_of(loader) for loader in loaders]}
    store = loaders[0].store
    found["chunk"] = rows_of(Loader(store.subset(range(rank * 10, rank * 10 + 10)), 5, shuffle=True))
    own_rows.ANSWER_SECONDS = 1e6
    if rank == 0:  # nobody waits for anybody any more
        found["alone"] = rows_of(Loader(memfeed.open(paths[1]), 5))
    return found


SCENARIOS = {"own stores": own_stores, "late": late_rank, "one store": one_store}


def begin(rank: int, scenario: str, out: str, *given: Any) -> None:
    init = f"file://{out}/rendezvous"
    dist.init_process_group("gloo", init, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=60))
    found = SCENARIOS[scenario](rank, *given)
    Path(out, f"found-{rank}").write_text(json.dumps(found))
    dist.barrier()  # the store of the group lives in a rank
    dist.destroy_process_group()


if __name__ == "__main__":
    scenario, out, *paths = sys.argv[1:]
    stores = [memfeed.open(path) for path in paths]
    loaders = [Loader(store, 4, shuffle=True, seed=1) for store in stores]
    uneven = [Loader(store.subset(range(10 + 10 * rank)), 6) for rank, store in enumerate(stores)]
    method = "fork" if scenario == "own stores" else "spawn"  # which imports torch once more for each rank
    mp.start_processes(begin, (scenario, out, loaders, paths, uneven), WORLD_SIZE, start_method=method)
