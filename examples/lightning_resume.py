"""Lightning, killed in the middle of an epoch and behind the end of one, then resumed: no row is lost or doubled."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import memfeed

ROWS, BATCH_SIZE, EPOCHS = 190, 16, 4  # 12 batches in an epoch, the last one smaller


class Model(lightning.LightningModule):
    def __init__(self, folder: Path, kill_at: int) -> None:
        super().__init__()
        self.layer, self.folder, self.kill_at = torch.nn.Linear(8, 1), folder, kill_at

    def training_step(self, batch, batch_index):
        images, rows = batch
        with (self.folder / "seen.txt").open("a") as file:
            print(self.current_epoch, batch_index, *rows.tolist(), file=file)
        if self.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(images).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(folder: Path, kill_at: int, every: dict[str, int]) -> None:
    lightning.seed_everything(1)
    path, data = folder / "data.mf", (torch.randn(ROWS, 8), torch.arange(ROWS))
    store = memfeed.open(path) if path.exists() else memfeed.cache(data, path, progress=False)
    loader = memfeed.Loader(store, batch_size=BATCH_SIZE, shuffle=True)
    saves = ModelCheckpoint(folder, filename="newest", enable_version_counter=False, **every)
    trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[saves], logger=False)
    newest = folder / "newest.ckpt"
    trainer.fit(Model(folder, kill_at), loader, ckpt_path=newest if newest.exists() else None)


if __name__ == "__main__" and len(sys.argv) > 1:
    train(Path(sys.argv[1]), int(sys.argv[2]), {sys.argv[3]: int(sys.argv[4])})
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        steps, epochs = ["every_n_train_steps", "4"], ["every_n_epochs", "1"]
        for kill_at, every in ("6", steps), ("13", epochs), ("25", epochs), ("-1", steps):
            subprocess.run([sys.executable, __file__, folder, kill_at, *every], check=kill_at == "-1")
            assert (Path(folder) / "newest.ckpt").exists()
        lines = [[int(word) for word in line.split()] for line in (Path(folder) / "seen.txt").open()]
    seen = {(epoch, step): rows for epoch, step, *rows in lines}
    assert all(seen[epoch, step] == rows for epoch, step, *rows in lines), "a repeated batch has other rows"
    orders = [sum((seen[epoch, step] for step in range(12)), []) for epoch in range(EPOCHS)]
    assert all(sorted(order) == list(range(ROWS)) for order in orders), "an epoch lost or doubled rows"
    assert len(set(map(tuple, orders))) == EPOCHS, "two epochs have the same order"
