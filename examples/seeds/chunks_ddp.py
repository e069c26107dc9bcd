"""Several processes: a list of loaders, one for each chunk of the rows, and ``loaders[rank]`` in ``mp.spawn``."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import memfeed

ROWS, RANKS, BATCH = 240, 2, 20


def train(rank, loaders):
    """Train on the chunk of this rank, with gradients averaged over all ranks."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer, rows = torch.optim.SGD(model.parameters(), 0.01), []
    for batch in loaders[rank]:
        optimizer.zero_grad()
        model(batch["x"]).square().mean().backward()
        optimizer.step()
        rows += batch["row"].tolist()
    found = [None] * RANKS
    dist.all_gather_object(found, rows)
    assert sorted(found[0] + found[1]) == list(range(ROWS)), "each row once, over both ranks"
    assert len(found[rank]) == ROWS // RANKS
    if rank == 0:
        print(f"{RANKS} ranks read {ROWS} rows, each once")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)  # a second run finds the same data
    data = {"x": torch.randn(ROWS, 8), "row": torch.arange(ROWS)}
    store = memfeed.cache(data, "rows.mf", progress=False)
    chunks = torch.arange(ROWS).chunk(RANKS)
    loaders = [memfeed.Loader(store.subset(chunk), BATCH, shuffle=True) for chunk in chunks]
    mp.spawn(train, args=(loaders,), nprocs=RANKS)
