"""The demo's picture: bars for both epochs, and samples trained on against seconds. Needs the extra [plots]."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memfeed.cli.demo.result import EpochTiming, Result
from memfeed.system.units import format_seconds

DATALOADER, MEMFEED, GRID, INK, PALE_INK = "#8d99ae", "#e4572e", "#d9dee7", "#22283a", "#5b647a"
"""The colours of DataLoader, of memfeed, of grid lines, and of text."""
MOST_EPOCHS = 12
"""A break-even after more epochs than these is not drawn."""
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
Floats = npt.NDArray[np.float64]
Line = tuple[Floats, Floats]
"""Seconds, and samples trained on at each of them."""


def save_chart(result: Result, path: Path) -> None:
    """Draw the result to a PNG file. Needs no display, and leaves matplotlib's settings as they were."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(12, 6.4), dpi=130, facecolor="white")
        canvas = FigureCanvasAgg(figure)
        grid = figure.add_gridspec(
            2, 2, width_ratios=(1, 2.1), left=0.092, right=0.965, top=0.80, bottom=0.11, hspace=0.55, wspace=0.24
        )
        figure.text(0.02, 0.94, f"memfeed trains {result.ratio:.1f} times as fast here", size=19, weight="bold")
        figure.text(0.02, 0.895, result.title, size=11, color=PALE_INK)
        epochs = (result.dataloader, result.memfeed)
        _draw_bars(figure.add_subplot(grid[0, 0]), "Samples per second", [epoch.rate for epoch in epochs], "{:,.0f}")
        waits = figure.add_subplot(grid[1, 0])
        shares = [100 * epoch.wait_share for epoch in epochs]
        _draw_bars(waits, "Share of time waiting for data", shares, "{:.0f}%")
        waits.barh([1, 0], [100, 100], color=GRID, height=0.62, zorder=0)
        waits.set_xlim(0, 122)
        _draw_timeline(figure.add_subplot(grid[:, 1]), result)
        canvas.print_png(path)


def _draw_bars(axes: Any, heading: str, values: list[float], form: str) -> None:
    largest = max(values)
    axes.set_title(heading, pad=10)
    axes.barh([1, 0], values, color=[DATALOADER, MEMFEED], height=0.62)
    for height, value in zip((1, 0), values, strict=True):
        axes.text(value + 0.02 * largest, height, form.format(value), va="center", weight="bold")
    axes.set_xlim(0, largest * 1.22)
    axes.set_yticks([1, 0], ["DataLoader", "memfeed"])
    axes.tick_params(length=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _draw_timeline(axes: Any, result: Result) -> None:
    """Draw the epochs as measured, then dotted as if repeated, until the break-even is visible."""
    slow, fast, start = result.dataloader, result.memfeed, result.cache_seconds
    exact = result.break_even_epochs
    crossing = exact * slow.seconds if exact is not None and exact < MOST_EPOCHS else 0.0
    end = max(2.0 * slow.seconds, 1.4 * (start + fast.seconds), 1.9 * crossing)
    top = 1.12 * max(slow.rate * end, min(fast.rate * (end - start), 2.0 * slow.rate * end))
    axes.set_title("Samples trained on, from the first second", pad=10)
    axes.set(xlim=(0, end), ylim=(0, top), xlabel="seconds", axisbelow=True)
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(length=0, pad=7)
    _draw_conversion(axes, start, end, top)
    lines = [repeated(slow, 0.0, end), repeated(fast, start, end)]
    for name, epoch, line, colour in zip(
        ("DataLoader", "memfeed"), (slow, fast), lines, (DATALOADER, MEMFEED), strict=True
    ):
        seconds, samples = line
        measured = len(epoch.steps)
        axes.plot(seconds[:measured], samples[:measured], color=colour, lw=3, zorder=3, solid_capstyle="round")
        axes.plot(seconds[measured - 1 :], samples[measured - 1 :], color=colour, lw=2, ls=(0, (1, 1.6)), zorder=3)
        y = min(0.94 * top, float(np.interp(0.97 * end, seconds, samples)))
        style = {"ha": "right", "va": "bottom", "color": colour, "weight": "bold", "size": 12.5}
        axes.annotate(name, (np.interp(y, samples, seconds), y), (-12, 0), textcoords="offset points", **style)
    point = last_crossing(lines[0], lines[1], end)
    if point is not None:
        text = f"ahead after {format_seconds(point[0])}\n(break-even: epoch {result.break_even_epoch})"
        _draw_break_even(axes, text, point, (point[0] + 0.07 * end, max(point[1] - 0.2 * top, 0.08 * top)))
    legend = "solid: measured   dotted: the same epoch again"
    axes.text(1.0, -0.13, legend, transform=axes.transAxes, ha="right", color=PALE_INK)


def repeated(epoch: EpochTiming, start: float, end: float) -> Line:
    """Return the line of an epoch that begins at ``start`` seconds and is repeated until ``end``."""
    seconds, samples = np.array(epoch.steps, np.float64).T
    again = np.arange(max(1, int(np.ceil((end - start) / epoch.seconds))))[:, None]
    return (
        np.concatenate([[start], (start + again * epoch.seconds + seconds[None, 1:]).ravel()]),
        np.concatenate([[0.0], (again * epoch.samples + samples[None, 1:]).ravel()]),
    )


def last_crossing(one: Line, other: Line, end: float) -> tuple[float, float] | None:
    """Return the last (seconds, samples) at which ``other`` is not ahead of ``one``; None if that is the end."""
    times = np.linspace(0.0, end, 4001)
    not_ahead = np.flatnonzero(np.interp(times, *other) <= np.interp(times, *one))
    if not len(not_ahead) or not_ahead[-1] == len(times) - 1:
        return None
    seconds = float(times[not_ahead[-1]])
    return seconds, float(np.interp(seconds, *one))


def _draw_conversion(axes: Any, seconds: float, end: float, top: float) -> None:
    """Shade the time of the conversion, and write its name there: upright if the shade is narrow."""
    axes.axvspan(0, seconds, color="#fdf1ed", lw=0, zorder=0.8)
    axes.plot([0, seconds], [0, 0], color=MEMFEED, lw=4, solid_capstyle="butt", clip_on=False, zorder=4)
    is_wide = seconds > 0.26 * end
    text = ("memfeed converts\nonce: " if is_wide else "memfeed converts once: ") + format_seconds(seconds)
    style = {"color": MEMFEED, "ha": "center", "va": "top", "linespacing": 1.4}
    axes.text(seconds / 2, 0.97 * top, text, rotation="horizontal" if is_wide else "vertical", **style)


def _draw_break_even(axes: Any, text: str, point: tuple[float, float], text_at: tuple[float, float]) -> None:
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
