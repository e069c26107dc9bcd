"""Samples trained on against seconds: both laps and the conversion, so that the break-even can be seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memfeed.demo.result import Lap, Result
from memfeed.system.units import format_seconds

PLAIN, FED, FAINT, INK, PALE_INK = "#8d99ae", "#e4572e", "#d9dee7", "#22283a", "#5b647a"
"""The colours of DataLoader, of memfeed, of lines that only guide the eye, and of text."""
MOST_EPOCHS = 12
"""A break-even later than this lies outside the picture."""
Floats = npt.NDArray[np.float64]


def draw_timeline(axes: Any, result: Result) -> None:
    """Draws into matplotlib's ``axes``: the epochs as measured, then dotted as if repeated, until they have crossed."""
    plain, fed, converted = result.dataloader, result.memfeed, result.cache_seconds
    until = _end(result)
    plain_end, fed_end = plain.rate * until, fed.rate * (until - converted)
    top = 1.12 * max(plain_end, min(fed_end, 2.0 * plain_end))
    axes.set_title("Samples trained on, from the first second", pad=10)
    axes.set_xlim(0, until)
    axes.set_ylim(0, top)
    axes.set_xlabel("seconds")
    axes.grid(axis="y", color=FAINT, lw=0.8)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(length=0, pad=7)
    _conversion(axes, converted, until, top)
    courses = []
    for name, lap, start, colour in (("DataLoader", plain, 0.0, PLAIN), ("memfeed", fed, converted, FED)):
        seconds, samples = course(lap, start, until)
        measured = len(lap.marks)
        axes.plot(seconds[:measured], samples[:measured], color=colour, lw=3, zorder=3, solid_capstyle="round")
        axes.plot(seconds[measured - 1 :], samples[measured - 1 :], color=colour, lw=2, ls=(0, (1, 1.6)), zorder=3)
        _name(axes, name, (seconds, samples), until, top, colour)
        courses.append((seconds, samples))
    ahead = overtaking(courses[0], courses[1], until)
    if ahead is not None:
        _break_even(axes, result, ahead, until, top)
    legend = "solid: measured   dotted: the same epoch again"
    axes.text(1.0, -0.13, legend, transform=axes.transAxes, ha="right", color=PALE_INK)


def _end(result: Result) -> float:
    """Where the picture ends: late enough to see two epochs of DataLoader, one of memfeed, and the break-even."""
    exact = result.break_even_epochs
    crossing = exact * result.dataloader.seconds if exact is not None and exact < MOST_EPOCHS else 0.0
    return max(2.0 * result.dataloader.seconds, 1.4 * (result.cache_seconds + result.memfeed.seconds), 1.9 * crossing)


def course(lap: Lap, start: float, until: float) -> tuple[Floats, Floats]:
    """Seconds and samples of a lap that starts at ``start`` and is repeated up to ``until``."""
    seconds, samples = np.array(lap.marks, np.float64).T
    rounds = max(1, int(np.ceil((until - start) / lap.seconds)))
    again = np.arange(rounds)[:, None]
    return (
        np.concatenate([[start], (start + again * lap.seconds + seconds[None, 1:]).ravel()]),
        np.concatenate([[0.0], (again * lap.samples + samples[None, 1:]).ravel()]),
    )


def overtaking(one: tuple[Floats, Floats], other: tuple[Floats, Floats], until: float) -> tuple[float, float] | None:
    """(seconds, samples) at which the other course passes for good; None if it is not ahead at the end."""
    times = np.linspace(0.0, until, 4001)
    behind = np.flatnonzero(np.interp(times, *other) <= np.interp(times, *one))
    if not len(behind) or behind[-1] == len(times) - 1:
        return None
    at = float(times[behind[-1]])
    return at, float(np.interp(at, *one))


def _conversion(axes: Any, seconds: float, until: float, top: float) -> None:
    """The time before memfeed's first batch; what it is stands in the shade if that is wide enough, else upright."""
    axes.axvspan(0, seconds, color="#fdf1ed", lw=0, zorder=0.8)
    axes.plot([0, seconds], [0, 0], color=FED, lw=4, solid_capstyle="butt", clip_on=False, zorder=4)
    wide = seconds > 0.26 * until
    axes.text(
        seconds / 2,
        0.97 * top,
        ("memfeed converts\nonce: " if wide else "memfeed converts once: ") + format_seconds(seconds),
        color=FED,
        ha="center",
        va="top",
        linespacing=1.4,
        rotation="horizontal" if wide else "vertical",
    )


def _name(axes: Any, name: str, line: tuple[Floats, Floats], until: float, top: float, colour: str) -> None:
    """The line's name, above it, near where it leaves the picture."""
    seconds, samples = line
    highest = min(0.94 * top, float(np.interp(0.97 * until, seconds, samples)))
    place = (float(np.interp(highest, samples, seconds)), highest)
    style = {"ha": "right", "va": "bottom", "color": colour, "weight": "bold", "size": 12.5}
    axes.annotate(name, place, (-12, 0), textcoords="offset points", **style)


def _break_even(axes: Any, result: Result, at: tuple[float, float], until: float, top: float) -> None:
    seconds, samples = at
    axes.plot([seconds], [samples], "o", ms=10, mfc="white", mec=INK, mew=2, zorder=5)
    axes.annotate(
        f"ahead after {format_seconds(seconds)}\n(break-even: epoch {result.break_even_epoch})",
        at,
        (seconds + 0.07 * until, max(samples - 0.2 * top, 0.08 * top)),
        arrowprops={"arrowstyle": "-", "color": INK, "shrinkB": 6, "lw": 1},
        bbox={"boxstyle": "square,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85},
        weight="bold",
        linespacing=1.4,
        va="center",
        zorder=4,
    )
