"""Copy rows of a tensor into the memory of a batch: many bytes on several threads."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memfeed.system.share import share

PART_BYTES = 128 * 1024  # a part of a batch that a thread takes is at least this large


def select_rows(data: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Copy the rows ``index`` (int [k]) of ``data`` into ``out``, [k, *shape] and contiguous, and return it."""
    size, count = out.nbytes, len(index)
    if size < 2 * PART_BYTES or count < 2:
        return torch.index_select(data, 0, index, out=out)

    def select(begin: int, end: int) -> None:
        torch.index_select(data, 0, index[begin:end], out=out[begin:end])

    _share(select, count, size)
    return out


def copy_run(data: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Copy ``data``, consecutive rows, into ``out``, of the same shape, and return it."""
    size, count = out.nbytes, len(out)
    if size < 2 * PART_BYTES or count < 2:
        return out.copy_(data)

    def copy(begin: int, end: int) -> None:
        out[begin:end].copy_(data[begin:end])

    _share(copy, count, size)
    return out


def _share(copy: Callable[[int, int], object], count: int, size: int) -> None:
    least = -(-PART_BYTES * count // size)
    share(count, copy, least=least, kind="gather", work=size, by_torch=True)
