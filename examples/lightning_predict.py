"""Lightning's `overfit_batches` and `predict`, with a prediction writer that asks which rows a batch has."""

import tempfile
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import BasePredictionWriter

import memfeed

ROWS, BATCH_SIZE = 50, 8


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.seen = []

    def training_step(self, batch, batch_index):
        self.seen += batch[1].tolist()
        return self.layer(batch[0]).square().mean()

    def predict_step(self, batch, batch_index):
        return batch[1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Writer(BasePredictionWriter):
    def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
        self.predicted, self.named = torch.cat(predictions).tolist(), sum(batch_indices[0], [])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store = memfeed.cache((torch.randn(ROWS, 8), torch.arange(ROWS)), Path(folder) / "data.mf", progress=False)
        quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}

        model = Model()
        trainer = lightning.Trainer(max_epochs=2, overfit_batches=2, **quiet)
        trainer.fit(model, memfeed.Loader(store, batch_size=BATCH_SIZE, shuffle=True))
        assert model.seen == list(range(2 * BATCH_SIZE)) * 2, "overfit_batches did not turn shuffling off"

        writer = Writer("epoch")
        trainer = lightning.Trainer(callbacks=[writer], **quiet)
        trainer.predict(model, memfeed.Loader(store, batch_size=BATCH_SIZE))
        assert writer.predicted == list(range(ROWS)), "predict lost or doubled rows"
        assert writer.named == writer.predicted, "the writer was given other rows than the batches have"
