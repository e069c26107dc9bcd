"""Run the tests that other projects wrote for loaders, with `memfeed.Loader` in the place of DataLoader.

    python tools/peers_tests.py --checkouts DIR [--suites torchdata skorch ...]

For each suite of `tools/peers_suites.py` the tests run with torch's own DataLoader first. Those that pass, and build a
loader over a map-style dataset, are the ones that count. They run again in three modes: a store that is made of the
dataset, then a Loader ("store"), ``Loader(dataset, cache=path)`` ("cache"), and ``Loader(dataset)`` ("dataset").
`tools/peers_not_applicable.json` names the tests that fail by choice, by reason; they count as failures, and one that
passes is reported. A test is stopped after ``--seconds``, and a suite, in each mode, after ``--suite-seconds``; of a
suite that was stopped, the tests that ran with DataLoader count.

``--again`` runs, after a change of memfeed, only the tests that failed in the results of ``--json``, and those that
fail by choice; the others count as they did then.

Sources are looked for in DIR. If the sdist of a project has the tests, it is downloaded there; else the project's
repository must have been cloned there, and a line says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peers_plugin import MODES, is_named
from peers_suites import SUITES, Suite, source_of

import memfeed

TOOLS = Path(__file__).resolve().parent
NOT_APPLICABLE = TOOLS / "peers_not_applicable.json"
CONTROL = "torch"
Results = dict[str, dict[str, Any]]  # by test: result, built, error


def run(
    suite: Suite,
    source: Path,
    mode: str,
    only: list[str],
    seconds: int,
    selected: list[str] | None = None,
    suite_seconds: float = 900,
) -> Results:
    """Run the tests of a suite in one mode: all of them, or those ``selected`` by name."""
    folder = source / suite.folder
    tests = []
    for pattern in suite.tests:
        files, *classes = pattern.split("::")
        found = ["::".join([str(path.relative_to(folder)), *classes]) for path in sorted(folder.glob(files))]
        tests += [name for name in found if not only or any(part in name for part in only)]
    if not tests:
        return {}
    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary) / "results.jsonl"
        results.touch()
        paths = [TOOLS, Path(memfeed.__file__).parents[1], *(source / path for path in suite.sources)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
            "MEMFEED_PEERS_LOADER": mode,
            "MEMFEED_PEERS_RESULTS": str(results),
            "MEMFEED_PEERS_IMPORT": " ".join(suite.imported),
            "MEMFEED_PEERS_PATCH": " ".join(suite.patched),
            "MEMFEED_PEERS_SECONDS": str(seconds),
            "PL_RUN_STANDALONE_TESTS": "0",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": temporary,
        }
        if selected is not None:
            names = Path(temporary) / "selected.json"
            names.write_text(json.dumps(selected))
            environment["MEMFEED_PEERS_SELECTED"] = str(names)
        options = ["-q", "-o", "addopts=", "--color=no", "--tb=no", "-p", "no:cacheprovider", "-p", "peers_plugin"]
        command = [sys.executable, "-m", "pytest", *options, "--continue-on-collection-errors", *tests]
        with (Path(temporary) / "output").open("w+") as output:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    command,
                    cwd=folder,
                    env=environment,
                    stdout=output,
                    stderr=output,
                    check=False,
                    timeout=suite_seconds,
                )
            output.seek(0)
            said = output.read()
        by_test: Results = {}
        for line in results.read_text().splitlines():
            one = json.loads(line)  # a test with subtests writes one line for each
            before = by_test.setdefault(one["test"], one)
            if before["result"] == "passed":
                by_test[one["test"]] = one
        if not by_test and selected != []:
            print(said[-2000:], file=sys.stderr)
        return by_test


def commit_of(source: Path) -> str:
    """Return the commit of a clone; an empty string for the source of a release."""
    command = ["git", "-C", str(source), "rev-parse", "HEAD"]
    return subprocess.check_output(command, text=True).strip() if (source / ".git").exists() else ""


def counted(control: Results) -> list[str]:
    """Return the tests that pass with torch's own DataLoader, and build a loader over a map-style dataset."""
    return [test for test, one in control.items() if one["result"] == "passed" and one["built"]["map"]]


def summary(tests: list[str], results: Results, by_choice: dict[str, list[str]]) -> dict[str, Any]:
    """Return how many ``tests`` pass in one mode, and what the others are."""
    reasons = {test: why for why, names in by_choice.items() for test in tests if is_named(test, set(names))}
    passed = [test for test in tests if results.get(test, {}).get("result") == "passed"]
    failed = [test for test in tests if test not in passed]
    return {
        "tests": len(tests),
        "passed": len(passed),
        "by_choice": dict(Counter(reasons[test] for test in failed if test in reasons)),
        "passed_though_by_choice": [test for test in passed if test in reasons],
        "failed": {test: results.get(test, {}).get("error", "did not run") for test in failed if test not in reasons},
    }


def candidates(found: dict[str, Any], by_choice: dict[str, list[str]]) -> list[str]:
    """Return the names of the tests that may have failed in the results of a suite."""
    failed = [test for one in found["modes"].values() for test in (*one["failed"], *one["passed_though_by_choice"])]
    return sorted({*failed, *(name for names in by_choice.values() for name in names)})


def merged(before: dict[str, Any], again: dict[str, Any], tests: list[str], listed: set[str]) -> dict[str, Any]:
    """Return the summary of a mode, of which ``tests`` were run once more. All others had passed before.

    ``listed`` are the names of tests that fail by choice. Raises ValueError if tests that had failed were not run.
    """
    though = before["passed_though_by_choice"]
    had_passed = [one for one in tests if one not in before["failed"] and (one in though or not is_named(one, listed))]
    others = before["passed"] - len(had_passed)
    if others + len(tests) != before["tests"]:
        raise ValueError(
            f"found {len(tests)} tests run again, and {others} others; expected {before['tests']} together"
        )
    return {**again, "tests": before["tests"], "passed": others + again["passed"]}


def describe(name: str, mode: str, found: dict[str, Any], *, verbose: bool) -> None:
    """Print the summary of a suite in one mode."""
    tests, passed, choices = found["tests"], found["passed"], sum(found["by_choice"].values())
    share = f" ({passed / tests:.1%})" if tests else ""
    print(f"{name}, {mode}: passed {passed} of {tests}{share}, {choices} fail by choice", flush=True)
    if found["passed_though_by_choice"]:
        print(f"  listed as not applicable, but passed: {', '.join(found['passed_though_by_choice'])}")
    errors = {test: (error or "no error").splitlines()[0] for test, error in found["failed"].items()}
    if verbose:
        for test, error in errors.items():
            print(f"  {test}: {error}")
    else:
        for error, count in Counter(error[:120] for error in errors.values()).most_common(12):
            print(f"  {count} x {error}")


def main() -> None:
    """Read the arguments, run the suites, print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, required=True, metavar="DIR", help="where the sources are kept")
    parser.add_argument("--suites", nargs="*", choices=SUITES, default=list(SUITES), metavar="NAME")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--only", nargs="*", default=[], help="files whose name contains one of these")
    parser.add_argument("--seconds", type=int, default=60, help="a test that takes longer fails")
    parser.add_argument("--suite-seconds", type=float, default=900, help="a suite that takes longer is stopped")
    parser.add_argument("--again", action="store_true", help="run only the tests that failed before, see above")
    parser.add_argument("--verbose", action="store_true", help="print each test that fails")
    parser.add_argument("--json", type=Path, help="write the results there, beside those of other suites")
    options = parser.parse_args()
    options.checkouts.mkdir(parents=True, exist_ok=True)
    by_choice = json.loads(NOT_APPLICABLE.read_text())
    for name in options.suites:
        suite = SUITES[name]
        source = source_of(suite, options.checkouts.resolve())
        if isinstance(source, str):
            print(f"{name}: skipped: {source}", flush=True)
            continue
        begin = time.monotonic()
        before = json.loads(options.json.read_text())[name] if options.again else None
        only, selected = options.only, None
        listed = {test for names in by_choice.get(name, {}).values() for test in names}
        if before is not None:
            selected = candidates(before, by_choice.get(name, {}))
            if not selected:
                print(f"{name}: no test failed", flush=True)
                continue
            only = sorted({test.split("::")[0] for test in selected})
        control = run(suite, source, CONTROL, only, options.seconds, selected, options.suite_seconds)
        tests = counted(control)
        not_passed = Counter(one["result"] for one in control.values() if one["result"] != "passed")
        found: dict[str, Any] = {
            "version": version(suite.package),
            "commit": commit_of(source),
            "torch": torch.__version__,
            "memfeed": commit_of(TOOLS.parent),
            "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()},
            "seconds_allowed": {"test": options.seconds, "suite": options.suite_seconds},
            "control": {"tests": len(control), **not_passed},
            "modes": {},
        }
        for mode in options.modes:
            results = run(suite, source, mode, only, options.seconds, tests, options.suite_seconds)
            found["modes"][mode] = summary(tests, results, by_choice.get(name, {}))
            if before is not None:
                found["modes"][mode] = merged(before["modes"][mode], found["modes"][mode], tests, listed)
            describe(name, mode, found["modes"][mode], verbose=options.verbose)
        if before is not None:
            again = {"memfeed": found["memfeed"], "tests": len(tests), "seconds_allowed": found["seconds_allowed"]}
            found = {**before, "modes": {**before["modes"], **found["modes"]}, "again": again}
        print(f"{name}: {time.monotonic() - begin:.0f} s, with DataLoader {len(control)} tests: {dict(not_passed)}")
        if options.json:
            noted = json.loads(options.json.read_text()) if options.json.exists() else {}
            options.json.write_text(json.dumps({**noted, name: found}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
