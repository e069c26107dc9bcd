"""The verdict as JSON, as a page and as a picture, and two verdicts beside each other."""

import dataclasses

import pytest
from made_loops import HELPS, measured, verdict
from PIL import Image

import memfeed
from html_pages import WIDTHS, needs_chromium, require_harmless, widest_part
from memfeed.errors import LoaderError
from memfeed.verdict.judge import Step
from memfeed.verdict.verdict import compare, load_verdict


def test_json_gives_the_verdict_back(tmp_path):
    one = verdict(HELPS)
    one.save(tmp_path / "a.json")
    assert load_verdict(tmp_path / "a.json") == one


@pytest.mark.parametrize("text", ["{}", "[1]", "not json", '{"kind": "maybe"}'])
def test_another_file_is_no_verdict(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(LoaderError, match="found no verdict .* expected a file of memfeed bench --json"):
        load_verdict(tmp_path / "a.json")


def test_a_verdict_of_another_format_is_refused(tmp_path):
    dataclasses.replace(verdict(HELPS), format=2).save(tmp_path / "a.json")
    with pytest.raises(LoaderError, match="found format 2; expected 1"):
        load_verdict(tmp_path / "a.json")


def test_the_page_is_one_file_without_scripts(tmp_path):
    one = verdict(HELPS, notes=("a note with <b>",), machine="a & b")
    one.save(tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    require_harmless(text)
    for part in (
        one.headline(),
        "prefers-color-scheme:dark",
        "RandomResizedCrop",
        "&#x27;encoded&#x27;",
        "a note with &lt;b&gt;",
    ):
        assert part in text
    shown = one._repr_html_()
    assert "<html" not in shown
    assert "RandomResizedCrop" in shown


@needs_chromium
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_a_screen(tmp_path, width):
    """No part of the page is wider than the screen, which is a frame here, because a window has a least width."""
    one = verdict(HELPS)
    steps = (*one.sample.steps, Step("A" * 60, 0.001, 0.1))
    dataclasses.replace(one, sample=dataclasses.replace(one.sample, steps=steps)).save(tmp_path / "a.html")
    assert width / 2 < widest_part(tmp_path / "a.html", width, tmp_path) <= width


def test_the_picture_has_pixels(tmp_path):
    pytest.importorskip("matplotlib")
    verdict(HELPS).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (1320, 648)
        assert len(image.convert("RGB").getcolors(10**6)) > 50


def test_a_file_of_another_kind_is_refused(tmp_path):
    with pytest.raises(LoaderError, match=r"ends in .json, .html or .png"):
        verdict(HELPS).save(tmp_path / "a.txt")


def test_stats_stand_beside_what_was_predicted():
    line = verdict(HELPS).beside({"samples_per_second": 1000.0, "wait_share": 0.25})
    assert line == "1,000 rows/s, predicted 909 (1.10 times); waiting 25% of the time, predicted 100%"
    with pytest.raises(LoaderError, match="without a loop of memfeed"):
        verdict(measured([1.0] * 5)).beside({})


FIVE = [10.0, 10.4, 9.8, 10.1, 10.2]


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        (FIVE, [13.0, 14.0, 12.9, 13.1, 15.0], "slower"),
        ([13.0, 14.0, 12.9, 13.1, 15.0], FIVE, "faster"),
        (FIVE, [12.0, 9.9, 14.0, 15.0, 13.0], "no difference"),
        (FIVE, [10.5, 10.6, 10.7, 10.5, 10.5], "no difference"),
    ],
)
def test_a_loop_is_slower_if_the_spreads_do_not_overlap(before, after, word):
    lines, is_slower = compare(verdict(measured(FIVE, memfeed=before)), verdict(measured(FIVE, memfeed=after)))
    assert is_slower == (word == "slower")
    assert word in next(line for line in lines if line.startswith("memfeed"))


def test_verdicts_of_two_programs_are_not_compared():
    one = verdict(HELPS)
    with pytest.raises(LoaderError, match="with machine 2 cores.* and 16 cores; expected the same program"):
        compare(one, dataclasses.replace(one, machine="16 cores"))
    with pytest.raises(LoaderError, match="with batch size 50 and 7"):
        compare(one, dataclasses.replace(one, batch_size=7))
    empty = memfeed.bench(iter([1]))
    with pytest.raises(LoaderError, match="found no loop that both"):
        compare(empty, empty)
