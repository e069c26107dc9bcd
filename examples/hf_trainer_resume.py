"""Train with the Trainer of transformers, kill it in the middle of an epoch, resume from the checkpoint."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

import memfeed

ROWS, BATCH_SIZE, EPOCHS = 96, 8, 2  # 12 batches in an epoch


class Model(torch.nn.Module):
    def __init__(self, folder: Path, kill_at: int) -> None:
        super().__init__()
        self.layer, self.folder, self.kill_at, self.step = torch.nn.Linear(8, 1), folder, kill_at, 0

    def forward(self, images, rows):
        with (self.folder / "seen.txt").open("a") as file:
            print(*rows.tolist(), file=file)
        if self.step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.step += 1
        return {"loss": self.layer(images).square().mean()}


class MemfeedTrainer(Trainer):
    def get_train_dataloader(self):
        return self.accelerator.prepare(memfeed.Loader(self.train_dataset, self._train_batch_size, shuffle=True))


def train(folder: Path, kill_at: int) -> None:
    options = {"max_steps": -1, "num_train_epochs": EPOCHS, "save_steps": 4, "seed": 3, "report_to": "none"}
    arguments = TrainingArguments(folder / "out", per_device_train_batch_size=BATCH_SIZE, use_cpu=True, **options)
    trainer = MemfeedTrainer(Model(folder, kill_at), arguments, train_dataset=memfeed.open(folder / "data.mf"))
    trainer.train(resume_from_checkpoint=kill_at < 0)


if __name__ == "__main__" and len(sys.argv) > 1:
    train(Path(sys.argv[1]), int(sys.argv[2]))
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        data = {"images": torch.randn(ROWS, 8), "rows": torch.arange(ROWS)}
        memfeed.cache(data, Path(folder) / "data.mf", progress=False)
        for kill_at in "18", "-1":  # killed in step 18, behind the checkpoint of step 16
            subprocess.run([sys.executable, __file__, folder, kill_at], check=kill_at == "-1")
        batches = [[int(row) for row in line.split()] for line in (Path(folder) / "seen.txt").open()]
    assert batches[16:19] == batches[19:22], "the steps after the checkpoint have other rows when they are repeated"
    batches[16:19] = []
    for epoch in batches[:12], batches[12:]:
        assert sorted(sum(epoch, [])) == list(range(ROWS)), "an epoch lost or doubled rows"
    assert batches[:12] != batches[12:], "both epochs have the same order"
