"""The ranks of test_sharded_ranks: each reads its pieces, and writes down what it read and which errors it got.

Arguments: the store, another store, a directory for what is written, and numbers of ranks. The ranks are forked, so
that torch is imported once.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import memfeed
from memfeed import Loader
from memfeed.errors import LoaderError
from memfeed.loading import own_rows
from memfeed.system import machine

MISSING_SECONDS = 1.5


def sharded_loader(store: memfeed.Store, **options: Any) -> Loader:
    return Loader(store, 8, shuffle=True, seed=1, placement="sharded", last="uneven", **options)


def error_of(loader: Loader) -> str:
    try:
        next(iter(loader))
    except LoaderError as error:
        return str(error)
    return ""


def read(path: str, other: str, directory: str, rank: int, world_size: int) -> None:
    out, store = Path(directory), memfeed.open(path)
    dist.init_process_group(
        "gloo", f"file://{out}/rendezvous", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    loader = sharded_loader(store)
    epochs = []
    for _ in range(2):
        batches = [(image[:, 0].tolist(), labels.tolist()) for image, labels in loader]
        assert all(image == labels for image, labels in batches)
        epochs.append([labels for _, labels in batches])
    found: dict[str, Any] = {
        "epochs": epochs,
        "kept": loader._epochs.reader.plan.placement.columns[0].parts[0].row_count,
    }
    found["given"] = [label for _, labels in sharded_loader(store, ranks=(0, 1)) for label in labels.tolist()]

    last = world_size - 1
    found["other store"] = error_of(sharded_loader(memfeed.open(other) if rank == last else store))
    found["other seed"] = error_of(Loader(store, 8, shuffle=True, seed=rank, placement="sharded"))
    free = machine.memory_limit
    machine.memory_limit = lambda: 100 if rank == last else free()
    found["no memory"] = error_of(sharded_loader(store))
    machine.memory_limit = lambda: len(store) * 24  # each piece fits, all of them do not
    found["no memory for all"] = error_of(sharded_loader(store))
    machine.memory_limit = free
    found["again"] = error_of(sharded_loader(store))
    own_rows.BEGIN_SECONDS = MISSING_SECONDS
    dist.barrier()
    found["missing"] = error_of(sharded_loader(store)) if rank != last else ""
    (out / f"found-{rank}").write_text(json.dumps(found))
    dist.barrier()  # the store of the group lives in a rank


if __name__ == "__main__":
    children = []
    for world_size in map(int, sys.argv[4:]):
        for rank in range(world_size):
            if not (pid := os.fork()):
                read(sys.argv[1], sys.argv[2], f"{sys.argv[3]}/{world_size}", rank, world_size)
                os._exit(0)
            children.append(pid)
    sys.exit(max(os.waitpid(pid, 0)[1] for pid in children) > 0)
