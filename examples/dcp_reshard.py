"""Save with `torch.distributed.checkpoint` on 2 ranks in the middle of an epoch, go on with 3."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import memfeed

ROWS, GLOBAL_BATCH = 96, 12  # the same rows at each step, whatever the number of ranks
STEPS, SAVED = ROWS // GLOBAL_BATCH, 3


def train(folder: Path, resume: bool) -> None:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    loader = memfeed.Loader(memfeed.open(folder / "data.mf"), batch_size=GLOBAL_BATCH // size, shuffle=True)
    if resume:
        dcp.load({"loader": loader}, checkpoint_id=folder / "state")
    for step, (_, rows) in enumerate(loader, SAVED if resume else 0):
        with (folder / "seen.txt").open("a") as file:
            print(step, *rows.tolist(), file=file)
        if not resume and step == SAVED - 1:
            dcp.save({"loader": loader}, checkpoint_id=folder / "state")
            break
    assert not resume or step == STEPS - 1, f"the last step is {step}; expected {STEPS - 1}"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__" and "RANK" in os.environ:
    train(Path(sys.argv[1]), sys.argv[2] == "resume")
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        memfeed.cache((torch.randn(ROWS, 8), torch.arange(ROWS)), Path(folder) / "data.mf", progress=False)
        for ranks, word in (2, "begin"), (3, "resume"):
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            subprocess.run([*launch, __file__, folder, word], check=True, timeout=120)
        lines = [[int(word) for word in line.split()] for line in (Path(folder) / "seen.txt").open()]
    assert sorted(row for _, *rows in lines for row in rows) == list(range(ROWS)), "rows are lost or doubled"
    assert {step for step, *_ in lines} == set(range(STEPS))
