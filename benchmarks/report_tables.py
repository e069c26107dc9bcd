"""Tables of the pages that ``report.py`` writes, with targets and the reasons for missed ones, and their units."""

from __future__ import annotations

from typing import Any

from missed import reasons

Result = dict[str, Any]
TIMES = "memfeed is x times as fast"


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def targets(result: Result) -> str:
    """Return the table of targets, and below it the reason for each missed one."""
    rows = []
    for check in result["checks"]:
        sign = "≥" if check["at_least"] else "≤"
        verdict = "reached" if check["passed"] else "**missed**"
        found = f"{check['found']:,.2f} {check['unit']}"
        rows.append([check["what"], found, f"{sign} {check['limit']:.3g} {check['unit']}", verdict])
    why = [
        f"- **{names}**: {reason or 'the cause has not been measured'}.\n"
        for names, reason in reasons(result["benchmark"], result["checks"])
    ]
    return table(["", "found", "target", ""], rows) + ("\nMissed, because:\n\n" + "".join(why) if why else "")


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.{0 if seconds > 0.1 else 1 if seconds > 0.001 else 2}f} ms"


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.1f} ms"
