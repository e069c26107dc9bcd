"""The demo: its photos, its arithmetic, and whole runs of it on a few images."""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from memfeed.cli import main
from memfeed.cli.demo import EpochTiming, Result, run
from memfeed.cli.demo.chart import last_crossing, repeated, save_chart
from memfeed.cli.demo.photos import CLASSES, make_photos

REAL = Path(__file__).resolve().parents[3] / "shared/data/hymenoptera_data/train"


def result(plain_seconds: float = 4.0, fed_seconds: float = 1.0, cache_seconds: float = 5.0) -> Result:
    def epoch(seconds: float, waited: float) -> EpochTiming:
        return EpochTiming(((0.0, 0), (seconds / 2, 60), (seconds, 100)), waited)

    return Result(
        dataloader=epoch(plain_seconds, 0.75 * plain_seconds),
        memfeed=epoch(fed_seconds, 0.1 * fed_seconds),
        cache_seconds=cache_seconds,
        store_bytes=2_000_000,
        image_bytes=1_000_000,
        batch_size=60,
        workers=2,
        machine="a test",
    )


def printed(shown: Result) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(shown.table())
    return console.export_text()


# --- the photos


def test_photos_are_like_photographs_and_the_same_again(tmp_path: Path) -> None:
    done: list[int] = []
    total = make_photos(tmp_path / "a", 8, seed=3, advance=done.append)
    files = sorted((tmp_path / "a").rglob("*.jpg"))
    assert len(done) == len(files) == 8
    assert {file.parent.name for file in files} == set(CLASSES)
    assert total == sum(file.stat().st_size for file in files)
    for file in files:
        assert 50_000 < file.stat().st_size < 160_000
        with Image.open(file) as image:
            assert sorted(image.size) == [375, 500]
            pixels = np.asarray(image)
        assert pixels.std() > 20
    make_photos(tmp_path / "b", 8, seed=3)
    assert all((tmp_path / "b" / file.relative_to(tmp_path / "a")).read_bytes() == file.read_bytes() for file in files)
    make_photos(tmp_path / "c", 1, seed=4)
    first = Path(CLASSES[0]) / "00000.jpg"
    assert (tmp_path / "c" / first).read_bytes() != (tmp_path / "a" / first).read_bytes()


# --- the arithmetic


def test_an_epoch_knows_its_rate_and_wait() -> None:
    epoch = result().dataloader
    assert (epoch.samples, epoch.seconds, epoch.rate, epoch.wait_share) == (100, 4.0, 25.0, 0.75)


@pytest.mark.parametrize(
    ("plain", "fed", "cached", "epoch"),
    [(4.0, 1.0, 2.0, 1), (4.0, 1.0, 3.0, 2), (4.0, 1.0, 5.0, 2), (4.0, 3.5, 5.0, 11), (1.0, 1.0, 5.0, None)],
)
def test_break_even_is_the_first_epoch_that_ends_earlier(
    plain: float, fed: float, cached: float, epoch: int | None
) -> None:
    found = result(plain, fed, cached).break_even_epoch
    assert found == epoch
    if epoch is not None:
        assert cached + epoch * fed < epoch * plain
        assert not cached + (epoch - 1) * fed < (epoch - 1) * plain


def test_the_table_says_what_was_measured() -> None:
    text = printed(result())
    for shown in ("25", "100", "4.0x", "75%", "10%", "5.0 s", "in epoch 2", "a test", "2 workers"):
        assert shown in text
    assert "never" in printed(result(1.0, 2.0))


def test_an_epoch_is_repeated_and_memfeed_is_ahead_after_the_last_crossing() -> None:
    shown = result()
    slow, fast = repeated(shown.dataloader, 0.0, 10.0), repeated(shown.memfeed, 5.0, 10.0)
    assert slow[0].tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert slow[1].tolist() == [0, 60, 100, 160, 200, 260, 300]
    assert fast[0][:3].tolist() == [5, 5.5, 6]
    crossing = last_crossing(slow, fast, 10.0)
    assert crossing is not None
    assert crossing[0] == pytest.approx(20 / 3, abs=0.005)  # 160 + 80 (t - 6.5) = 160 + 20 (t - 6)
    assert crossing[1] == pytest.approx(520 / 3, abs=0.1)
    assert last_crossing(fast, slow, 10.0) is None


@pytest.mark.parametrize("shown", [result(), result(1.0, 2.0), result(4.0, 3.9), result(4.0, 0.01, 0.001)])
def test_every_outcome_can_be_drawn(shown: Result, tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    save_chart(shown, tmp_path / "demo.png")
    assert dict(matplotlib.rcParams) == before
    with Image.open(tmp_path / "demo.png") as image:
        image.load()
        assert image.size == (1560, 832)


# --- whole runs


def test_a_small_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    states = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate(), torch.get_num_threads())
    with open(tmp_path / "table.txt", "w") as file:
        measured = run(
            count=24, out=tmp_path / "demo.png", workers=0, progress=False, console=Console(file=file, width=100)
        )
    for epoch in (measured.dataloader, measured.memfeed):
        assert epoch.samples == 24
        assert len(epoch.steps) == 1 + 24 // measured.batch_size
        assert list(epoch.steps) == sorted(epoch.steps)
        assert 0 < epoch.wait_seconds < epoch.seconds
    assert measured.store_bytes == 24 * (3 * 256 * 256 + 8)
    assert measured.cache_seconds > 0
    text = (tmp_path / "table.txt").read_text()
    assert f"{measured.dataloader.rate:,.0f}" in text
    assert f"{measured.memfeed.wait_share:.0%}" in text
    with Image.open(tmp_path / "demo.png") as image:
        image.load()
    assert list((tmp_path / "scratch").iterdir()) == []
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate(), torch.get_num_threads())


@pytest.mark.real_data
@pytest.mark.skipif(not REAL.is_dir(), reason=f"no photographs at {REAL}")
def test_the_command_on_real_photographs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["demo", "--images", str(REAL), "--count", "24", "--workers", "2", "--progress"]
    assert main([*command, "--out", str(tmp_path / "real.png")]) == 0
    out, err = capsys.readouterr()
    assert "24 images" in out
    assert f"picture: {tmp_path / 'real.png'}" in out
    assert "DataLoader: 100%" in err
    assert "memfeed: 100%" in err
    assert (tmp_path / "real.png").stat().st_size > 10_000


def test_a_broken_photo_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_photos(tmp_path / "tree", 8)
    bad = tmp_path / "tree" / CLASSES[1] / "00001.jpg"
    bad.write_bytes(b"\xff\xd8 no photo")
    command = ["demo", "--images", str(tmp_path / "tree"), "--workers", "1", "--no-progress"]
    assert main([*command, "--out", str(tmp_path / "x.png")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"{bad}: found no image that can be decoded" in err


@pytest.mark.parametrize(("module", "extra"), [("torchvision", "vision"), ("matplotlib", "plots")])
def test_without_an_extra_it_says_how_to_get_it(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["demo"]) == 2
    assert f"pip install 'memfeed[{extra}]'" in capsys.readouterr().err


def test_a_place_for_the_picture_is_looked_for_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path / "nowhere" / "x.png")]) == 2
    assert "found no such directory" in capsys.readouterr().err
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "found a directory" in capsys.readouterr().err
