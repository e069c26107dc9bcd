"""Train with Lightning on two devices, with a loader made before they are known. Together they see each row once."""

import tempfile
from pathlib import Path

import lightning
import torch
import torch.distributed

import memfeed

ROWS, BATCH_SIZE, EPOCHS = 101, 10, 2  # 6 batches a rank, the last one filled up


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.seen = []

    def training_step(self, batch, batch_index):
        images, rows = batch
        self.seen.append(rows)
        return self.layer(images).square().mean()

    def on_train_epoch_end(self):
        rows = self.all_gather(torch.cat(self.seen))  # [ranks, rows]: fails where ranks differ in length
        self.seen = []
        assert set(rows.flatten().tolist()) == set(range(ROWS)), "rows are missing"
        assert rows.numel() == ROWS + 1, f"{rows.numel()} rows for {ROWS}: each rank read all of them"

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store = memfeed.cache((torch.randn(ROWS, 8), torch.arange(ROWS)), Path(folder) / "data.mf", progress=False)
        loader = memfeed.Loader(store, batch_size=BATCH_SIZE, shuffle=True)
        trainer = lightning.Trainer(
            max_epochs=EPOCHS, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False
        )
        trainer.fit(Model(), loader)
        assert trainer.num_training_batches == 6
        if trainer.is_global_zero:
            print("each row once")
