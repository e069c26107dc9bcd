"""One rank of a run that test_ranks starts with torchrun: reads its share of a store, and writes down what it read.

Arguments: the store, a directory for what is written, and the state to go on from if there is one. It ends with an
epoch in which the test kills it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import memfeed
from memfeed import Blocks, Loader

GLOBAL_BATCH = 12
ORDERS = {
    "exact": {"shuffle": True, "seed": 0, "last": "uneven"},
    "blocks": {"shuffle": Blocks(8), "seed": 0, "last": "uneven"},
}
KILLED = {"shuffle": True, "seed": 3, "last": "uneven"}
KILLED_EPOCH = 4


def rows_of(batches: Any) -> list[list[int]]:
    return [batch[1].tolist() for batch in batches]


def padded(store: memfeed.Store) -> dict[str, Any]:
    """In lock-step: a rank without a batch would leave the others waiting."""
    rows, shapes, counts = [], set(), []
    for (_, labels), valid in Loader(store, 5, shuffle=True, seed=0, last="pad"):
        count = valid.sum()
        dist.all_reduce(count)
        rows.append(labels[valid].tolist())
        shapes.add((tuple(labels.shape), tuple(valid.shape)))
        counts.append(int(count))
    return {"rows": rows, "shapes": sorted(shapes), "counts": counts}


def checkpointed(store: memfeed.Store, batch_size: int, at: Path) -> dict[str, Any]:
    """What comes behind a checkpoint, in the loader it was made of and in the one it was loaded into."""
    loader, other = (Loader(store, batch_size, shuffle=True, seed=0, last="uneven") for _ in range(2))
    loader.set_epoch(2)
    batches = iter(loader)
    rows_of(next(batches) for _ in range(7))
    dcp.save({"loader": loader}, checkpoint_id=at)
    dcp.load({"loader": other}, checkpoint_id=at)
    return {"saved": rows_of(batches), "loaded": rows_of(other), "epochs": [loader.epoch, other.epoch]}


def write(path: Path, found: Any) -> None:
    path.with_suffix(".new").write_text(json.dumps(found))
    os.replace(path.with_suffix(".new"), path)


def train(store: memfeed.Store, batch_size: int, out: Path) -> None:
    """Until it is killed: each rank writes the rows of a step, then rank 0 saves that the step was done."""
    loader = Loader(store, batch_size, **KILLED)
    loader.set_epoch(KILLED_EPOCH)
    with open(out / f"rows-{dist.get_rank()}", "w", buffering=1) as log:
        for batch in loader:
            log.write(json.dumps(batch[1].tolist()) + "\n")
            dist.barrier()
            if dist.get_rank() == 0:
                write(out / "state", loader.state_dict())
            time.sleep(0.05)


def main(path: str, directory: str, resume: str | None = None) -> None:
    out = Path(directory)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    write(out / f"pid-{rank}", os.getpid())
    store, batch_size = memfeed.open(path), GLOBAL_BATCH // world_size
    found: dict[str, Any] = {name: rows_of(Loader(store, batch_size, **order)) for name, order in ORDERS.items()}
    found["given"] = rows_of(Loader(store, 5, ranks=(1, 3), last="uneven"))
    found["padded"] = padded(store)
    found["checkpointed"] = checkpointed(store, batch_size, out / "checkpoint")
    if resume is not None:
        loader = Loader(store, batch_size, **KILLED)
        loader.load_state_dict(json.loads(Path(resume).read_text()))
        found["resumed"] = rows_of(loader)
    write(out / f"found-{rank}", found)
    dist.barrier()
    train(store, batch_size, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
