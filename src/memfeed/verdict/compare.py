"""Two verdicts of one program, for CI: what became slower, beyond the spread of the turns."""

from __future__ import annotations

from typing import NamedTuple

from memfeed.errors import LoaderError
from memfeed.verdict.judge import LEAST_GAIN
from memfeed.verdict.results import Loop, spread
from memfeed.verdict.verdict import Verdict


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
        word = _change(one, other)
        is_slower |= word == "slower"
        rates = [1 / loop.middle("seconds_a_row") for loop in (one, other)]
        lines.append(f"{other.name:<26}{rates[0]:>12,.0f}{rates[1]:>12,.0f} rows/s{rates[1] / rates[0]:>8.2f}  {word}")
    if not lines:
        raise LoaderError("found no loop that both verdicts measured; expected two measurements of one program")
    if before.kind != after.kind:
        lines.append(f"verdict: {before.kind} before, {after.kind} now")
    return Comparison(lines, is_slower)


def _change(before: Loop, after: Loop) -> str:
    one, other = (spread([turn.seconds_a_row for turn in loop.turns]) for loop in (before, after))
    if other.low > one.high and other.middle > LEAST_GAIN * one.middle:
        return "slower"
    if other.high < one.low and one.middle > LEAST_GAIN * other.middle:
        return "faster"
    return "no difference beyond the spread"
