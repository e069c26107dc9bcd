"""How the epochs of a loader with ``placement="sharded"`` are cut into pieces: for the ranks that began them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memfeed.errors import LoaderError
from memfeed.order.pieces import RankCut


@dataclass
class Cuts:
    """The cut of the current epoch. It stays the same until the end, also if other ranks continue the epoch.

    Args:
        batch_size: rows of a batch of one rank, for epochs that begin.
    """

    batch_size: int
    _held: tuple[int, RankCut] | None = field(default=None, repr=False)

    def begin(self, epoch: int, row: int, world_size: int) -> RankCut:
        """Return the cut of an epoch that begins at ``row``: the one it was begun with, else one for these ranks."""
        if self._held is None or self._held[0] != epoch or not row:
            self._held = epoch, RankCut(world_size, self.batch_size)
        return self._held[1]

    def of(self, epoch: int, world_size: int) -> RankCut:
        """Return the cut of an epoch that was begun."""
        return self.begin(epoch, 1, world_size)

    def state(self, epoch: int, row: int) -> str:
        """Return the cut as a saved state keeps it; empty where an epoch is not begun."""
        if not row or self._held is None or self._held[0] != epoch:
            return ""
        return f"{self._held[1].pieces}x{self._held[1].batch_size}"

    def load(self, epoch: int, saved: Any) -> None:
        """Continue an epoch with a saved cut. Raises LoaderError for a value that is no cut."""
        if saved == "":
            self._held = None
            return
        numbers = saved.split("x") if isinstance(saved, str) else []
        if len(numbers) != 2 or not all(one.isdecimal() and int(one) for one in numbers):
            raise LoaderError(f"found a state with pieces {saved!r}; expected those that state_dict() gave")
        self._held = epoch, RankCut(int(numbers[0]), int(numbers[1]))
