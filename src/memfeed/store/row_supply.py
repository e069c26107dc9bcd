"""The interface of a supply, which brings the rows of a store that is not complete yet.

Readers ask ahead for rows, and wait for them before they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from memfeed.schema.codec import Int64Array


class FillProgress(NamedTuple):
    """How full a store is.

    Args:
        present: rows that can be read.
        total: rows of the whole store.
        skipped: rows for which the dataset raised, and that will never be read.
    """

    present: int
    total: int
    skipped: int = 0


class ReadRequest:
    """A reader of a store that is not complete, and the fields that it reads, by index; None means all."""

    def __init__(self, fields: Sequence[int] | None = None) -> None:
        self.fields = fields


class RowSupply(Protocol):
    """Brings rows of the base store.

    ``in_caller`` is True if ``wait`` runs the user's dataset in the calling thread. ``keeps_rows`` is True if a row
    that is present stays present; else it stays until its reader waits for others, or is forgotten.
    """

    in_caller: bool
    keeps_rows: bool

    def want(self, reader: ReadRequest, rows: Int64Array) -> None:
        """Ask for rows (int [k]) that ``reader`` will wait for, in this order, after those it asked for before."""

    def forget(self, reader: ReadRequest) -> None:
        """Forget what ``reader`` asked for and has not waited for."""

    def wait(self, reader: ReadRequest, rows: Int64Array) -> npt.NDArray[np.bool_] | None:
        """Wait until no row of ``rows`` is absent. Return which of them can be read, bool [k]; None if all can.

        Raises what the dataset raised for one of them, or what keeps rows from being written.
        """

    def ready(self, reader: ReadRequest, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which rows can be read now, bool [k]; those stay until ``reader`` is forgotten. Waits for nothing."""

    def require_room(self, mixed_rows: int) -> None:
        """Raise StoreError if an order that mixes so many rows needs more room than this supply has for rows."""

    def substitute_row(self) -> int:
        """Return a row that can be read, to take the place of one that cannot."""

    def follow(self, backing: Any) -> None:
        """Let a copy of the store's ``Backing`` read the finished store, as the first one will."""

    def progress(self) -> FillProgress:
        """Return how full the store is."""

    def skipped(self) -> tuple[int, ...]:
        """Return the rows that will never be read, because the dataset raised for them, of those tried so far."""

    def finish(self) -> None:
        """Return once all rows are there and the store is committed. Raises what keeps it from that."""
