"""The tool that runs other projects' tests with Loader in the place of DataLoader, on a project made here."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
SUITE_TESTS = """
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return i * i


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_sum():
    assert sum(int(batch.sum()) for batch in DataLoader(Squares(), batch_size=3, shuffle=True)) == 140


def test_dataset():
    dataset = Squares()
    assert DataLoader(dataset).dataset is dataset


def test_stream():
    assert len(list(DataLoader(Stream()))) == 4


def test_without_a_loader():
    assert torch.ones(2).sum() == 2


def test_that_fails_with_torch_too():
    assert not len(DataLoader(Squares()))
"""


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(TOOLS))
    try:
        return runpy.run_path(str(TOOLS / "peers_tests.py"))
    finally:
        sys.path.remove(str(TOOLS))


@pytest.fixture(scope="module")
def report():
    sys.path.insert(0, str(TOOLS))
    try:
        return runpy.run_path(str(TOOLS / "peers_report.py"))
    finally:
        sys.path.remove(str(TOOLS))


def test_only_tests_that_build_a_loader_over_rows_count(tool):
    control = {
        "passes": {"result": "passed", "built": {"map": 1, "stream": 0}},
        "stream": {"result": "passed", "built": {"map": 0, "stream": 1}},
        "fails": {"result": "failed", "built": {"map": 1, "stream": 0}},
    }
    assert tool["counted"](control) == ["passes"]


def test_what_fails_by_choice_counts_as_failed_and_is_named_if_it_passes(tool):
    results = {
        "f.py::a[1]": {"result": "passed"},
        "f.py::b": {"result": "failed", "error": "no"},
        "f.py::c": {"result": "failed", "error": "bad"},
        "f.py::d": {"result": "passed"},
    }
    choices = {"by design": ["f.py::b", "f.py::d", "f.py::not counted"]}
    found = tool["summary"]([*results, "f.py::e"], results, choices)
    assert found == {
        "tests": 5,
        "passed": 2,
        "by_choice": {"by design": 1},
        "passed_though_by_choice": ["f.py::d"],
        "failed": {"f.py::c": "bad", "f.py::e": "did not run"},
    }


def test_tests_that_are_run_again_take_the_place_of_those_that_had_failed(tool):
    choices = {"by design": ["b", "d"]}
    passes = {"result": "passed"}
    before = tool["summary"](list("abcdef"), {"a": passes, "b": passes, "f": passes, "c": {"error": "no"}}, choices)
    other_mode = tool["summary"](list("abcdef"), dict.fromkeys("abcde", passes), choices)
    assert tool["candidates"]({"modes": {"store": before, "cache": other_mode}}, choices) == list("bcdef")
    again = tool["summary"](list("bcdef"), dict.fromkeys("bcf", passes), choices)
    assert tool["merged"](before, again, list("bcdef"), {"b", "d"}) == {
        "tests": 6,
        "passed": 4,
        "by_choice": {"by design": 1},
        "passed_though_by_choice": ["b"],
        "failed": {"e": "did not run"},
    }
    with pytest.raises(ValueError, match="found 4 tests run again, and 1 others; expected 6 together"):
        tool["merged"](before, again, list("bcdf"), {"b", "d"})


def test_a_source_that_is_not_there_is_said_with_its_address(tool, tmp_path, monkeypatch):
    monkeypatch.setitem(tool["source_of"].__globals__, "version", lambda package: "1.0")
    said = tool["source_of"](tool["SUITES"]["torchdata"], tmp_path)
    assert said == f"its sdist has no tests: git clone https://github.com/pytorch/data {tmp_path / 'data'}"


def test_every_reason_belongs_to_a_suite(tool):
    assert set(json.loads((TOOLS / "peers_not_applicable.json").read_text())) <= set(tool["SUITES"])


def test_the_page_has_the_results_that_were_kept(report):
    found = json.loads(report["RESULTS"].read_text())
    assert report["section"](found) in report["PAGE"].read_text()


def test_the_page_names_each_failure_and_counts_both_shares(report):
    mode = {
        "tests": 4,
        "passed": 2,
        "by_choice": {"by design": 1},
        "passed_though_by_choice": [],
        "failed": {"f.py::a": "no", "f.py::b": "no"},
    }
    one = {
        "version": "1.0", "commit": "", "memfeed": 40 * "a", "seconds_allowed": {"test": 9, "suite": 60},
        "torch": "2", "machine": {"system": "Linux", "cpus": 2},
        "control": {"tests": 9, "failed": 2, "skipped": 1}, "modes": dict.fromkeys(("store", "cache", "dataset"), mode),
    }  # fmt: skip
    again = {"memfeed": 40 * "b", "tests": 2, "seconds_allowed": {"test": 30, "suite": 60}}
    page = report["section"]({"skorch": one, "ignite": {**one, "again": again}})
    assert "| store | 4 of 8 | 50.0 % | 66.6 % |" in page
    assert "| skorch 1.0 | 9 | 6 | 2 of 4, 1 by choice |" in page
    assert "| by design | ignite, skorch | 2 | 2 | 2 |" in page
    assert "- aaaaaaaa: skorch\n" in page
    assert "- aaaaaaaa, and bbbbbbbb for the tests that had failed: ignite\n" in page
    assert "Seconds allowed for a test and for a suite: 30 and 60; 9 and 60." in page
    assert "- skorch, `f.py::a` and 1 more: no" in page
    assert "Not run: torchdata, accelerate" in page


@pytest.fixture
def results(tool, tmp_path):
    """Return what runs the tests of the project made here in one mode."""
    (tmp_path / "test_it.py").write_text(SUITE_TESTS)
    suite = tool["Suite"]("pytest", ".", ("test_*.py",), (".",))
    return lambda mode, selected=None: tool["run"](suite, tmp_path, mode, [], 60, selected)


@pytest.mark.long
def test_a_suite_with_dataloader(results):
    assert {test.split("::")[1]: (one["result"], one["built"]) for test, one in results("torch").items()} == {
        "test_sum": ("passed", {"map": 1, "stream": 0}),
        "test_dataset": ("passed", {"map": 1, "stream": 0}),
        "test_stream": ("passed", {"map": 0, "stream": 1}),
        "test_without_a_loader": ("passed", {"map": 0, "stream": 0}),
        "test_that_fails_with_torch_too": ("failed", {"map": 1, "stream": 0}),
    }


@pytest.mark.long
@pytest.mark.parametrize("mode", ["store", "cache", "dataset"])
def test_a_suite_in_three_modes(results, mode):
    selected = ["test_it.py::test_sum", "test_it.py::test_dataset"]
    assert {test: one["result"] for test, one in results(mode, selected).items()} == {
        "test_it.py::test_sum": "passed",
        "test_it.py::test_dataset": "failed",
    }


@pytest.mark.long
def test_a_suite_that_cannot_run_is_one_line(tmp_path):
    command = [sys.executable, str(TOOLS / "peers_tests.py"), "--checkouts", str(tmp_path), "--suites", "torchdata"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torchdata: skipped: ")
    assert done.stdout.count("\n") == 1
