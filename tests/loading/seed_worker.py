"""One of two ranks that test_drawn_seed starts: reads loaders without a seed, and writes down what it read.

Arguments: rank, a directory for what the ranks share and write.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from memfeed import Loader
from memfeed.errors import LoaderError
from memfeed.loading import ranks

ROWS = torch.arange(40)


def read(loader: Any) -> dict[str, Any]:
    rows = [row for batch in loader for row in batch.tolist()]
    return {"seed": loader.state_dict()["seed"], "rows": rows}


def main(rank: int, out: Path) -> None:
    early = Loader(ROWS, 5, shuffle=True)  # before the process group is there
    init = f"file://{out / 'store'}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.manual_seed(100 + rank)
    found = {"early": read(early)}
    evaluation = Loader(ROWS, 5, shuffle=True)
    if rank == 0:
        found["evaluation"] = read(evaluation)
        found["alone"] = read(Loader(ROWS, 5, shuffle=True, ranks=(0, 1)))
        found["smaller"] = read(Loader(ROWS[:30], 5, shuffle=True))
    found["later"] = read(Loader(ROWS, 5, shuffle=True))
    found["given ranks"] = read(Loader(ROWS, 5, shuffle=True, ranks=(rank, 2)))
    generator = torch.Generator().manual_seed(7 + rank)
    found["generator"] = read(Loader(ROWS, 5, shuffle=True, generator=generator))
    assigned = Loader(ROWS, 5, shuffle=True)
    read(assigned)
    assigned.sampler.generator = generator
    found["assigned"] = read(assigned)
    of_sampler = Loader(ROWS, 5, shuffle=True)
    found["sampler"] = {"rows": list(of_sampler.sampler), "seed": of_sampler.state_dict()["seed"]}
    collate = Loader(ROWS, 5, shuffle=True).collate_fn
    for _ in range(rank):  # rank 1 alone: what a framework draws for its rank waits for nobody
        list(DataLoader(Loader(ROWS, 5).dataset, 5, collate_fn=collate))
    if rank == 1:
        ranks.WAIT_SECONDS = 0.0
        try:
            read(Loader(ROWS, 7, shuffle=True))
        except LoaderError as error:
            found["missing"] = str(error)
    (out / f"found-{rank}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
