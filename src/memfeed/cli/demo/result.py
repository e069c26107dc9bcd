"""The times that the demo measured, what follows from them, and their table."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.table import Table

from memfeed.system.units import format_bytes, format_seconds

FOOTNOTE = (
    "Both epochs train the same model on the same images, with the same batch size and crops of 224 x 224. Without a "
    "GPU, training uses half of the cores: with all of them DataLoader is slower, because its workers need some. All "
    "files are in memory before the first epoch. The start of DataLoader's workers counts. Data wait is the time until "
    "the next batch is on the device. Break-even is the first epoch at whose end conversion and training together took "
    "less time than DataLoader."
)


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

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds

    @property
    def wait_share(self) -> float:
        """Share of the epoch, 0 to 1, in which training waited for data."""
        return self.wait_seconds / self.seconds


@dataclass(frozen=True)
class Result:
    """Both epochs, the conversion between them, and the machine."""

    dataloader: EpochTiming
    memfeed: EpochTiming
    cache_seconds: float
    store_bytes: int
    image_bytes: int
    batch_size: int
    workers: int
    machine: str

    @property
    def ratio(self) -> float:
        """Samples per second with memfeed, as a multiple of those with DataLoader."""
        return self.memfeed.rate / self.dataloader.rate

    @property
    def break_even_epochs(self) -> float | None:
        """Epochs, with a fraction, after which the conversion has saved its own time. None if it never does."""
        gain = self.dataloader.seconds - self.memfeed.seconds
        return self.cache_seconds / gain if gain > 0 else None

    @property
    def break_even_epoch(self) -> int | None:
        """The first n such that conversion and n epochs with memfeed take less time than n epochs with DataLoader."""
        exact = self.break_even_epochs
        return None if exact is None else math.floor(exact) + 1

    @property
    def title(self) -> str:
        """The number of images, the settings and the machine, in one line."""
        workers = f"{self.workers} workers" if self.workers != 1 else "1 worker"
        return f"{self.dataloader.samples:,} images, batches of {self.batch_size}, {workers}, {self.machine}"

    def table(self) -> Table:
        """Return both epochs side by side."""
        dataloader, memfeed, epoch = self.dataloader, self.memfeed, self.break_even_epoch
        table = Table("one epoch", title=self.title, title_justify="left", title_style="bold")
        for column in ("DataLoader", "memfeed", "ratio"):
            table.add_column(column, justify="right")
        table.add_row("samples/s", f"{dataloader.rate:,.0f}", f"{memfeed.rate:,.0f}", f"[bold]{self.ratio:.1f}x[/]")
        seconds = map(format_seconds, (dataloader.seconds, memfeed.seconds))
        table.add_row("time of the epoch", *seconds, f"{1 / self.ratio:.2f}x")
        table.add_row("data wait, share of the time", f"{dataloader.wait_share:.0%}", f"{memfeed.wait_share:.0%}", "")
        table.add_row("bytes", format_bytes(self.image_bytes), format_bytes(self.store_bytes), "", end_section=True)
        table.add_row("conversion, once", "", format_seconds(self.cache_seconds), "")
        table.add_row("break-even", "", "never" if epoch is None else f"in epoch {epoch:,}", "")
        return table
