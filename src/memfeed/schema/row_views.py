"""Rows of a column of one shape that are not copied yet: what a transform reads its pixels from."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memfeed.schema.codec import Int64Array


class RowViews:
    """A field [k, *shape] of a batch, as rows of a store's map. To optree it is a leaf, as a tensor is.

    Nobody may write to the rows or hand them on.

    Args:
        data: the column, [n, *shape].
        rows: the numbers of the rows in it, [k].
        own: returns the field in memory of its own, [k, *shape].
    """

    is_nested = requires_grad = False

    def __init__(self, data: torch.Tensor, rows: Int64Array, own: Callable[[], torch.Tensor]) -> None:
        self.data, self.rows, self.owned = data, rows, own
        self.shape, self.dtype, self.ndim = torch.Size((len(rows), *data.shape[1:])), data.dtype, data.ndim

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: slice) -> list[torch.Tensor]:
        """Return a view of each of these rows, [*shape]."""
        return [self.data[row] for row in self.rows[which].tolist()]
