"""Each benchmark runs in its short form and writes its JSON; what it measures is not looked at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(name: str, *arguments: object) -> str:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_result(path: Path, name: str, figures: str) -> dict:
    result = json.loads(path.read_text())
    assert result["benchmark"] == name
    assert result["quick"] is True
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["torch"]
    assert all({"what", "found", "limit", "passed"} <= set(check) for check in result["checks"])
    assert result[figures]
    return result


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("convert", "median_seconds"),
        ("columnar", "median_seconds"),
        ("loader", "works"),
        ("cold", "works"),
        ("scale", "first_batch_seconds"),
        ("transforms", "median_seconds"),
        ("to_device", "works"),
    ],
)
def test_quick(name, figures, tmp_path):
    run(name, "--quick", "--json", tmp_path / f"{name}.json")
    check_result(tmp_path / f"{name}.json", name, figures)
    run("report", "--results", tmp_path, "--docs", tmp_path / "docs")
    assert "quick run" in (tmp_path / "docs" / "benchmarks.md").read_text()


def test_others(tmp_path):
    run("others", "--quick", "--json", tmp_path / "others.json")
    result = check_result(tmp_path / "others.json", "others", "works")
    assert not result["failed"]
    for part in result["works"].values():
        assert set(part["rows_per_second"]) == set(part["ratios"]) == set(result["machine"]["versions"])
    run("report", "--results", tmp_path, "--docs", tmp_path / "docs")
    assert "Other loading libraries" in (tmp_path / "docs" / "benchmarks.md").read_text()
    assert (tmp_path / "docs" / "others.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.real_data
def test_tutorial(photos, tmp_path):
    run("tutorial", "--quick", "--data", photos, "--json", tmp_path / "tutorial.json")
    result = check_result(tmp_path / "tutorial.json", "tutorial", "parts")
    assert set(result["parts"]) == {"train", "val"}
    run("report", "--results", tmp_path, "--docs", tmp_path / "docs")
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "The tensorclass tutorial" in page
    assert "quick run" in page
    assert (tmp_path / "docs" / "tutorial.png").read_bytes().startswith(b"\x89PNG")


def test_tutorial_says_what_is_missing(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "tutorial.py"), "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "hymenoptera_data" in done.stderr
    assert "Traceback" not in done.stderr
