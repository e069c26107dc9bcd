"""Write the table of docs/trainers.md that says what passes of other projects' tests, from the results that were kept.

python tools/peers_report.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers_plugin import MODES
from peers_suites import SUITES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "trainers.md"
RESULTS = ROOT / "benchmarks" / "results" / "peers-tests.json"
BEGIN, END = "<!-- tests of other projects: drawn by tools/peers_report.py -->", "<!-- end of tests -->"


def share(passed: int, tests: int) -> str:
    """Return a share in percent, rounded down: 99.9 % is not 100 %."""
    return f"{1000 * passed // tests / 10:.1f} %" if tests else "-"


def cell(one: Mapping[str, Any]) -> str:
    """Return what passed in one mode, and how many of the failures are by choice."""
    choices = sum(one["by_choice"].values())
    return f"{one['passed']} of {one['tests']}" + (f", {choices} by choice" if choices else "")


def _some(tests: set[str]) -> str:
    """Return the name of a test, or of the first of several."""
    first, *rest = sorted(tests)
    return f"`{first}`" + (f" and {len(rest)} more" if rest else "")


def _commits(found: Mapping[str, Any]) -> list[str]:
    """Return a line for each commit of memfeed that suites ran on, or that has their results, the newest run last."""
    runs: dict[tuple[str, str], list[str]] = {}
    for name, one in found.items():
        again = one.get("again", {}).get("memfeed", "")
        runs.setdefault((one["memfeed"][:8], again[:8]), []).append(name)
    return [
        f"- {commit}{f', and {again} for the tests that had failed' if again else ''}: {', '.join(names)}"
        for (commit, again), names in sorted(runs.items())
    ]


def section(found: Mapping[str, Any]) -> str:
    """Return what stands between the marks of the page."""
    columns = ["project", "tests with DataLoader", "passed", *MODES]
    lines = ["| " + " | ".join(columns) + " |", "|---|---:|---:|" + "---:|" * len(MODES)]
    totals = {mode: [0, 0, 0] for mode in MODES}
    reasons: dict[str, dict[str, int]] = {}
    projects: dict[str, set[str]] = {}
    other: dict[tuple[str, str], set[str]] = {}
    for name, suite in found.items():
        control, modes = suite["control"], suite["modes"]
        failed = sum(number for result, number in control.items() if result != "tests")
        revision = suite["commit"][:8] or suite["version"]
        cells = [cell(modes[mode]) for mode in MODES]
        lines.append(
            f"| {name} {revision} | {control['tests']} | {control['tests'] - failed} | " + " | ".join(cells) + " |"
        )
        for mode in MODES:
            one = modes[mode]
            totals[mode][0] += one["passed"]
            totals[mode][1] += one["tests"]
            totals[mode][2] += sum(one["by_choice"].values())
            for reason, number in one["by_choice"].items():
                counts = reasons.setdefault(reason, dict.fromkeys(MODES, 0))
                counts[mode] += number
                projects.setdefault(reason, set()).add(name)
            for test, error in one["failed"].items():
                said = (error.splitlines() or ["no error"])[0][:110].replace("|", "\\|").replace("<", "&lt;")
                other.setdefault((name, said), set()).add(test.rsplit("/", 1)[-1])
    rows = [
        f"| {mode} | {passed} of {tests} | {share(passed, tests)} | {share(passed, tests - choices)} |"
        for mode, (passed, tests, choices) in totals.items()
    ]
    machines = sorted({f"{one['machine']['system']}, {one['machine']['cpus']} CPUs" for one in found.values()})
    versions = sorted({f"torch {one['torch']}" for one in found.values()})
    allowed = "; ".join(
        sorted(
            {
                "{test:.0f} and {suite:.0f}".format(**one["seconds_allowed"])
                for run in found.values()
                for one in (run, run.get("again", run))
            }
        )
    )
    missing = [name for name in SUITES if name not in found]
    return "\n".join(
        [
            BEGIN,
            "| mode | passed | share | share without failures by choice |",
            "|---|---:|---:|---:|",
            *rows,
            "",
            *lines,
            "",
            f"Not run: {', '.join(missing)}." if missing else "All suites were run.",
            f"{'; '.join(versions)}; {'; '.join(machines)}. Seconds allowed for a test and for a suite: {allowed}.",
            "",
            "Commits of memfeed:",
            "",
            *_commits(found),
            "",
            "| failures by choice: the test | projects | " + " | ".join(MODES) + " |",
            "|---|---|" + "---:|" * len(MODES),
            *(
                f"| {reason} | {', '.join(sorted(projects[reason]))} | {' | '.join(map(str, counts.values()))} |"
                for reason, counts in sorted(reasons.items(), key=lambda one: (-sum(one[1].values()), one[0]))
            ),
            "",
            "Other failures:",
            "",
            *(f"- {name}, {_some(tests)}: {said}" for (name, said), tests in sorted(other.items())),
            END,
        ]
    )


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + section(json.loads(RESULTS.read_text())) + rest.partition(END)[2])
