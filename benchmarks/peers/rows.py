"""The rows that every peer gets, the epochs that it returns, and the check of these epochs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Batch = tuple[torch.Tensor, torch.Tensor]


class Rows(NamedTuple):
    """The rows of an epoch."""

    images: torch.Tensor  # uint8 [n, c, h, w]
    labels: torch.Tensor  # int64 [n]


class Epochs:
    """Call ``epoch`` at each iter(), for peers whose own object does not give epochs of (images, labels)."""

    def __init__(self, epoch: Any) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.epoch())


def save_npy(rows: Rows, directory: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Write the rows as two .npy files, for peers without a format of their own, and map them."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, column in rows._asdict().items():
        np.save(directory / f"{name}.npy", column.numpy())
    return (
        np.load(directory / "images.npy", mmap_mode="r"),
        np.load(directory / "labels.npy", mmap_mode="r"),
    )


def check(peer_name: str, rows: Rows, batches: Iterable[Batch]) -> list[int]:
    """Check that ``batches`` hold every row exactly once, unchanged. Return the labels in their order.

    ``rows.labels`` must be arange(n): a label is the number of its row. Each batch is checked before the next one is
    requested, because FFCV's batches are views of buffers that it uses again. Raises AssertionError with the name.
    """
    n = len(rows.labels)
    assert torch.equal(rows.labels, torch.arange(n)), f"{peer_name}: the check needs labels that are arange(n)"
    order: list[int] = []
    for number, (images, labels) in enumerate(batches):
        where = f"{peer_name}, batch {number}"
        assert isinstance(images, torch.Tensor), f"{where}: images are a {type(images)}, expected a tensor"
        assert isinstance(labels, torch.Tensor), f"{where}: labels are a {type(labels)}, expected a tensor"
        assert images.dtype == torch.uint8, f"{where}: images are {images.dtype}, expected uint8"
        assert labels.dtype == torch.int64, f"{where}: labels are {labels.dtype}, expected int64"
        assert labels.ndim == 1, f"{where}: labels are {list(labels.shape)}, expected [k]"
        assert images.device.type == labels.device.type == "cpu", f"{where}: not on the CPU"
        inside = (labels >= 0) & (labels < n)
        assert inside.all(), f"{where}: labels {labels[~inside].tolist()} are of no row"
        assert torch.equal(images, rows.images[labels]), f"{where}: images that do not belong to their labels"
        order += labels.tolist()
    counts = torch.bincount(torch.tensor(order, dtype=torch.int64), minlength=n)
    assert (counts <= 1).all(), f"{peer_name}: rows more than once: {(counts > 1).nonzero()[:8, 0].tolist()}"
    assert (counts > 0).all(), f"{peer_name}: rows missing: {(counts == 0).nonzero()[:8, 0].tolist()}"
    return order
