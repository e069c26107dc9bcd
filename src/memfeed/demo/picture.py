"""The race as a picture: bars for both, and the timeline beside them. Needs the extra [plots]."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memfeed.demo.result import Result
from memfeed.demo.table import title
from memfeed.demo.timeline import FAINT, FED, INK, PALE_INK, PLAIN, draw_timeline

_STYLE = {
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
}


def save_picture(result: Result, path: Path) -> None:
    """Draws into a PNG file. Uses neither pyplot nor a display, and leaves matplotlib's settings as they were."""
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
        figure.text(0.02, 0.895, title(result), size=11, color=PALE_INK)
        plain, fed = result.dataloader, result.memfeed
        _bars(figure.add_subplot(grid[0, 0]), "Samples per second", plain.rate, fed.rate, "{:,.0f}")
        waits = figure.add_subplot(grid[1, 0])
        _bars(waits, "Share of time waiting for data", 100 * plain.wait_share, 100 * fed.wait_share, "{:.0f}%")
        waits.barh([1, 0], [100, 100], color=FAINT, height=0.62, zorder=0)
        waits.set_xlim(0, 122)
        draw_timeline(figure.add_subplot(grid[:, 1]), result)
        canvas.print_png(path)


def _bars(axes: Any, heading: str, plain: float, fed: float, form: str) -> None:
    axes.set_title(heading, pad=10)
    axes.barh([1, 0], [plain, fed], color=[PLAIN, FED], height=0.62)
    largest = max(plain, fed)
    for place, value in ((1, plain), (0, fed)):
        axes.text(value + 0.02 * largest, place, form.format(value), va="center", weight="bold")
    axes.set_xlim(0, largest * 1.22)
    axes.set_yticks([1, 0], ["DataLoader", "memfeed"])
    axes.tick_params(length=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
