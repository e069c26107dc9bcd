"""The verdict as a picture: bars of the loops, and of the steps of a sample. Needs the extra [plots]."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from memfeed.system.extras import require
from memfeed.system.units import format_short
from memfeed.verdict.report import PARTS, seconds_of

COLOURS = ("#d1495b", "#8a6fc9", "#3d7ea6")
INK, PALE_INK = "#1c2230", "#5b647a"
_STYLE = {"font.size": 11, "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.titlelocation": "left"}


def save_picture(verdict: Any, path: Path) -> None:
    """Draw a `Verdict` to a PNG file. Needs no display, and leaves matplotlib's settings as they were."""
    require("plots", "matplotlib")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11, 5.4), dpi=120, facecolor="white")
        canvas = FigureCanvasAgg(figure)
        headline = "\n".join(textwrap.wrap(verdict.headline(), 88, max_lines=3))
        figure.text(0.02, 0.97, headline, size=14, weight="bold", va="top")
        grid = figure.add_gridspec(
            1, 2, width_ratios=(1.4, 1), left=0.17, right=0.97, top=0.72, bottom=0.14, wspace=0.5
        )
        if verdict.loops:
            _draw_loops(figure.add_subplot(grid[0, 0]), verdict)
        if verdict.sample is not None:
            steps = [one for one in verdict.sample.steps if one.share >= 0.01][:6]
            axes = figure.add_subplot(grid[0, 1])
            names = ["\n".join(textwrap.wrap(one.name, 21)) for one in steps]
            _draw_bars(axes, f"A sample: {format_short(verdict.sample.seconds)}", names)
            for height, one in enumerate(steps):
                axes.barh(height, one.seconds, color=COLOURS[2], height=0.6)
                axes.text(one.seconds, height, f" {format_short(one.seconds)}", va="center")
            axes.set_xlim(0, 1.35 * max(one.seconds for one in steps))
        rows = f"{verdict.rows_measured:,} of {verdict.row_count:,} rows; {verdict.machine}"
        figure.text(0.02, 0.03, rows, size=9, color=PALE_INK)
        canvas.print_png(path)


def _draw_loops(axes: Any, verdict: Any) -> None:
    size = verdict.batch_size
    _draw_bars(axes, f"A batch of {size}", [loop.name for loop in verdict.loops])
    for height, loop in enumerate(verdict.loops):
        left = 0.0
        for colour, seconds in zip(COLOURS, seconds_of(loop), strict=True):
            axes.barh(height, size * seconds, left=left, color=colour, height=0.6)
            left += size * seconds
        axes.text(left, height, f" {format_short(left)}", va="center", weight="bold")
    axes.set_xlim(0, 1.2 * max(size * loop.middle("seconds_a_row") for loop in verdict.loops))
    handles = [axes.barh(0, 0, color=colour) for colour in COLOURS]
    labels = [text for _, text in PARTS]
    axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(-0.02, -0.02), ncols=3, frameon=False)


def _draw_bars(axes: Any, title: str, names: list[str]) -> None:
    axes.set_title(title, pad=10, weight="bold")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.set_xticks([])
    for side in axes.spines.values():
        side.set_visible(False)
