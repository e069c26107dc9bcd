"""SPDL: a pipeline of threads. It has no format: the rows are in two mapped .npy files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from spdl.pipeline import PipelineBuilder

from peers.rows import Batch, Rows, save_npy


class _Shuffled:
    """The row numbers of each batch, in another order at each iter()."""

    def __init__(self, n: int, batch_size: int) -> None:
        self.n, self.batch_size = n, batch_size

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randperm(self.n).split(self.batch_size))


class _Epochs:
    def __init__(self, rows: Rows, batch_size: int, directory: Path) -> None:
        images, labels = save_npy(rows, directory)

        def fetch(ids: torch.Tensor) -> Batch:
            # take releases the GIL, which SPDL requires of functions in its threads
            return torch.from_numpy(images.take(ids.numpy(), 0)), torch.from_numpy(labels.take(ids.numpy(), 0))

        builder = PipelineBuilder().add_source(_Shuffled(len(rows.labels), batch_size), continuous=True)
        self._pipeline = builder.pipe(fetch, concurrency=2).add_sink(3).build(num_threads=2)
        self._pipeline.start()

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._pipeline.get_iterator())

    def __del__(self) -> None:
        if hasattr(self, "_pipeline"):
            self._pipeline.stop()


def make(rows: Rows, batch_size: int, directory: Path) -> Iterable[Batch]:
    """Epochs of a continuous ``spdl.pipeline.Pipeline`` of two threads, a batch at a time. The shuffle is exact.

    The source gives whole batches of row numbers, because each item costs about 0.5 ms on its way through the queues;
    and it is continuous, because ``stop`` of a pipeline, else once an epoch, waits 0.1 s (270,000 rows/s at 3 KB
    instead of 740,000). Buffers used again and torch.index_select were no faster; one thread was slower at 3 KB
    (550,000) and faster at 196 KB (49,000 instead of 42,000). The first batches of the next epoch are fetched
    between epochs.
    """
    return _Epochs(rows, batch_size, directory)
