"""The times that the demo measured, what follows from them, and their table.

The picture has bars of both loaders, and samples trained on against seconds. It needs the extra [plots].
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from rich.table import Table

from memfeed.system.files import write_file
from memfeed.system.messages import format_bytes, format_seconds

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


DATALOADER, MEMFEED, GRID, INK, PALE_INK = "#8d99ae", "#e4572e", "#d9dee7", "#22283a", "#5b647a"
"""The colours of DataLoader, of memfeed, of grid lines, and of text."""
HEIGHTS = (3.15, 2.4, 0.75, 0.0)
_STYLE = {
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
}


def save_chart(result: Result, path: Path) -> None:
    """Draw the result to a PNG file. Needs no display, and leaves matplotlib's settings as they were."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = (result.dataloader, result.memfeed)
    seconds = [format_seconds(run.seconds) for run in runs]
    heading = f"{result.epoch_count} epochs: {seconds[0]} from DataLoader, {seconds[1]} from memfeed"
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(12, 6.4), dpi=130, facecolor="white")
        canvas = FigureCanvasAgg(figure)
        grid = figure.add_gridspec(
            2, 2, width_ratios=(1, 2.1), left=0.135, right=0.965, top=0.80, bottom=0.11, hspace=0.42, wspace=0.26
        )
        figure.text(0.02, 0.94, heading, size=19, weight="bold")
        figure.text(0.02, 0.895, f"{result.title}; measured once", size=11, color=PALE_INK)
        parts = [part for run in runs for part in (run.first, run.later)]
        rates = figure.add_subplot(grid[0, 0])
        _draw_bars(rates, "Samples per second", [part.rate for part in parts], "{:,.0f}")
        waits = figure.add_subplot(grid[1, 0])
        _draw_bars(waits, "Share of time waiting for data", [100 * part.wait_share for part in parts], "{:.0f}%")
        waits.barh(HEIGHTS, [100] * len(HEIGHTS), color=GRID, height=0.62, zorder=0)
        waits.set_xlim(0, 122)
        _draw_timeline(figure.add_subplot(grid[:, 1]), result)
        canvas.print_png(path)


def _draw_bars(axes: Any, heading: str, values: list[float], form: str) -> None:
    """Draw the first and the later epochs of DataLoader, then those of memfeed."""
    largest = max(values)
    axes.set_title(heading, pad=8)
    axes.barh(HEIGHTS, values, color=[DATALOADER, DATALOADER, MEMFEED, MEMFEED], height=0.62)
    for height, value in zip(HEIGHTS, values, strict=True):
        axes.text(value + 0.02 * largest, height, form.format(value), va="center", weight="bold")
    axes.set_xlim(0, largest * 1.25)
    names = [f"{name}, {epochs}" for name in ("DataLoader", "memfeed") for epochs in ("first", "later")]
    axes.set_yticks(HEIGHTS, names)
    axes.tick_params(length=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _draw_timeline(axes: Any, result: Result) -> None:
    """Draw all epochs as measured, and the moment from which on memfeed is ahead."""
    runs = (result.dataloader, result.memfeed)
    end = 1.04 * max(run.seconds for run in runs)
    top = 1.12 * sum(epoch.samples for epoch in result.dataloader.epochs)
    axes.set_title("Samples trained on, from second 0", pad=8)
    axes.set(xlim=(0, end), ylim=(0, top), xlabel="seconds", axisbelow=True)
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(length=0, pad=7)
    _draw_first_epoch(axes, result.memfeed.first.seconds, end, top)
    for name, run, colour in zip(("DataLoader", "memfeed"), runs, (DATALOADER, MEMFEED), strict=True):
        seconds, samples = run.line()
        axes.plot(seconds, samples, color=colour, label=name, lw=3, zorder=3, solid_capstyle="round")
        ends = np.cumsum([epoch.seconds for epoch in run.epochs])
        counts = np.cumsum([epoch.samples for epoch in run.epochs])
        axes.plot(ends, counts, "o", color=colour, ms=7, zorder=4)
    style = {"frameon": False, "labelcolor": "linecolor", "handlelength": 1.2, "columnspacing": 1.2}
    axes.legend(loc="upper left", bbox_to_anchor=(-0.03, -0.06), ncols=2, **style)
    point = result.ahead
    if point is not None:
        text_at = (point[0] + 0.08 * end, max(point[1] - 0.2 * top, 0.07 * top))
        _draw_ahead(axes, f"ahead after {format_seconds(point[0])}", point, text_at)
    axes.text(1.0, -0.13, "dots: the ends of epochs", transform=axes.transAxes, ha="right", color=PALE_INK)


def _draw_first_epoch(axes: Any, seconds: float, end: float, top: float) -> None:
    """Shade the first epoch of memfeed, and write there what it does: upright if the shade is narrow."""
    axes.axvspan(0, seconds, color="#fdf1ed", lw=0, zorder=0.8)
    is_wide = seconds > 0.26 * end
    text = f"memfeed's first epoch{chr(10) if is_wide else ' '}fills the store: {format_seconds(seconds)}"
    style = {"color": MEMFEED, "ha": "center", "va": "top", "linespacing": 1.4}
    axes.text(seconds / 2, 0.97 * top, text, rotation="horizontal" if is_wide else "vertical", **style)


def _draw_ahead(axes: Any, text: str, point: tuple[float, float], text_at: tuple[float, float]) -> None:
    axes.plot(*point, "o", ms=10, mfc="white", mec=INK, mew=2, zorder=5)
    axes.annotate(
        text,
        point,
        text_at,
        arrowprops={"arrowstyle": "-", "color": INK, "shrinkB": 6, "lw": 1},
        bbox={"boxstyle": "square,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85},
        weight="bold",
        linespacing=1.4,
        va="center",
        zorder=4,
    )
