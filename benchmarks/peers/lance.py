"""Lance: one data set with a fixed-size binary column, read by lists of row numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import torch

from peers.rows import Batch, Epochs, Rows


def make(rows: Rows, batch_size: int, directory: Path) -> Iterable[Batch]:
    """Epochs of ``dataset.take(ids)``; Lance reads with threads of its own. The shuffle is exact."""
    write(rows, directory)
    return read(str(directory), directory, rows.images.shape, batch_size)


def write(rows: Rows, directory: Path) -> None:
    """Write the data set."""
    images = rows.images.numpy()
    column = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(images[0].nbytes), len(images), [None, pa.py_buffer(images)]
    )
    table = pa.table({"images": column, "labels": rows.labels.numpy()})
    lance.write_dataset(table, str(directory), mode="overwrite")


def read(address: str, cache: Path, shape: Sequence[int], batch_size: int) -> Iterable[Batch]:
    """Epochs as of ``make`` of the data set at a path or an address; images are of ``shape``, [n, c, h, w].

    Lance has no cache on the local disk: each epoch asks the address for each batch, for its rows at once.
    """
    dataset, size = lance.dataset(address), math.prod(shape[1:])

    def epoch() -> Iterator[Batch]:
        for ids in torch.randperm(shape[0]).split(batch_size):
            taken = dataset.take(ids.tolist()).combine_chunks()
            chunk = taken["images"].chunk(0)
            pixels = np.frombuffer(chunk.buffers()[1], np.uint8)[chunk.offset * size :][: len(ids) * size]
            labels = torch.from_numpy(taken["labels"].to_numpy().copy())
            yield torch.from_numpy(pixels.copy()).view(-1, *shape[1:]), labels

    return Epochs(epoch)
