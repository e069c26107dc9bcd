"""Each benchmark runs in its short form and writes its JSON; what it measures is not looked at."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def run_here(monkeypatch):
    """Runs one in this process, which has imported torch already."""

    def run_here(name: str, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")

    return run_here


def check_result(path: Path, name: str, figures: str) -> dict:
    result = json.loads(path.read_text())
    assert result["benchmark"] == name
    assert result["quick"] is True
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["torch"]
    assert all({"what", "found", "limit", "passed"} <= set(check) for check in result["checks"])
    assert result[figures]
    return result


FIGURES = {
    "convert": "median_seconds",
    "columnar": "median_seconds",
    "verify": "median_seconds",
    "loader": "works",
    "cold": "works",
    "scale": "first_batch_seconds",
    "transforms": "median_seconds",
    "to_device": "works",
    "others": "works",
    "device": "gigabytes_per_second",
}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The directory of their results."""
    directory = tmp_path_factory.mktemp("benchmarks")
    command = [sys.executable, str(Path(__file__).with_name("quick_benchmarks.py")), str(directory)]
    names = list(FIGURES)
    running = [
        subprocess.Popen([*command, *half], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for half in (names[::2], names[1::2])  # their figures mean nothing: they may disturb each other
    ]
    for process in running:
        process.wait(timeout=600)
    return directory


@pytest.mark.parametrize("name", FIGURES)
def test_quick(name, quick):
    written = "device-cpu" if name == "device" else name
    assert (quick / f"{written}.json").exists(), (quick / f"{name}.log").read_text()
    result = check_result(quick / f"{written}.json", written, FIGURES[name])
    if name == "others":
        assert not result["failed"]
        for part in result["works"].values():
            assert set(part["rows_per_second"]) == set(part["ratios"]) == set(result["machine"]["versions"])


def test_report(quick, tmp_path, run_here):
    run_here("report", "--results", quick, "--docs", tmp_path)
    page = (tmp_path / "benchmarks.md").read_text()
    assert page.count("quick run") == len(FIGURES)
    assert "Other loading libraries" in page
    assert (tmp_path / "others.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.real_data
def test_tutorial(photos, tmp_path, run_here):
    arguments = ["--quick", "--data", str(photos), "--json", str(tmp_path / "tutorial.json")]
    command = [sys.executable, str(BENCHMARKS / "tutorial.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = check_result(tmp_path / "tutorial.json", "tutorial", "parts")
    assert set(result["parts"]) == {"train", "val"}
    run_here("report", "--results", tmp_path, "--docs", tmp_path / "docs")
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "The tensorclass tutorial" in page
    assert "quick run" in page
    assert (tmp_path / "docs" / "tutorial.png").read_bytes().startswith(b"\x89PNG")


def test_tutorial_says_what_is_missing(tmp_path, run_here, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_here("tutorial", "--data", tmp_path)
    assert "hymenoptera_data" in capsys.readouterr().err
