"""Train with Fabric on two processes, kill it in the middle of an epoch, resume. No row is lost or doubled."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from lightning.fabric import Fabric

import memfeed

ROWS, BATCH_SIZE, EPOCHS = 96, 8, 2  # 6 batches a rank


def train(folder: Path, kill_at: int) -> None:
    store = memfeed.open(folder / "data.mf")
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    loader = memfeed.Loader(store, batch_size=BATCH_SIZE, shuffle=True)  # before the processes exist
    fabric.launch()
    model = torch.nn.Linear(8, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    batches = fabric.setup_dataloaders(loader)  # reads for this rank
    state = {"model": model, "epoch": 0, "loader": batches}
    if (folder / "state").exists():
        fabric.load(folder / "state", state)
    for epoch in range(state["epoch"], EPOCHS):
        for step, (images, rows) in enumerate(batches):
            with (folder / f"seen{fabric.global_rank}.txt").open("a") as file:
                print(epoch, *rows.tolist(), file=file)
            optimizer.zero_grad()
            fabric.backward(model(images).square().mean())
            optimizer.step()
            if epoch == 1 and step == kill_at:
                state["epoch"] = epoch
                fabric.save(folder / "state", state)
                fabric.barrier()
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__" and len(sys.argv) > 1:
    train(Path(sys.argv[1]), int(sys.argv[2]))
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        memfeed.cache((torch.randn(ROWS, 8), torch.arange(ROWS)), Path(folder) / "data.mf", progress=False)
        for kill_at in "2", "-1":
            subprocess.run([sys.executable, __file__, folder, kill_at], check=kill_at == "-1")
        lines = [line.split() for rank in (0, 1) for line in (Path(folder) / f"seen{rank}.txt").open()]
    for epoch in range(EPOCHS):
        rows = sorted(int(row) for number, *rows in lines if int(number) == epoch for row in rows)
        assert rows == list(range(ROWS)), f"epoch {epoch} lost or doubled rows: {len(rows)} of {ROWS}"
