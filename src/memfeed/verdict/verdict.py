"""The verdict as an object: its lines, its JSON, its pictures; and the comparison of two of them, for CI."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from memfeed.errors import LoaderError
from memfeed.system.files import write_file
from memfeed.system.messages import format_bytes, format_short
from memfeed.verdict.judge import LEAST_GAIN, Form, Kind, Loop, SampleCost, Spread, spread

FORMAT = 1
MOST_LINES = 12
"""After the first one."""
MOST_STEPS, MOST_FORMS = 6, 3


@dataclass(frozen=True)
class Verdict:
    """The answer if memfeed helps a program, and what was measured; `memfeed.bench` returns it.

    ``print(verdict)`` shows the verdict in its first line, and at most 12 lines after it.

    Args:
        kind: "helps", "does not help" or "cannot tell".
        because: the reason; "" if it helps.
        instead: what to do, or what helps instead.
        gain: how many times as fast as torch's loader at its best; None if no store was measured.
        gain_today: how many times as fast as the loader of today.
        ceiling: how many times as fast any loader can be; None without a step.
        break_even: the first epoch after which a store has saved time; None if no epoch does.
        store_bytes: of all rows.
        fill_seconds: what the first epoch takes, in which the store is filled.
        row_count, batch_size, worker_count: of the program; ``rows_measured`` of them were read.
        today, best, repeated, memfeed: the loops. ``best`` is None if today's number of workers is the best one.
        sample: what a sample costs.
        forms: the price list.
        notes: sentences on what was measured in another way than the program does it.
        machine: in words.
        seconds: that the measurement took.
    """

    kind: Kind
    because: str
    instead: str
    row_count: int
    batch_size: int
    worker_count: int
    gain: Spread | None = None
    gain_today: Spread | None = None
    ceiling: Spread | None = None
    break_even: int | None = None
    store_bytes: float = 0.0
    fill_seconds: float = 0.0
    rows_measured: int = 0
    today: Loop | None = None
    best: Loop | None = None
    repeated: Loop | None = None
    memfeed: Loop | None = None
    sample: SampleCost | None = None
    forms: tuple[Form, ...] = ()
    notes: tuple[str, ...] = ()
    machine: str = ""
    seconds: float = 0.0
    format: int = FORMAT

    @property
    def loops(self) -> list[Loop]:
        """The loops that were measured."""
        return [one for one in (self.today, self.best, self.repeated, self.memfeed) if one is not None]

    def headline(self) -> str:
        """Return the first line."""
        if self.kind != "helps":
            return f"{self.kind}, because {self.because}"
        assert self.gain is not None
        assert self.gain_today is not None
        today = f"{self.gain_today.middle:.2g} times as today"
        best = "today" if self.best is None else f"at its best ({self.best.name}), {today}"
        size = f", {format_bytes(self.store_bytes)} on disk" if self.store_bytes else ", nothing on disk"
        return f"helps: {self.gain} as fast as DataLoader {best}, from epoch {self.break_even}{size}"

    def lines(self) -> list[str]:
        """Return the lines after the first one, at most 12."""
        lines = [f"next: {self.instead}"] if self.instead else []
        if self.loops:
            lines.append(f"{f'a batch of {self.batch_size}':<26}{'in all':>9}{'waiting':>9}{'transfer':>10}")
            lines[-1] += f"{'computing':>11}{'first batch':>13}"
        lines += [self._loop_line(one) for one in self.loops]
        lines += [] if self.sample is None else list(_sample_lines(self.sample))
        shown = [form_line(one) for one in self.forms[:MOST_FORMS]]
        lines += [f"{'forms: ' if not i else '':<7}{line}" for i, line in enumerate(shown)]
        rest = [*self.notes, f"measured: {self.rows_measured:,} of {self.row_count:,} rows; {self.machine}"]
        return (lines + rest)[:MOST_LINES]

    def __str__(self) -> str:
        return "\n".join([self.headline(), *(f"  {line}" for line in self.lines())])

    def _repr_html_(self) -> str:
        from memfeed.verdict.report import page

        return page(self, is_whole=False)

    def _loop_line(self, loop: Loop) -> str:
        size = self.batch_size
        cells = [
            format_short(size * loop.middle(part)) for part in ("seconds_a_row", "waiting", "transfer", "computing")
        ]
        first = format_short(loop.middle("first_seconds"))
        return f"{loop.name:<26}{cells[0]:>9}{cells[1]:>9}{cells[2]:>10}{cells[3]:>11}{first:>13}"

    def beside(self, stats: Mapping[str, Any]) -> str:
        """Return a line with what `Loader.stats` says of an epoch, beside what was predicted.

        Raises LoaderError if no loop of memfeed was measured.
        """
        if self.memfeed is None:
            raise LoaderError("found a verdict without a loop of memfeed; expected one that measured a store")
        rows = self.row_count / self.memfeed.epoch_seconds(self.row_count)
        waiting = self.memfeed.middle("waiting") / self.memfeed.middle("seconds_a_row")
        found = stats["samples_per_second"]
        return (
            f"{found:,.0f} rows/s, predicted {rows:,.0f} ({found / rows:.2f} times); "
            f"waiting {stats['wait_share']:.0%} of the time, predicted {waiting:.0%}"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the verdict to a file: .json, .html (one page, without scripts) or .png. LoaderError for others."""
        target = Path(path)
        if target.suffix == ".json":
            write_file(target, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        elif target.suffix == ".html":
            from memfeed.verdict.report import page

            write_file(target, page(self).encode())
        elif target.suffix == ".png":
            from memfeed.verdict.report import save_picture

            save_picture(self, target)
        else:
            raise LoaderError(f"found the name {str(path)!r}; expected one that ends in .json, .html or .png")


def load_verdict(path: str | os.PathLike[str]) -> Verdict:
    """Return the verdict that `Verdict.save` wrote to a JSON file. Raises LoaderError for any other file."""
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=Verdict)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LoaderError(f"{path}: found no verdict ({error}); expected a file of memfeed bench --json") from None
    if found.format != FORMAT:
        raise LoaderError(f"{path}: found format {found.format}; expected {FORMAT}: measure again with this version")
    return found


def _sample_lines(sample: SampleCost) -> list[str]:
    steps = [f"{one.name} {one.share:.0%}" for one in sample.steps[:MOST_STEPS] if one.share >= 0.01]
    rows = ", ".join(map(str, sample.slowest_rows))
    slower = f"{sample.slowest_seconds / sample.median_seconds:.1f} times the median"
    return [
        f"a sample: {format_short(sample.seconds)}: {', '.join(steps)}",
        f"slowest 1 %: {format_short(sample.slowest_seconds)}, {slower} (rows {rows})",
    ]


def form_line(form: Form) -> str:
    """Return a line of the price list."""
    cores = "" if form.cores is None else f", {form.cores:.2g} cores for this step"
    epoch = "" if form.break_even is None else f", from epoch {form.break_even}"
    rows = f"{form.rows_a_second:,.0f} rows/s a core"
    return f"{form.name}: {format_bytes(form.total_bytes)}, {rows}{cores}{epoch}"


class Comparison(NamedTuple):
    """Lines to print, and whether a loop of the second verdict is slower."""

    lines: list[str]
    is_slower: bool


def compare(before: Verdict, after: Verdict) -> Comparison:
    """Compare the loops of two verdicts. A loop is slower, or faster, if the spreads of its turns do not overlap.

    The difference must also be above 10 %. Raises LoaderError for verdicts of different programs or machines.
    """
    for name in ("machine", "batch_size", "row_count", "worker_count"):
        one, other = getattr(before, name), getattr(after, name)
        if one != other:
            raise LoaderError(
                f"found verdicts with {name.replace('_', ' ')} {one} and {other}; expected the same program on the "
                "same kind of machine: measure both there"
            )
    lines, is_slower = [], False
    for name in ("today", "best", "repeated", "memfeed"):
        one, other = getattr(before, name), getattr(after, name)
        if one is None or other is None:
            continue
        word = _difference(one, other)
        is_slower |= word == "slower"
        rates = [1 / loop.middle("seconds_a_row") for loop in (one, other)]
        lines.append(f"{other.name:<26}{rates[0]:>12,.0f}{rates[1]:>12,.0f} rows/s{rates[1] / rates[0]:>8.2f}  {word}")
    if not lines:
        raise LoaderError("found no loop that both verdicts measured; expected two measurements of one program")
    if before.kind != after.kind:
        lines.append(f"verdict: {before.kind} before, {after.kind} now")
    return Comparison(lines, is_slower)


def _difference(before: Loop, after: Loop) -> str:
    one, other = (spread([turn.seconds_a_row for turn in loop.turns]) for loop in (before, after))
    if other.low > one.high and other.middle > LEAST_GAIN * one.middle:
        return "slower"
    if other.high < one.low and one.middle > LEAST_GAIN * other.middle:
        return "faster"
    return "no difference beyond the spread"
