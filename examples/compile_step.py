"""A compiled training step is compiled once: every batch has one shape, dtype and layout."""

import tempfile
from pathlib import Path

import torch
from torch._dynamo.testing import CompileCounter

import memfeed

ROWS, BATCH_SIZE = 200, 16

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store = memfeed.cache((torch.randn(ROWS, 8), torch.arange(ROWS)), Path(folder) / "data.mf", progress=False)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        counter = CompileCounter()

        @torch.compile(backend=counter)
        def loss_of(images, is_valid):
            return (model(images).square().squeeze(1) * is_valid).sum() / is_valid.sum()

        loader = memfeed.Loader(store, batch_size=BATCH_SIZE, shuffle=True, last="pad")
        for _ in range(2):
            seen = []
            for (images, rows), is_valid in loader:
                loss_of(images, is_valid).backward()
                seen += rows[is_valid].tolist()
            assert sorted(seen) == list(range(ROWS)), "an epoch lost or doubled rows"
        assert counter.frame_count == 1, f"compiled {counter.frame_count} times; expected once"
