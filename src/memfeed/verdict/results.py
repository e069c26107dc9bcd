"""What was measured of a program: plain data, which JSON keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

TRIMMED_FROM = 8
"""From so many turns on, the lowest and the highest are left out of a spread."""


@dataclass(frozen=True)
class Spread:
    """The median of a few turns, and the interval in which the true median lies.

    It is from the lowest turn to the highest; of 8 turns and more, without the two outermost. The first holds the true
    median with probability 1 - 2 ** (1 - n), which is 94 % for 5 turns; of 8 turns without the outermost it is 93 %.
    """

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = 2 if self.middle < 2 else 1 if self.middle < 10 else 0
        middle, low, high = (f"{one:,.{digits}f}" for one in (self.middle, self.low, self.high))
        return f"{middle} times ({low} to {high})"


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the spread of at least one value."""
    ordered = sorted(values)
    kept = ordered[1:-1] if len(ordered) >= TRIMMED_FROM else ordered
    return Spread(median(ordered), kept[0], kept[-1])


@dataclass(frozen=True)
class Turn:
    """One turn of a loop.

    Args:
        first_seconds: until the first batch of an epoch.
        start_seconds: what an epoch takes beside its rows: the first batch is that much later than others are.
        waiting, transfer, computing: seconds a row, of the batches after the first ones.
        rows: that these were measured with.
    """

    first_seconds: float
    start_seconds: float
    waiting: float
    transfer: float
    computing: float
    rows: int

    @property
    def seconds_a_row(self) -> float:
        """All three together."""
        return max(self.waiting + self.transfer + self.computing, 1e-12)

    def epoch_seconds(self, row_count: int) -> float:
        """Return what an epoch of so many rows takes, its start included."""
        rows_seconds = row_count * self.seconds_a_row
        return max(rows_seconds + self.start_seconds, 0.5 * rows_seconds)


@dataclass(frozen=True)
class Loop:
    """A loop in words, and its turns. Turn i of all loops of a program were measured one after another."""

    name: str
    turns: tuple[Turn, ...]

    def middle(self, part: str) -> float:
        """Return the median of a part of `Turn`."""
        return median(float(getattr(turn, part)) for turn in self.turns)

    def epoch_seconds(self, row_count: int) -> float:
        """Return the median of what an epoch of so many rows takes, its start included."""
        return median(turn.epoch_seconds(row_count) for turn in self.turns)


def times_as_fast(fast: Loop, slow: Loop, row_count: int) -> Spread:
    """Return how many times as fast an epoch of ``fast`` is: turn by turn, so that what slows down both cancels out."""
    pairs = zip(slow.turns, fast.turns, strict=True)
    return spread([one.epoch_seconds(row_count) / other.epoch_seconds(row_count) for one, other in pairs])


@dataclass(frozen=True)
class Step:
    """The time of one step of a sample: reading files, decoding, a transform by the name of its class."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True)
class SampleCost:
    """The cost of a sample in one process.

    Args:
        seconds: the mean.
        median_seconds: of a sample.
        slowest_seconds: the mean of the slowest 1 %, of at least one sample.
        slowest_rows: the numbers of some of them.
        file_bytes: the mean bytes of the files that a sample opens, as far as Python opens them.
        samples: how many were read.
        steps: the largest first.
    """

    seconds: float
    median_seconds: float
    slowest_seconds: float
    slowest_rows: tuple[int, ...]
    file_bytes: float
    samples: int
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Form:
    """A form that a store may have.

    Args:
        name: how to ask for it.
        row_bytes: of a row on disk.
        rows_a_second: that a loader reads from the page cache, for one second of CPU time.
        total_bytes: of all rows.
        cores: that the step keeps busy with reading; None without a step.
        break_even: the first epoch after which it has saved time; None if no epoch does, or without a measured epoch.
    """

    name: str
    row_bytes: float
    rows_a_second: float
    total_bytes: float
    cores: float | None = None
    break_even: int | None = None
