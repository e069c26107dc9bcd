"""Run the tests that other projects wrote for loaders, with `memfeed.Loader` in the place of DataLoader.

    python tools/peers_tests.py --torchdata DIR --accelerate DIR --lightning DIR

takes checkouts of pytorch/data, huggingface/accelerate and Lightning-AI/pytorch-lightning. For each it prints how many
of the applicable tests pass. `tools/peers_not_applicable.json` names the tests that are not applicable, by reason.
Needs lightning, accelerate, torchdata, parameterized, expecttest and scikit-learn installed beside memfeed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import memfeed

TOOLS = Path(__file__).parent
NOT_APPLICABLE = TOOLS / "peers_not_applicable.json"
NO_LOADER = "builds no loader over a map-style dataset"
FAILS_HERE = "is skipped or fails here with torch's own DataLoader too"
BY_RULE = (NO_LOADER, FAILS_HERE)  # ``--control`` finds these; the other reasons are written by hand


@dataclass(frozen=True)
class Suite:
    """The loader tests of one project.

    Args:
        folder: where pytest runs, relative to the checkout.
        tests: files, relative to the checkout's ``folder``.
        sources: folders of the checkout to import from.
        imported: modules that keep torch's DataLoader.
        patched: modules of helpers whose DataLoader is replaced as in the tests.
    """

    folder: str
    tests: tuple[str, ...]
    sources: tuple[str, ...]
    imported: tuple[str, ...]
    patched: tuple[str, ...] = field(default=())


SUITES = {
    "torchdata": Suite(
        "test/stateful_dataloader",
        ("test_dataloader.py", "test_state_dict.py", "test_sampler.py"),
        (".",),
        ("torchdata.stateful_dataloader",),
    ),
    "accelerate": Suite(
        "tests",
        ("test_data_loader.py", "test_accelerator.py", "test_state_checkpointing.py"),
        ("src", "."),
        ("accelerate", "accelerate.data_loader", "accelerate.test_utils"),
        ("accelerate.test_utils.training",),
    ),
    # here the loaders that Accelerate builds for itself are replaced too
    "accelerate-inside": Suite(
        "tests",
        ("test_data_loader.py",),
        ("src", "."),
        ("accelerate", "accelerate.data_loader", "accelerate.test_utils"),
        ("accelerate.data_loader",),
    ),
    "lightning": Suite(
        "tests",
        (
            "tests_pytorch/trainer/test_dataloaders.py",
            "tests_pytorch/trainer/connectors/test_data_connector.py",
            "tests_pytorch/trainer/flags/test_overfit_batches.py",
            "tests_pytorch/trainer/dynamic_args/test_multiple_eval_dataloaders.py",
            "tests_pytorch/utilities/test_data.py",
            "tests_pytorch/utilities/test_combined_loader.py",
            "tests_pytorch/utilities/test_auto_restart.py",
            "tests_pytorch/overrides/test_distributed.py",
            "tests_pytorch/loops/test_fetchers.py",
            "tests_pytorch/loops/test_loops.py",
            "tests_pytorch/loops/test_prediction_loop.py",
            "tests_pytorch/loops/test_evaluation_loop.py",
            "tests_pytorch/callbacks/test_prediction_writer.py",
            "tests_pytorch/tuner/test_scale_batch_size.py",
            "tests_fabric/utilities/test_data.py",
            "tests_fabric/utilities/test_distributed.py",
            "tests_fabric/test_wrappers.py",
        ),
        ("src", "tests"),
        ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.tuner.tuning"),
        ("lightning.pytorch.demos.boring_classes",),
    ),
}


def run(
    suite: Suite, checkout: Path, loader: str, *, drop: bool, only: list[str], left_out: list[str]
) -> list[dict[str, Any]]:
    """Run the tests of a suite but those ``left_out``. Return one dict per test: test, result, built, error."""
    folder = checkout / suite.folder
    tests = [name for name in suite.tests if (folder / name).exists() and (not only or any(o in name for o in only))]
    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary) / "results.jsonl"
        results.touch()
        sources = [TOOLS, Path(memfeed.__file__).parents[1], *(checkout / source for source in suite.sources)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, sources), os.environ.get("PYTHONPATH", "")]),
            "MEMFEED_PEERS_LOADER": loader,
            "MEMFEED_PEERS_DROP": str(int(drop)),
            "MEMFEED_PEERS_RESULTS": str(results),
            "MEMFEED_PEERS_IMPORT": " ".join(suite.imported),
            "MEMFEED_PEERS_PATCH": " ".join(suite.patched),
            "MEMFEED_PEERS_LEFT_OUT": json.dumps(left_out),
            "PL_RUN_STANDALONE_TESTS": "0",
        }
        options = ["-q", "-o", "addopts=", "--color=no", "--tb=no", "-p", "no:cacheprovider", "-p", "peers_plugin"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=False)
        by_test: dict[str, dict[str, Any]] = {}
        for line in results.read_text().splitlines():
            one = json.loads(line)  # a test with subtests writes one line for each
            before = by_test.setdefault(one["test"], one)
            if before["result"] == "passed":
                by_test[one["test"]] = one
        return list(by_test.values())


def reasons_by_rule(control: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the tests that a run with torch's own DataLoader shows to be not applicable, by reason."""
    found: dict[str, list[str]] = {NO_LOADER: [], FAILS_HERE: []}
    for one in control:
        if one["result"] != "passed":
            found[FAILS_HERE].append(one["test"])
        elif not one["built"]["map"]:
            found[NO_LOADER].append(one["test"])
    return found


def report(name: str, results: list[dict[str, Any]], reasons: dict[str, list[str]], *, verbose: bool) -> None:
    """Print how many of the applicable tests pass, and the first error of each that does not."""
    names = {test for tests in reasons.values() for test in tests}
    applicable = [one for one in results if one["test"] not in names]
    passed = sum(one["result"] == "passed" for one in applicable)
    share = f" ({passed / len(applicable):.0%})" if applicable else ""
    print(f"{name}: passed {passed} of {len(applicable)} applicable{share}", flush=True)
    failed = [one for one in applicable if one["result"] != "passed"]
    if verbose:
        for one in failed:
            print(f"  {one['test']}: {one['error'].splitlines()[0] if one['error'] else one['result']}")
    else:
        for error, count in Counter(one["error"].split("\n")[0][:120] for one in failed).most_common(12):
            print(f"  {count} x {error}")


def main() -> None:
    """Read the arguments, run the suites, print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("torchdata", "accelerate", "lightning"):
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help="a checkout of the project")
    parser.add_argument("--loader", choices=("memfeed", "store", "torch"), default="memfeed")
    parser.add_argument("--drop", action="store_true", help="leave out arguments that Loader does not have")
    parser.add_argument("--only", nargs="*", default=[], help="files whose name contains one of these")
    parser.add_argument("--verbose", action="store_true", help="print each test that fails")
    parser.add_argument("--json", type=Path, help="write every result there")
    parser.add_argument(
        "--control", action="store_true", help="run torch's own DataLoader, and note what is not applicable by rule"
    )
    options = parser.parse_args()
    noted = json.loads(NOT_APPLICABLE.read_text()) if NOT_APPLICABLE.exists() else {}
    everything = {}
    for name, suite in SUITES.items():
        checkout: Path | None = getattr(options, name.split("-")[0])
        if checkout is None:
            continue
        loader = "torch" if options.control else options.loader
        by_hand = [test for why, tests in noted.get(name, {}).items() if why not in BY_RULE for test in tests]
        results = run(suite, checkout.resolve(), loader, drop=options.drop, only=options.only, left_out=by_hand)
        everything[name] = results
        if options.control:
            noted[name] = {**noted.get(name, {}), **reasons_by_rule(results)}
        report(name, results, noted.get(name, {}), verbose=options.verbose)
    if options.control:
        NOT_APPLICABLE.write_text(json.dumps(noted, indent=1) + "\n")
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
