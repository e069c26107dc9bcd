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
from memfeed.cli.demo.result import Run, last_crossing, load_result, save_chart
from memfeed.cli.demo.side_by_side import CLASSES, EPOCHS, make_photos

REAL = Path(__file__).resolve().parents[3] / "shared/data/hymenoptera_data/train"


def run_of(*seconds: float, waited: float = 0.5) -> Run:
    return Run(tuple(EpochTiming(((0.0, 0), (one / 2, 60), (one, 100)), waited * one) for one in seconds))


def result(plain: Run | None = None, fed: Run | None = None) -> Result:
    return Result(
        dataloader=plain or run_of(4.0, 4.0, 4.0, waited=0.75),
        memfeed=fed or run_of(6.0, 1.0, 1.0, waited=0.1),
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


def test_a_run_knows_its_rate_and_wait() -> None:
    run = run_of(4.0, 1.0, 3.0, waited=0.25)
    assert (run.epochs[0].samples, run.epochs[0].seconds) == (100, 4.0)
    assert (run.seconds, run.rate, run.wait_share) == (8.0, 37.5, 0.25)
    assert (run.first.seconds, run.first.rate) == (4.0, 25.0)
    assert (run.later.seconds, run.later.rate) == (4.0, 50.0)


def test_a_line_has_all_epochs_one_after_another() -> None:
    seconds, samples = run_of(4.0, 1.0, 2.0).line()
    assert seconds.tolist() == [0, 2, 4, 4.5, 5, 6, 7]
    assert samples.tolist() == [0, 60, 100, 160, 200, 260, 300]


def test_memfeed_is_ahead_after_the_last_crossing() -> None:
    slow, fast = run_of(4.0, 4.0, 4.0).line(), run_of(6.0, 1.0, 1.0).line()
    crossing = last_crossing(slow, fast, 8.0)
    assert crossing is not None
    assert crossing[0] == pytest.approx(6.5, abs=0.5)
    assert crossing[1] == pytest.approx(np.interp(crossing[0], *slow), abs=0.1)
    assert last_crossing(fast, slow, 8.0) is None
    assert result().ahead == crossing
    assert result(fed=run_of(9.0, 4.0, 4.0)).ahead is None
    assert result(fed=run_of(1.0, 1.0, 1.0)).ahead == (0.0, 0.0)


def test_the_table_says_what_was_measured() -> None:
    text = printed(result())
    for shown in ("100 images", "3 epochs", "6.0 s", "0.7x", "4.0x", "1.5x", "75%", "10%", "a test"):
        assert shown in text
    assert "after 6." in text
    assert "not in 3 epochs" in printed(result(fed=run_of(9.0, 4.0, 4.0)))


def test_what_was_measured_is_kept_as_json(tmp_path: Path) -> None:
    result().save(tmp_path / "a.json")
    assert load_result(tmp_path / "a.json") == result()


@pytest.mark.parametrize(
    "shown",
    [result(), result(run_of(1.0, 1.0), run_of(2.0, 2.0)), result(fed=run_of(0.1, 0.001, 0.001))],
    ids=["later", "never", "at once"],
)
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
    for timed in (measured.dataloader, measured.memfeed):
        assert len(timed.epochs) == EPOCHS
        for epoch in timed.epochs:
            assert epoch.samples == 24
            assert len(epoch.steps) == 1 + 24 // measured.batch_size
            assert list(epoch.steps) == sorted(epoch.steps)
            assert 0 < epoch.wait_seconds < epoch.seconds
    assert measured.store_bytes == 24 * (3 * 256 * 256 + 8)
    assert load_result(tmp_path / "demo.json") == measured
    text = (tmp_path / "table.txt").read_text()
    assert f"all {EPOCHS} epochs" in text
    assert f"{measured.memfeed.later.wait_share:.0%}" in text
    with Image.open(tmp_path / "demo.png") as image:
        image.load()
    assert list((tmp_path / "scratch").glob("memfeed*")) == []  # torch leaves a directory of its own
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate(), torch.get_num_threads())


@pytest.mark.real_data
@pytest.mark.skipif(not REAL.is_dir(), reason=f"no photographs at {REAL}")
def test_the_command_on_real_photographs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["demo", "--images", str(REAL), "--count", "24", "--workers", "2", "--progress"]
    assert main([*command, "--out", str(tmp_path / "real.png")]) == 0
    out, err = capsys.readouterr()
    assert "24 images" in out
    assert f"picture: {tmp_path / 'real.png'}, drawn from {tmp_path / 'real.json'}" in out
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


def test_the_picture_of_the_first_page_has_its_times_beside_it() -> None:
    shown = load_result(Path(__file__).resolve().parents[2] / "docs" / "demo.json")
    assert len(shown.dataloader.epochs) == len(shown.memfeed.epochs) == EPOCHS
    assert {epoch.samples for run in (shown.dataloader, shown.memfeed) for epoch in run.epochs} == {1000}
