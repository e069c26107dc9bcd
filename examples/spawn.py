"""`torch.multiprocessing.spawn` with the loader as an argument, made before there are ranks: it shards itself."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

import memfeed

ROWS, BATCH_SIZE, RANKS = 64, 8, 2


def train(rank: int, loader: memfeed.Loader, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    assert len(loader) == ROWS // (BATCH_SIZE * RANKS)
    orders = []
    for _ in range(2):
        seen = torch.cat([rows for _, rows in loader])
        everything = [torch.empty_like(seen) for _ in range(RANKS)]
        dist.all_gather(everything, seen)
        orders.append(torch.cat(everything).tolist())
    assert all(sorted(order) == list(range(ROWS)) for order in orders), "ranks together lost or doubled rows"
    assert orders[0] != orders[1], "both epochs have the same order"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store = memfeed.cache((torch.randn(ROWS, 8), torch.arange(ROWS)), Path(folder) / "data.mf", progress=False)
        loader = memfeed.Loader(store, batch_size=BATCH_SIZE, shuffle=True)
        torch.multiprocessing.spawn(train, (loader, folder), RANKS)
