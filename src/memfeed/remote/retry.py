"""How often a request is tried again, and how long to wait before."""

from __future__ import annotations

import random
from dataclasses import dataclass

_random = random.Random()  # not the global generator, which is the user's


@dataclass(frozen=True)
class Retry:
    """Exponential backoff with jitter. Times in seconds.

    Before attempt k + 1 it waits ``first_wait_seconds * 2 ** (k - 1)``, at most ``longest_wait_seconds``, of which half
    is random: many ranks that were refused at the same moment do not come back at the same moment.
    ``stall_seconds`` is how long a server may send nothing before the attempt has failed.
    """

    attempts: int = 8
    first_wait_seconds: float = 0.2
    longest_wait_seconds: float = 8.0
    stall_seconds: float = 30.0

    def wait_seconds(self, failures: int) -> float:
        """Return how long to wait after so many failures."""
        longest = min(self.first_wait_seconds * 2.0 ** (failures - 1), self.longest_wait_seconds)
        return longest * (0.5 + 0.5 * _random.random())


DEFAULT = Retry()
