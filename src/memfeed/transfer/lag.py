"""A bound on how far the device is behind the caller: without one, each step may take new memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from memfeed.transfer.streams import Event


class Lag:
    """Keeps the device at most ``batches`` batches behind the one that is made next.

    A batch that the caller has dropped keeps its memory until the device has used it. A caller who queues work faster
    than the device does it would take the memory of one more batch with each step.

    Args:
        record_use: returns an event on the caller's current stream.
        batches: how many.
    """

    def __init__(self, record_use: Callable[[], Event], batches: int) -> None:
        self._record_use, self._batches = record_use, batches
        self._begun = 0
        self._taken: deque[tuple[int, Event]] = deque()

    def begin(self) -> int:
        """Wait until the device is near enough to make one more batch; return its number, for ``take``."""
        number = self._begun
        self._begun += 1
        while self._taken and self._taken[0][0] <= number - self._batches:
            self._taken.popleft()[1].synchronize()
        return number

    def take(self, number: int) -> None:
        """Note that the caller takes this batch now: when the device gets here, it has used all batches before."""
        self._taken.append((number, self._record_use()))
