"""torchrun with workers that die and workers that join: in what was trained, every row of an epoch counts once."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import memfeed

ROWS, EPOCHS, GLOBAL_BATCH, SAVE_EVERY = 250, 2, 24, 2  # the global batch stays when the number of workers changes


def train(folder: Path, seconds_a_step: float = 0) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    loader = memfeed.Loader(memfeed.open(folder / "data.mf"), GLOBAL_BATCH // size, shuffle=True, seed=0, last="pad")
    model, history = torch.zeros(ROWS), []  # stands for a model: how often it was trained with each row
    if (folder / "checkpoint").exists():
        model, state, history = torch.load(folder / "checkpoint").values()
        loader.load_state_dict(state)
    history.append(size)
    while loader.state_dict()["epoch"] < EPOCHS:
        for step, ((_, rows), valid) in enumerate(loader):
            if os.environ.get("DIES") == os.environ["TORCHELASTIC_RESTART_COUNT"] and (rank, step) == (1, 5):
                os.kill(os.getpid(), signal.SIGKILL)  # for the demonstration
            gradient = torch.zeros(ROWS).index_add_(0, rows[valid], torch.ones(int(valid.sum())))
            dist.all_reduce(gradient)  # fails where a worker is gone: torchrun then starts all of them again
            model += gradient
            time.sleep(seconds_a_step)
            if rank == 0 and step % SAVE_EVERY == 0:  # model and position together, and both at once
                torch.save({"model": model, "loader": loader.state_dict(), "history": history}, folder / "new")
                os.replace(folder / "new", folder / "checkpoint")
    assert (model == EPOCHS).all(), "a row was left out, or counts twice"
    if rank == 0:
        (folder / "done").write_text(" ".join(map(str, history)))
        print(f"{ROWS} rows, each once in each of {EPOCHS} epochs; numbers of workers, one after another: {history}")
    dist.barrier()  # the store that joins the workers lives in one of them


if __name__ == "__main__" and "RANK" in os.environ:
    train(Path(sys.argv[1]), *map(float, sys.argv[2:]))
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        memfeed.cache((torch.randn(ROWS, 8), torch.arange(ROWS)), Path(folder) / "data.mf", progress=False)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        launch += ["--max-restarts=3", __file__, folder]
        # a store of their own for the workers: in the one of torchrun, gloo may find dead workers and wait for them
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        subprocess.run(launch, check=True, timeout=220, env={**os.environ, **own, "DIES": "0"})
        assert (Path(folder) / "done").read_text().startswith("2 2"), "the second worker was killed once"
