"""The measurements of a program, plain data that JSON keeps, and the judgement: whether a store helps.

It comes from measured turns and their spread alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from statistics import median
from typing import Literal, NamedTuple

from memfeed.system.messages import format_bytes, format_short

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


# --- the judgement

Kind = Literal["helps", "does not help", "cannot tell"]
LEAST_TURNS = 5
LEAST_GAIN = 1.1
"""It helps if the whole spread is above this."""
NO_GAIN = 1.2
"""It does not help if the whole spread is below this."""


@dataclass(frozen=True)
class Measured:
    """The measurements that a verdict is drawn from.

    Args:
        today: the loader as it is.
        best: the same with the best number of workers; None if that is today's.
        repeated: one batch again and again; None without a step.
        memfeed: of a store that is finished; None if there can be none.
        refused: why there is none.
        row_count: of an epoch.
        batch_size: rows of a batch.
        epochs: how often the data is read; None if that is not known.
        fill_seconds: what the first epoch takes, in which the store is filled; 0 if nothing is stored.
        store_bytes, free_bytes: of all rows, and of the disk; None if the disk does not tell.
    """

    today: Loop
    best: Loop | None
    repeated: Loop | None
    memfeed: Loop | None
    refused: str
    row_count: int
    batch_size: int
    epochs: int | None
    fill_seconds: float
    store_bytes: float
    free_bytes: int | None

    @property
    def rival(self) -> Loop:
        """The loop of torch's loader at its best."""
        return self.best or self.today


class Judgement(NamedTuple):
    """The verdict, its reason, what helps instead, and the first epoch after which a store has saved time."""

    kind: Kind
    because: str
    instead: str
    break_even: int | None = None


def break_even(fill_seconds: float, epoch_seconds: float, rival_seconds: float) -> int | None:
    """Return the first epoch at whose end less time has passed than without a store; None if there is none.

    The first epoch fills the store, so it is never before the second one, except where nothing is stored.
    """
    if epoch_seconds >= rival_seconds:
        return None
    if not fill_seconds:
        return 1
    return max(2, floor((fill_seconds - epoch_seconds) / (rival_seconds - epoch_seconds)) + 1)


def judge(found: Measured) -> Judgement:
    """Return the judgement on measured loops."""
    turns, rows = len(found.today.turns), found.row_count
    epoch = None
    if found.memfeed is not None:
        times = found.memfeed.epoch_seconds(rows), found.rival.epoch_seconds(rows)
        epoch = break_even(found.fill_seconds, *times)
        if found.epochs == 1 and found.fill_seconds:  # whatever the spread is: the only epoch fills the store
            return _read_too_seldom(found, epoch)
    if turns < LEAST_TURNS:
        return Judgement("cannot tell", f"only {turns} turns were measured in the time", "pass more seconds=")
    limit = ceiling(found)
    if limit is not None and limit.high <= NO_GAIN:
        return _limited(found, limit)
    if found.memfeed is None:
        return Judgement("does not help", f"no store can be made: {found.refused}", _more_workers(found))
    gain = times_as_fast(found.memfeed, found.rival, found.row_count)
    # if nothing is waited for; one turn gives both numbers, so noise cancels out
    without_waiting = spread(
        [turn.seconds_a_row / max(turn.seconds_a_row - turn.waiting, 1e-12) for turn in found.rival.turns]
    )
    if limit is not None and without_waiting.high <= NO_GAIN and gain.middle <= NO_GAIN:
        return _limited(found, without_waiting)
    if gain.high <= NO_GAIN:
        most = "" if limit is None else f" (any loader: at most {limit.middle:.2g})"
        why = f"rows come from a store no faster than from the dataset: {gain} as fast{most}"
        return Judgement("does not help", why, _more_workers(found))
    if gain.low < LEAST_GAIN or epoch is None:
        why = f"the spread of {turns} turns is too wide: {gain} as fast"
        return Judgement("cannot tell", why, "measure on a machine that does nothing else, or pass more seconds=")
    if found.free_bytes is not None and found.store_bytes > found.free_bytes:
        why = f"a store takes {format_bytes(found.store_bytes)}, and {format_bytes(found.free_bytes)} are free"
        return Judgement("does not help", why, "a smaller form of the price list, or another disk (--out)")
    if found.epochs is not None and epoch > found.epochs:
        return _read_too_seldom(found, epoch)
    if found.repeated is None:
        batch = found.rival.middle("seconds_a_row") * found.batch_size
        why = f"no step was measured: loading alone is {gain} as fast, which counts where a step takes less than "
        return Judgement(
            "cannot tell", f"{why}{format_short(batch)} a batch", "pass step=, a function of a batch", epoch
        )
    return Judgement("helps", "", "", epoch)


def ceiling(found: Measured) -> Spread | None:
    """Return how many times as fast as torch's loader at its best any loader can be; None without a step."""
    return None if found.repeated is None else times_as_fast(found.repeated, found.rival, found.row_count)


def _limited(found: Measured, limit: Spread) -> Judgement:
    computing = found.rival.middle("computing") / found.rival.middle("seconds_a_row")
    if found.best is not None and times_as_fast(found.best, found.today, found.row_count).low >= LEAST_GAIN:
        gain = times_as_fast(found.best, found.today, found.row_count)
        why = f"more workers are enough, {found.best.name}: no loader can be more than {limit} as fast as that"
        return Judgement("does not help", why, f"{found.best.name}: {gain} as fast as today")
    why = f"the step computes for {computing:.0%} of the time: no loader can be more than {limit} as fast"
    return Judgement("does not help", why, "a faster step: mixed precision, torch.compile, a smaller model")


def _read_too_seldom(found: Measured, epoch: int | None) -> Judgement:
    read = "once" if found.epochs == 1 else f"{found.epochs} times"
    pays = "the first epoch only fills a store" if epoch is None else f"a store has saved time from epoch {epoch} on"
    why = f"the data is read {read}, and {pays}"
    return Judgement(
        "does not help", why, f"{_more_workers(found)}; for data that is read once, a streaming format", epoch
    )


def _more_workers(found: Measured) -> str:
    if found.best is None:
        return "more cores for workers, or a faster dataset: see what a sample costs"
    return f"{found.best.name}: {times_as_fast(found.best, found.today, found.row_count)} as fast as today"
