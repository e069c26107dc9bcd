"""Accelerate on one process: gradient accumulation over a partial last step, a kill, `load_state`; it needs `seed=`."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

import memfeed

ROWS, BATCH_SIZE, EPOCHS, ACCUMULATE = 93, 8, 2, 5  # 12 batches in an epoch: 5 + 5 + 2


def train(folder: Path, kill: bool) -> None:
    set_seed(4)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = memfeed.Loader(memfeed.open(folder / "data.mf"), batch_size=BATCH_SIZE, shuffle=True, seed=0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    begin, skip = (0, 0) if kill else (1, 7)
    if not kill:
        accelerator.load_state(folder / "state")
    for epoch in range(begin, EPOCHS):
        loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, skip) if skip and epoch == begin else loader
        updates = 0
        for step, (images, rows) in enumerate(batches):
            with (folder / "seen.txt").open("a") as file:
                print(epoch, *rows.tolist(), file=file)
            with accelerator.accumulate(model):
                accelerator.backward(model(images).square().mean())
                updates += accelerator.sync_gradients
                optimizer.step()
                optimizer.zero_grad()
            if kill and epoch == 1 and step == 6:
                accelerator.save_state(folder / "state")
                os.kill(os.getpid(), signal.SIGKILL)
        assert updates == (3 if batches is loader else 2), f"{updates} updates: the last accumulation made no step"


if __name__ == "__main__" and len(sys.argv) > 1:
    train(Path(sys.argv[1]), sys.argv[2] == "kill")
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        memfeed.cache((torch.randn(ROWS, 8), torch.arange(ROWS)), Path(folder) / "data.mf", progress=False)
        for word in "kill", "resume":
            subprocess.run([sys.executable, __file__, folder, word], check=word == "resume")
        lines = [[int(word) for word in line.split()] for line in (Path(folder) / "seen.txt").read_text().splitlines()]
    for epoch in range(EPOCHS):
        rows = sorted(row for number, *rows in lines if number == epoch for row in rows)
        assert rows == list(range(ROWS)), f"epoch {epoch} lost or doubled rows: {len(rows)} of {ROWS}"
