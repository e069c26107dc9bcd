"""The verdict as one HTML page: no scripts, no other files, light and dark, for screens of any width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from memfeed.system import html_parts
from memfeed.system.html_parts import SHADES, Html, bar_row, element, joined, key, table
from memfeed.system.units import format_bytes, format_short
from memfeed.verdict.results import Form, Loop, SampleCost

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


def seconds_of(loop: Loop) -> list[float]:
    """Return the seconds a row of each part of a loop, in the order of `PARTS`."""
    return [loop.middle(part) for part, _ in PARTS]
