"""Read the rows of one rank for some epochs, in this new process, on request. ``scale.py`` starts three.

    python benchmarks/reader.py STORE BATCH_SIZE RANK WORLD_SIZE

A request on stdin is "read EPOCHS" (with the loader) or "copy EPOCHS" (the same rows in order into one buffer, which is
the limit). The answer is the number of bytes read.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import memfeed


def main() -> None:
    path, (batch, rank, world_size) = Path(sys.argv[1]), map(int, sys.argv[2:5])
    torch.set_num_threads(1)  # one process per core
    store = memfeed.open(path)
    loader = memfeed.Loader(store, batch, shuffle=True, ranks=(rank, world_size))
    column, buffer = store.column(0), torch.empty(batch, *store.schema.fields[0].row_shape, dtype=torch.uint8)

    def read() -> int:
        return sum(images.nbytes for images, _ in loader)

    def copy() -> int:
        total = 0
        for first in range(rank * batch, len(store), world_size * batch):
            part = column[first : first + batch]
            total += buffer[: len(part)].copy_(part).nbytes
        return total

    works = {"read": read, "copy": copy}
    for work in works.values():
        work()
    print("ready", flush=True)
    for line in sys.stdin:
        what, epochs = line.split()
        print(sum(works[what]() for _ in range(int(epochs))), flush=True)


if __name__ == "__main__":
    main()
