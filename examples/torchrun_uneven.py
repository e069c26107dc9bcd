"""torchrun on 2 and on 3 ranks, a number of rows that they do not divide: as many batches on each, no row left out."""

import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import memfeed

ROWS, BATCH_SIZE = 101, 10


def train(folder: Path) -> None:
    loader = memfeed.Loader(memfeed.open(folder / "data.mf"), batch_size=BATCH_SIZE, shuffle=True)  # before the group
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    for epoch in range(2):
        loader.set_epoch(epoch)
        seen = []
        for images, rows in loader:
            model(images).square().mean().backward()  # waits for every rank: hangs where one has fewer batches
            seen += rows.tolist()
        assert len(loader) == -(-ROWS // (BATCH_SIZE * size))
        everything = [None] * size
        dist.all_gather_object(everything, seen)
        together = sum(everything, [])
        assert set(together) == set(range(ROWS)), "rows are missing"
        assert len(together) - ROWS == -ROWS % size, "more rows come twice than are needed to make ranks even"
    del model
    gc.collect()  # the model keeps the group, whose threads must end before Python does: torch aborts else
    dist.destroy_process_group()


if __name__ == "__main__" and "RANK" in os.environ:
    train(Path(sys.argv[1]))
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        memfeed.cache((torch.randn(ROWS, 8), torch.arange(ROWS)), Path(folder) / "data.mf", progress=False)
        for ranks in 2, 3:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            subprocess.run([*launch, __file__, folder], check=True, timeout=120)
