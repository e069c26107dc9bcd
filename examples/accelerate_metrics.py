"""Accelerate on two processes: `gather_for_metrics` gives each row of an uneven evaluation set once, in order."""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator

import memfeed

ROWS, BATCH_SIZE = 21, 4  # 6 batches: 3 for each process, the last one filled up


def evaluate(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    loader = memfeed.Loader(memfeed.open(folder / "data.mf"), batch_size=BATCH_SIZE)
    loader = accelerator.prepare(loader)
    assert len(loader) == 3, f"{len(loader)} batches for each process; expected 3"
    seen = []
    for images, rows in loader:
        assert len(images) == BATCH_SIZE  # even_batches
        seen += accelerator.gather_for_metrics(rows).tolist()
    assert seen == list(range(ROWS)), f"found rows {seen}; expected 0 to {ROWS - 1}, each once"
    accelerator.end_training()


if __name__ == "__main__" and len(sys.argv) > 1:
    evaluate(Path(sys.argv[1]))
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        memfeed.cache((torch.randn(ROWS, 8), torch.arange(ROWS)), Path(folder) / "data.mf", progress=False)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        subprocess.run([*launch, __file__, folder], check=True)
