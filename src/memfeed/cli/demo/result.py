"""The times that the demo measured, what follows from them, and their table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from rich.table import Table

from memfeed.system.files import write_file
from memfeed.system.units import format_bytes, format_seconds

FOOTNOTE = (
    "Measured once, on this machine. Both train the same model on the same images, with the same batch size and crops "
    "of 224 x 224. Second 0 is before DataLoader(dataset) and before Loader(dataset, cache=...): the start of the "
    "workers and the look at the pipeline count. In its first epoch memfeed reads the dataset with as many workers as "
    "DataLoader, and fills the store. Without a GPU, training uses half of the cores: with all of them DataLoader is "
    "slower, because its workers need some. All files are in memory before second 0. Data wait is the time until the "
    "next batch is on the device."
)
Floats = npt.NDArray[np.float64]
Line = tuple[Floats, Floats]
"""Seconds, and samples trained on at each of them."""


@dataclass(frozen=True)
class EpochTiming:
    """One epoch: (seconds, samples trained on) after every step, from (0.0, 0), and the seconds without data."""

    steps: tuple[tuple[float, int], ...]
    wait_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole epoch, the start of workers included."""
        return self.steps[-1][0]

    @property
    def samples(self) -> int:
        """Number of samples trained on."""
        return self.steps[-1][1]


@dataclass(frozen=True)
class Run:
    """The epochs of one loader, one after another; the first begins before the loader is made."""

    epochs: tuple[EpochTiming, ...]

    @property
    def seconds(self) -> float:
        """Seconds of all epochs."""
        return sum(epoch.seconds for epoch in self.epochs)

    @property
    def first(self) -> Run:
        """The first epoch alone."""
        return Run(self.epochs[:1])

    @property
    def later(self) -> Run:
        """The epochs after the first."""
        return Run(self.epochs[1:])

    @property
    def rate(self) -> float:
        """Samples per second."""
        return sum(epoch.samples for epoch in self.epochs) / self.seconds

    @property
    def wait_share(self) -> float:
        """Share of the time, 0 to 1, in which training waited for data."""
        return sum(epoch.wait_seconds for epoch in self.epochs) / self.seconds

    def line(self) -> Line:
        """Return the samples trained on over the seconds, from second 0."""
        seconds, samples, begin, before = [0.0], [0.0], 0.0, 0
        for epoch in self.epochs:
            seconds += [begin + at for at, _ in epoch.steps[1:]]
            samples += [before + count for _, count in epoch.steps[1:]]
            begin, before = begin + epoch.seconds, before + epoch.samples
        return np.array(seconds), np.array(samples)


@dataclass(frozen=True)
class Result:
    """The epochs of both loaders, and the machine."""

    dataloader: Run
    memfeed: Run
    store_bytes: int
    image_bytes: int
    batch_size: int
    workers: int
    machine: str

    @property
    def epoch_count(self) -> int:
        """How many epochs each loader gave."""
        return len(self.memfeed.epochs)

    @property
    def ahead(self) -> tuple[float, float] | None:
        """The (seconds, samples) from which on memfeed is ahead; None if it is not when it has given all epochs."""
        return last_crossing(self.dataloader.line(), self.memfeed.line(), self.memfeed.seconds)

    @property
    def title(self) -> str:
        """The number of images and epochs, the settings and the machine, in one line."""
        workers = f"{self.workers} workers" if self.workers != 1 else "1 worker"
        images = self.dataloader.epochs[0].samples
        return f"{images:,} images, {self.epoch_count} epochs, batches of {self.batch_size}, {workers}, {self.machine}"

    def table(self) -> Table:
        """Return both loaders side by side."""
        table = Table("time", title=self.title, title_justify="left", title_style="bold")
        for column in ("DataLoader", "memfeed", "ratio"):
            table.add_column(column, justify="right")
        parts = [
            ("first epoch; memfeed fills the store", self.dataloader.first, self.memfeed.first, 1),
            ("each later epoch", self.dataloader.later, self.memfeed.later, self.epoch_count - 1),
            (f"all {self.epoch_count} epochs", self.dataloader, self.memfeed, 1),
        ]
        for name, one, other, epochs in parts:
            seconds = [format_seconds(run.seconds / epochs) for run in (one, other)]
            table.add_row(name, *seconds, f"[bold]{one.seconds / other.seconds:.1f}x[/]")
        table.add_section()
        for name, one, other, _ in parts[:2]:
            shares = [f"{run.wait_share:.0%}" for run in (one, other)]
            table.add_row(f"data wait, {name.partition(';')[0]}", *shares, "")
        ahead = self.ahead
        when = f"not in {self.epoch_count} epochs" if ahead is None else f"after {format_seconds(ahead[0])}"
        table.add_row("memfeed is ahead", "", when, "")
        table.add_row("bytes: files, store", format_bytes(self.image_bytes), format_bytes(self.store_bytes), "")
        return table

    def save(self, path: Path) -> None:
        """Write what was measured to a JSON file."""
        write_file(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def load_result(path: Path) -> Result:
    """Return what `Result.save` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Result)


def last_crossing(one: Line, other: Line, end: float) -> tuple[float, float] | None:
    """Return the last (seconds, samples) at which ``other`` is not ahead of ``one``; None if that is the end."""
    times = np.linspace(0.0, end, 4001)
    not_ahead = np.flatnonzero(np.interp(times, *other) <= np.interp(times, *one))
    if not len(not_ahead) or not_ahead[-1] == len(times) - 1:
        return None
    seconds = float(times[not_ahead[-1]])
    return seconds, float(np.interp(seconds, *one))
