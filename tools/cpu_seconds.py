"""A pytest plugin that prints the CPU seconds of the tests, those of their child processes included.

    PYTHONPATH=tools python -m pytest -p cpu_seconds tests/transfer

Unlike ``--durations`` it does not depend on what else the machine does.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

import pytest

SHOWN = 15  # tests
found: Counter[str] = Counter()


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, None, None]:
    """Note the seconds of a test with its fixtures."""
    before = cpu_seconds()
    yield
    found[item.nodeid] = cpu_seconds() - before


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tests that take longest, each file, and the sum."""
    files: Counter[str] = Counter()
    for name, seconds in found.items():
        files[name.split("::")[0]] += seconds
    for name, seconds in [*found.most_common(SHOWN), *files.most_common()]:
        terminalreporter.write_line(f"{seconds:7.2f} {name}")
    total = cpu_seconds()
    terminalreporter.write_line(f"{total:7.2f} CPU seconds, of which {total - sum(found.values()):.2f} to start")
