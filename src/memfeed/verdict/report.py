"""The verdict as one HTML page: no scripts, no other files, light and dark, for screens of any width. And as a picture.

The picture has bars of the loops, and of the steps of a sample. It needs the extra [plots].
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from memfeed.system import html_parts
from memfeed.system.html_parts import SHADES, Html, bar_row, element, joined, key, table
from memfeed.system.messages import format_bytes, format_short, require
from memfeed.verdict.judge import Form, SampleCost

PARTS = (("waiting", "waiting for data"), ("transfer", "transfer"), ("computing", "computing"))


def page(verdict: Any, *, is_whole: bool = True) -> str:
    """Return the page of a `Verdict`; with ``is_whole=False`` what belongs into another one, such as a notebook."""
    parts = list(_parts(verdict))
    return html_parts.page(f"memfeed: {verdict.kind}", parts) if is_whole else html_parts.fragment(parts)


def _parts(verdict: Any) -> Iterable[Html]:
    yield element("h1", verdict.headline(), verdict.kind.replace(" ", "-"))
    if verdict.instead:
        yield element("p", f"Next: {verdict.instead}.")
    if verdict.loops:
        yield element("h2", "A batch, in four loops")
        yield from _loops(verdict)
    if verdict.sample is not None:
        yield element("h2", "A sample, in one process")
        yield from _sample(verdict.sample)
    if verdict.forms:
        yield element("h2", "What a store takes")
        yield _forms(verdict.forms)
    yield element("h2", "How it was measured")
    yield from (element("p", f"{note}.") for note in verdict.notes)
    turns = len(verdict.loops[0].turns) if verdict.loops else 0
    yield element(
        "p",
        f"{verdict.rows_measured:,} of {verdict.row_count:,} rows, batches of {verdict.batch_size}, "
        f"{turns} turns of each loop, {verdict.seconds:.0f} s. {verdict.machine}.",
        "pale",
    )


def _loops(verdict: Any) -> Iterable[Html]:
    size = verdict.batch_size
    longest = max(loop.middle("seconds_a_row") for loop in verdict.loops)
    yield element("p", joined(key(part, text) for part, text in PARTS))
    for loop in verdict.loops:
        parts = [(part, loop.middle(part) / longest) for part, _ in PARTS]
        yield bar_row(loop.name, parts, format_short(size * loop.middle("seconds_a_row")))
    yield table(
        ("loop", "lowest", "highest", "first batch of an epoch", "rows/s"),
        [
            (
                loop.name,
                format_short(size * min(turn.seconds_a_row for turn in loop.turns)),
                format_short(size * max(turn.seconds_a_row for turn in loop.turns)),
                format_short(loop.middle("first_seconds")),
                f"{1 / loop.middle('seconds_a_row'):,.0f}",
            )
            for loop in verdict.loops
        ],
    )
    if verdict.gain is not None:
        yield element("p", f"memfeed against torch's loader at its best: {verdict.gain} as fast.")
    if verdict.ceiling is not None:
        yield element("p", f"Any loader, against torch's at its best: at most {verdict.ceiling} as fast.")


def _sample(sample: SampleCost) -> Iterable[Html]:
    steps = [one for one in sample.steps if one.share >= 0.005]
    for number, one in enumerate(steps):
        colour = f"s{min(number, SHADES - 1)}"
        yield bar_row(one.name, [(colour, one.share)], format_short(one.seconds))
    rows = ", ".join(map(str, sample.slowest_rows))
    yield element(
        "p",
        f"{format_short(sample.seconds)} in all; the median is {format_short(sample.median_seconds)}. "
        f"The slowest 1 % take {format_short(sample.slowest_seconds)} (rows {rows}), and hold up their batches.",
    )


def _forms(forms: Sequence[Form]) -> Html:
    return table(
        ("form", "on disk", "rows/s a core", "cores for this step", "from epoch"),
        [
            (
                one.name,
                format_bytes(one.total_bytes),
                f"{one.rows_a_second:,.0f}",
                "" if one.cores is None else f"{one.cores:.2g}",
                "-" if one.break_even is None else str(one.break_even),
            )
            for one in forms
        ],
    )


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
        for colour, (part, _) in zip(COLOURS, PARTS, strict=True):
            axes.barh(height, size * loop.middle(part), left=left, color=colour, height=0.6)
            left += size * loop.middle(part)
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
