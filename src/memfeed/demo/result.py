"""What a race measured, and what follows from it. Plain arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Lap:
    """One epoch: at how many seconds how many samples had been trained on, and how long training waited for data.

    ``marks`` are (seconds, samples) after every step, both counted from the start of the epoch.
    """

    marks: tuple[tuple[float, int], ...]
    wait_seconds: float

    @property
    def seconds(self) -> float:
        """The whole epoch, workers' start included."""
        return self.marks[-1][0]

    @property
    def samples(self) -> int:
        """How many it trained on."""
        return self.marks[-1][1]

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds

    @property
    def wait_share(self) -> float:
        """The part of the epoch, 0 to 1, in which training waited for data."""
        return self.wait_seconds / self.seconds


@dataclass(frozen=True)
class Result:
    """Both laps, the conversion between them, and where they were run."""

    dataloader: Lap
    memfeed: Lap
    cache_seconds: float
    store_bytes: int
    image_bytes: int
    batch_size: int
    workers: int
    machine: str

    @property
    def ratio(self) -> float:
        """How many times as many samples per second memfeed trained on."""
        return self.memfeed.rate / self.dataloader.rate

    @property
    def break_even_epochs(self) -> float | None:
        """After how many epochs the conversion has paid for itself, exactly; None: never."""
        gain = self.dataloader.seconds - self.memfeed.seconds
        return self.cache_seconds / gain if gain > 0 else None

    @property
    def break_even_epoch(self) -> int | None:
        """The first n for which converting and n epochs from memfeed beat n epochs from DataLoader; None: never."""
        exact = self.break_even_epochs
        return None if exact is None else math.floor(exact) + 1
