"""Each benchmark runs in its short form and writes its JSON. A target that is missed has a reason."""

import json
import os
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import gettempdir

import pytest

from measure import RESULTS
from missed import reasons
from report import SECTIONS
from report_tables import targets
from summary import DETAILS, RATIOS, TOPICS, first_page, ratios
from support import skip_without_disk

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _no_thread_left():
    """Replace the fixture of all tests: tensordict's memmap leaves its threads to the garbage collector."""


def run(name: str, *arguments: object) -> None:
    """Run a benchmark in this process, which has imported torch already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")


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
    "windows": "median_seconds",
    "verify": "median_seconds",
    "loader": "works",
    "cold": "works",
    "scale": "first_batch_seconds",
    "fleet": "ranks",
    "curves": "curves",
    "imports": "medians",
    "transforms": "median_seconds",
    "to_device": "works",
    "sequences": "works",
    "others": "works",
    "augment": "images_per_second",
    "device": "gigabytes_per_second",
    "memoize": "works",
    "coded_rows": "codecs",
    "forms": "images_per_second",
}


@pytest.mark.long
def test_the_compiled_kernel_stores_16_bytes_at_once(tmp_path):
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4):
        pytest.skip("an older Triton takes other descriptions of what to compile")
    path = tmp_path / "kernels.json"
    command = [sys.executable, str(BENCHMARKS / "kernels.py"), "--quick", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)  # this process may interpret kernels
    assert done.returncode == 0, done.stderr
    result = check_result(path, "kernels", "code")
    # the tile of channels last has more instructions than it should, and takes less time: benchmarks/missed.py
    missed = [check["what"] for check in result["checks"] if not check["passed"]]
    assert all("channels last: instructions" in what for what in missed)
    for code in result["code"].values():
        assert code["instructions_a_value"] < code["instructions_a_value_before"]
        assert set(code["stores"]) == {"STG.E.128"}
        assert all(".v4.b32" in store for store in code["stores_of_ptx"])
    run("report", "--results", tmp_path, "--docs", tmp_path)
    assert "The compiled kernel" in (tmp_path / DETAILS).read_text()


@pytest.mark.skipif("RAY_TORTURE" not in os.environ, reason="takes minutes: make ray-torture")
def test_ray_conversion(tmp_path):
    """In a process of its own: Ray warns, and leaves threads."""
    path = tmp_path / "ray.json"
    command = [sys.executable, str(BENCHMARKS / "ray_conversion.py"), "--quick", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    killed = check_result(path, "ray", "scaling")["nodes_killed"]
    assert killed["fixed_bytes_equal"]
    assert killed["ragged_rows_equal"]
    assert killed["verified"]
    assert killed["computed_more_often"] == 0
    run("report", "--results", tmp_path, "--docs", tmp_path)
    assert "Conversion on Ray" in (tmp_path / DETAILS).read_text()


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Run each benchmark in its short form, once for all tests. Return the path of its result."""
    directory = tmp_path_factory.mktemp("benchmarks")

    @cache
    def quick(name: str) -> Path:
        if name in ("verify", "cold"):
            skip_without_disk(gettempdir())
        result = directory / ("device-cpu.json" if name == "device" else f"{name}.json")
        run(name, "--quick", "--json", result, *(["--device", "cpu"] if name == "device" else []))
        return result

    return quick


@pytest.mark.long  # each takes four seconds to a minute
@pytest.mark.parametrize("name", FIGURES)
def test_quick(name, quick):
    path = quick(name)
    result = check_result(path, path.stem, FIGURES[name])
    if name in ("others", "augment", "forms"):
        assert not result["failed"]
    if name == "others":
        for part in result["works"].values():
            assert set(part["rows_per_second"]) == set(part["ratios"]) == set(result["machine"]["versions"])


@pytest.mark.long
def test_report(quick, tmp_path):
    results = [quick(name) for name in FIGURES]
    run("report", "--results", results[0].parent, "--docs", tmp_path)
    page = (tmp_path / DETAILS).read_text()
    assert page.count("quick run") == len(FIGURES)
    assert "Other loading libraries" in page
    first = (tmp_path / "benchmarks.md").read_text()
    assert "When not to use memfeed" in first
    assert "quick runs" in first
    for chart in ("others", "curves"):
        assert (tmp_path / f"{chart}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_weight(tmp_path):
    pytest.importorskip("torchvision")
    pytest.importorskip("kornia", reason="kornia is not installed: it comes with the extra 'dev'")
    run("weight", "--quick", "--json", tmp_path / "weight.json")
    check_result(tmp_path / "weight.json", "weight", "works")
    run("report", "--results", tmp_path, "--docs", tmp_path)
    assert "The weight of transforms" in (tmp_path / DETAILS).read_text()


def test_every_missed_target_has_a_reason():
    for path in RESULTS.glob("*.json"):
        for name, reason in reasons(path.stem, json.loads(path.read_text()).get("checks", [])):
            assert reason, f"{path.name}: {name} is missed; write the measured cause to benchmarks/missed.py"


def test_a_reason_stands_below_the_table():
    check = {"what": "to draw 256 of flips", "found": 21.0, "limit": 20, "at_least": False, "unit": "us"}
    missed = {"benchmark": "transforms", "checks": [{**check, "passed": False}]}
    assert "| **missed** |\n\nMissed, because:\n\n- **to draw 256 of flips**: drawing" in targets(missed)
    assert "because" not in targets({**missed, "checks": [{**check, "passed": True}]})
    unknown = {"benchmark": "loader", "checks": [{**check, "passed": False}]}
    assert "- **to draw 256 of flips**: the cause has not been measured." in targets(unknown)


def test_the_first_page_has_twelve_ratios_of_the_results_the_missed_ones_first():
    results = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    assert len(ratios(results)) == len(RATIOS) == 12
    verdicts = [line[-1] for line in ratios(results)]
    assert verdicts == sorted(verdicts)  # "**missed**" is before "reached"
    assert set(verdicts) == {"**missed**", "reached"}


def test_the_first_page_is_the_one_of_the_results_and_short():
    results = {name: path for name in SECTIONS if (path := RESULTS / f"{name}.json").exists()}
    results = {name: json.loads(path.read_text()) for name, path in results.items()}
    titles = {name: SECTIONS[name](result).partition("\n")[0].removeprefix("## ") for name, result in results.items()}
    page = (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text()
    assert page == first_page(results, titles)
    assert len(page.split()) < 900


def test_the_sections_of_a_gpu_say_what_was_measured_there():
    results = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("device-*.json")}
    placements = SECTIONS["device-cuda"](results["device-cuda"])
    assert placements.startswith("## From each placement, on a GPU\n")
    assert "| 2048 photographs: jpeg:90, decoded by the CPU | 253 ms | 8,079 |" in placements
    assert "| the caller's CPU time a step: with transforms | 137 us |  |" in placements
    assert "differ from those of libjpeg-turbo by 0.89 grey levels on average, and by 82 at most" in placements
    assert "0.053% of the time" in placements
    photographs = SECTIONS["device-cuda-photographs"](results["device-cuda-photographs"])
    assert "| memfeed, jpeg:90, nvJPEG | 1.06 s | 3,866 |" in photographs
    assert "| DataLoader | 3.95 s | 1,037 |" in photographs
    on_the_cpu = SECTIONS["device-cpu"](results["device-cpu"])
    assert "There was no GPU" in on_the_cpu
    assert "nvJPEG" not in on_the_cpu


def test_each_section_has_one_topic():
    assert sorted(name for names in TOPICS.values() for name in names) == sorted(SECTIONS)


@pytest.mark.real_data
@pytest.mark.long
def test_tutorial(photos, tmp_path):
    skip_without_disk(gettempdir())
    arguments = ["--quick", "--data", str(photos), "--json", str(tmp_path / "tutorial.json")]
    command = [sys.executable, str(BENCHMARKS / "tutorial.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = check_result(tmp_path / "tutorial.json", "tutorial", "parts")
    assert set(result["parts"]) == {"train", "val"}
    run("report", "--results", tmp_path, "--docs", tmp_path / "docs")
    page = (tmp_path / "docs" / DETAILS).read_text()
    assert "The tensorclass tutorial" in page
    assert "quick run" in page
    assert (tmp_path / "docs" / "tutorial.png").read_bytes().startswith(b"\x89PNG")


def test_tutorial_says_what_is_missing(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("tutorial", "--data", tmp_path)
    assert "hymenoptera_data" in capsys.readouterr().err


@pytest.mark.long
def test_first_epoch(tmp_path):
    found = tmp_path / "first_epoch.json"
    run("first_epoch", "--quick", "--json", found, "--dir", tmp_path)
    result = check_result(found, "first_epoch", "seconds")
    assert {*result["seconds"]} == {"photographs", "made images"}
    run("report", "--results", tmp_path, "--docs", tmp_path)
    page = (tmp_path / DETAILS).read_text()
    assert "## The first epochs" in page
    assert page.count("| filled while it is read |") == 2
