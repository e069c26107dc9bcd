"""TensorStore: one uncompressed zarr array a column, read by lists of row numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
import torch

from peers.rows import Batch, Epochs, Rows

CHUNK_BYTES = 1 << 18  # a chunk is a file, and is read whole where one row of it is asked for


def make(rows: Rows, batch_size: int, directory: Path) -> Iterable[Batch]:
    """Epochs of ``store[ids].read()``, one batch ahead: its reads are futures. The shuffle is exact.

    The cache of chunks holds all rows, as the page cache does for the other libraries.
    """
    context = ts.Context({"cache_pool": {"total_bytes_limit": 4 << 30}})
    stores = [_store(column.numpy(), directory / name, context) for name, column in rows._asdict().items()]

    def epoch() -> Iterator[Batch]:
        ahead: list[Any] = []
        for ids in torch.randperm(len(rows.labels)).split(batch_size):
            ahead.append([store[ids.numpy()].read() for store in stores])
            if len(ahead) > 1:
                yield _batch(ahead.pop(0))
        yield from map(_batch, ahead)

    return Epochs(epoch)


def _store(values: np.ndarray, path: Path, context: Any) -> Any:
    chunk = [max(1, CHUNK_BYTES // values[0].nbytes), *values.shape[1:]]
    store = ts.open(
        {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": str(path.resolve())},
            "metadata": {"compressor": None, "dtype": values.dtype.str, "shape": values.shape, "chunks": chunk},
            "create": True,
            "delete_existing": True,
            "recheck_cached_data": False,
        },
        context=context,
    ).result()
    store.write(values).result()
    return store


def _batch(reads: list[Any]) -> Batch:
    images, labels = (torch.from_numpy(read.result()) for read in reads)
    return images, labels
