"""FFCV: a .beton file, decoded by code that numba compiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from ffcv.fields import IntField, NDArrayField
from ffcv.fields.decoders import IntDecoder
from ffcv.fields.ndarray import NDArrayDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import ToTensor
from ffcv.writer import DatasetWriter

from peers.rows import Batch, Epochs, Rows


class _Samples:
    def __init__(self, rows: Rows) -> None:
        self.images, self.labels = rows.images.numpy(), rows.labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return self.images[i], self.labels[i]


def make(rows: Rows, batch_size: int, directory: Path) -> Iterable[Batch]:
    """Epochs of ``ffcv.Loader``: NDArrayField and IntField, os_cache, OrderOption.RANDOM. The shuffle is exact.

    RANDOM rather than QUASI_RANDOM, which the performance guide keeps for data larger than memory. Two threads, as
    many as the machine has cores; one was no faster (1.28 to 1.30 million rows/s at 3 KB, 30,000 to 31,000 at 196 KB).
    A batch is a view of one of five buffers, overwritten some batches later. FFCV compiles at the first epoch, and
    sets torch's thread count.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = str(directory / "rows.beton")
    fields = {"images": NDArrayField(np.dtype("u1"), tuple(rows.images.shape[1:])), "labels": IntField()}
    DatasetWriter(path, fields, num_workers=1).from_indexed_dataset(_Samples(rows))
    loader = Loader(
        path,
        batch_size,
        num_workers=2,
        os_cache=True,
        order=OrderOption.RANDOM,
        drop_last=False,
        pipelines={"images": [NDArrayDecoder(), ToTensor()], "labels": [IntDecoder(), ToTensor()]},
    )

    def epoch() -> Iterator[Batch]:
        for images, labels in loader:
            yield images, labels[:, 0]  # IntDecoder gives [k, 1]

    return Epochs(epoch)
