"""``memfeed cache --dry-run``, ``--split``, and ``--form``."""

import re

import numpy as np
import pytest
from PIL import Image

import memfeed
from memfeed.cli import main
from memfeed.convert import budget

CODE = """
import torch
from torchvision.datasets import ImageFolder
from torchvision.transforms import transforms as v1

def train():
    return ImageFolder("tree", v1.Compose([v1.RandomResizedCrop(24), v1.ToTensor()]))

def floats():
    return [(torch.rand(30, generator=torch.Generator().manual_seed(i)), i) for i in range(9)]

def columns():
    return torch.rand(9, 30), torch.arange(9)

def empty():
    return []

class Broken:
    def __len__(self):
        return 3

    def __getitem__(self, i):
        if i == 0:
            raise ValueError("unreadable")
        return torch.tensor(i)

def broken():
    return Broken()

def stream():
    yield 1
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(budget, "SECONDS", 0.01)
    (tmp_path / "dry_data.py").write_text(CODE)
    monkeypatch.delitem(__import__("sys").modules, "dry_data", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    for i in range(6):
        (tmp_path / "tree" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (10, 12 + i % 3, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize((300 + 20 * (i % 3), 280))
        image.save(tmp_path / "tree" / "ab"[i % 2] / f"{i}.jpg", quality=80)


def table(text):
    """Return the figures of each form in a table: bytes a row, in all, rows a second."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return {line[0]: line[1:] for line in lines if len(line) == 4 and line[0] != "forms="}


def test_images_are_measured_in_each_form(tmp_path, capsys):
    assert main(["cache", "--images", "tree", "out.mf", "--dry-run"]) == 0
    rows = table(capsys.readouterr().out)
    assert {"'raw'", "'zstd'", "'jpeg:95'", "'jpeg:90'"} <= set(rows)
    assert not any("float" in name for name in rows)  # pixels are no floats
    assert all(float(row[-1].replace(",", "")) > 0 for row in rows.values())
    assert not (tmp_path / "out.mf").exists()


def test_a_pipeline_with_a_choice_shows_it(capsys):
    assert main(["cache", "dry_data:train", "out.mf", "--split", "--dry-run"]) == 0
    assert {"'full'", "'encoded'", "256", "(256, 'jpeg:90')"} <= set(table(capsys.readouterr().out))


def test_floats_are_measured_in_16_bits(capsys):
    assert main(["cache", "dry_data:floats", "out.mf", "--dry-run"]) == 0
    found = set(table(capsys.readouterr().out))
    assert {"'raw'", "'zstd'", "{float: torch.float16}", "{float: torch.bfloat16}"} <= found
    assert not any("jpeg" in name for name in found)


def test_the_chosen_form_is_stored(tmp_path, capsys):
    assert main(["cache", "dry_data:train", "a.mf", "--split", "--form", "encoded", "--no-progress"]) == 0
    assert memfeed.open(tmp_path / "a.mf").schema.fields[0].kind == "bytes"
    assert main(["cache", "dry_data:train", "b.mf", "--split", "--form", "64", "--no-progress"]) == 0
    assert min(memfeed.open(tmp_path / "b.mf")[0][0].shape[1:]) == 64
    assert main(["cache", "dry_data:floats", "c.mf", "--form", "float=float16", "--no-progress"]) == 0
    assert memfeed.open(tmp_path / "c.mf").schema.fields[0].dtype == "float16"
    assert main(["cache", "dry_data:train", "d.mf", "--split"]) == 0
    assert "forms='full'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dry_data:stream", "out.mf"], "for an iterable; expected a dataset with len and []"),
        (["dry_data:columns", "out.mf"], "for columns"),
        (["dry_data:empty", "out.mf"], "empty dataset"),
        (["dry_data:broken", "out.mf"], "sample 0: the dataset raised ValueError: unreadable"),
        (["dry_data:missing", "out.mf"], "no 'missing'"),
        (["dry_data:floats", "out.mf", "--form", "256"], "forms=256 without split"),
        (["dry_data:train", "out.mf", "--split", "--form", "3"], "8 or more"),
        (["dry_data:train", "out.mf", "--split", "--form", "half"], "8 or more"),
        (["dry_data:floats", "out.mf", "--form", "float=float32"], "float16"),
        (["dry_data:floats", "out.mf", "--form", "0=float1"], "a dtype, a codec as"),
        (["dry_data:floats", "out.mf", "--repair"], "--repair or --length"),
        (["dry_data:stream", "out.mf", "--length", "3"], "--repair or --length"),
        (["out.mf"], "memfeed cache module:factory OUT"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_status_2(arguments, said, tmp_path, capsys):
    assert main(["cache", *arguments, "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 1
    assert said in err
    assert not (tmp_path / "out.mf").exists()


def test_the_options_that_shape_a_store_count_in_a_dry_run(capsys):
    def bytes_of(*options):
        assert main(["cache", "dry_data:floats", "out.mf", "--dry-run", *options]) == 0
        return table(capsys.readouterr().out)["'raw'"][0]

    assert (bytes_of(), bytes_of("--form", "0=float64")) == ("128 B", "248 B")
    assert main(["cache", "dry_data:broken", "out.mf", "--dry-run", "--on-error", "skip"]) == 0
    assert "3 rows" in capsys.readouterr().out
