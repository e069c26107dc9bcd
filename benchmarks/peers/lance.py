"""Lance: one data set with a fixed-size binary column, read by lists of row numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import torch

from peers.rows import Batch, Epochs, Rows


def make(rows: Rows, batch_size: int, directory: Path) -> Iterable[Batch]:
    """Epochs of ``dataset.take(ids)``; Lance reads with threads of its own. The shuffle is exact."""
    images, shape = rows.images.numpy(), rows.images.shape[1:]
    size = images[0].nbytes
    column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(size), len(images), [None, pa.py_buffer(images)])
    table = pa.table({"images": column, "labels": rows.labels.numpy()})
    dataset = lance.write_dataset(table, str(directory), mode="overwrite")

    def epoch() -> Iterator[Batch]:
        for ids in torch.randperm(len(rows.labels)).split(batch_size):
            taken = dataset.take(ids.tolist()).combine_chunks()
            chunk = taken["images"].chunk(0)
            pixels = np.frombuffer(chunk.buffers()[1], np.uint8)[chunk.offset * size :][: len(ids) * size]
            labels = torch.from_numpy(taken["labels"].to_numpy().copy())
            yield torch.from_numpy(pixels.copy()).view(-1, *shape), labels

    return Epochs(epoch)
