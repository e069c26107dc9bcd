"""A list that is one field of a batch: its rows are tensors of different shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class RaggedList(list[Any]):
    """The rows of one field of a batch. To optree it is a leaf, where a plain list is a container of fields.

    Args:
        rows: one tensor per row of the batch; None for a row without a value.
        own: returns the field as a batch has it, in memory of its own, if `rows` are views of a store's map: then
            nobody may write to them or hand them on. None if they may be kept.
    """

    def __init__(self, rows: Iterable[Any], own: Callable[[], Any] | None = None) -> None:
        super().__init__(rows)
        self.own = own

    def owned(self) -> Any:
        """Return the field as users get it: a plain list of tensors that may be kept."""
        return list(self) if self.own is None else self.own()
