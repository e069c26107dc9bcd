"""``memfeed bench``: its options, its files, and its exit status."""

import json
import sys

import pytest

from memfeed.cli import main

CODE = """
import time
import torch
from torch.utils.data import DataLoader

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, i):
        time.sleep(0.001)
        return torch.full((8,), float(i)), i

def make_loader():
    return DataLoader(Slow(), 8, shuffle=True)

def step(batch):
    assert len(batch) == 2
    time.sleep(0.001)

def make_step():
    return step

def stream():
    yield 1
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench_data.py").write_text(CODE)
    monkeypatch.delitem(sys.modules, "bench_data", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("step", ["step", "make_step"])
def test_a_program_is_measured_and_written_to_files(step, tmp_path, capsys):
    files = ["--json", "v.json", "--html", "v.html", "--png", "v.png"]
    assert main(["bench", "bench_data:make_loader", "--step", f"bench_data:{step}", "--seconds", "1", *files]) == 0
    out = capsys.readouterr().out
    assert out.startswith(("helps: ", "does not help, because ", "cannot tell, because "))
    assert len(out.splitlines()) <= 13
    assert "a batch of 8" in out
    assert json.loads((tmp_path / "v.json").read_text())["batch_size"] == 8
    assert (tmp_path / "v.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "v.png").read_bytes()[1:4] == b"PNG"


def test_a_picture_without_matplotlib_is_an_error_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "bench_data:not_there", "--png", "v.png"]) == 2
    assert "pip install 'memfeed[plots]'" in capsys.readouterr().err


def test_a_dry_run_prints_the_price_list_alone(tmp_path, capsys):
    assert main(["bench", "bench_data:make_loader", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("200 rows; measured with 64 of them")
    assert lines[2].startswith("'raw'")
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".py" and path.name != "__pycache__"] == []


def slower(tmp_path, factor):
    text = json.loads((tmp_path / "a.json").read_text())
    for turn in text["today"]["turns"]:
        turn["waiting"] *= factor
    (tmp_path / "b.json").write_text(json.dumps(text))


def test_the_status_of_a_comparison_is_for_ci(tmp_path, capsys):
    assert main(["bench", "bench_data:make_loader", "--seconds", "1", "--json", "a.json"]) == 0
    slower(tmp_path, 1.0)
    assert main(["bench", "--compare", "a.json", "b.json"]) == 0
    slower(tmp_path, 100.0)
    capsys.readouterr()
    assert main(["bench", "--compare", "a.json", "b.json"]) == 1
    out, err = capsys.readouterr()
    assert "slower" in out
    assert not err
    (tmp_path / "b.json").write_text("{}")
    assert main(["bench", "--compare", "a.json", "b.json"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench_data:missing"], "no 'missing'"),
        (["bench_data:make_loader", "other"], "one module:factory"),
        (["--compare", "a.json"], "found 1 files beside --compare"),
        (["--compare", "a.json", "b.json"], "a.json: No such file"),
        (["bench_data:make_loader", "--html", "v.txt"], "expected a name that ends in .html"),
        (["bench_data:make_loader", "--json", "gone/v.json"], "in a directory that exists"),
        (["bench_data:make_loader", "--workers", "2"], "or --workers; expected its own"),
        (["bench_data:stream", "--dry-run"], "for an iterable"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_status_2(arguments, said, capsys):
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 1
    assert said in err
