"""Reads its rank's part of some epochs in this fresh process, when told to; ``scale.py`` starts one or two.

    python benchmarks/reader.py STORE BATCH_SIZE RANK WORLD_SIZE EPOCHS WHAT

WHAT is "read" for the loader, "copy" for copying the same rows in order into one buffer, the limit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import memfeed


def main() -> None:
    path, what = Path(sys.argv[1]), sys.argv[6]
    batch, rank, world_size, epochs = map(int, sys.argv[2:6])
    torch.set_num_threads(1)  # a process to a core
    store = memfeed.open(path)
    loader = memfeed.Loader(store, batch, shuffle=True, rank=rank, world_size=world_size)
    column, buffer = store.column(0), torch.empty(batch, *store.schema.fields[0].row_shape, dtype=torch.uint8)

    def epoch() -> int:
        if what == "read":
            return sum(images.nbytes for images, _ in loader)
        total = 0
        for first in range(rank * batch, len(store), world_size * batch):
            part = column[first : first + batch]
            total += buffer[: len(part)].copy_(part).nbytes
        return total

    epoch()
    print("ready", flush=True)
    sys.stdin.readline()
    print(sum(epoch() for _ in range(epochs)))


if __name__ == "__main__":
    main()
