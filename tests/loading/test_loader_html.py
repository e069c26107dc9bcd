"""A loader in one line, and with its stats as HTML."""

import re
import time

import pytest
import torch

import memfeed
from html_pages import HOSTILE, WIDTHS, needs_chromium, require_harmless, widest_part
from memfeed.loading.epochs import Stats
from memfeed.loading.loader_html import count_text, placement_text, stats_parts
from memfeed.system.html_parts import page
from support import Made, cache

N = 12


def sample(i):
    return {"image": torch.full((3, 16, 16), i % 256, dtype=torch.uint8), "label": i}


@pytest.fixture
def store(tmp_path):
    return cache(Made(sample, N), tmp_path / "s.mf", workers=0)


def stats_with(**changed):
    made = {
        "epoch": 3, "batches": 5, "samples": 50, "seconds": 20.0, "samples_per_second": 2.0, "bytes": 2000,
        "bytes_per_second": 100.0, "wait_share": 0.25, "columns": {"x": "mapped"}, "placement": {"x": "no device"},
        "cold": None,
        "plan": {"batches": "measuring", "batches_per_gather": 4, "read_ahead": "off", "threads": {"most": 2}},
    }  # fmt: skip
    return Stats({**made, **changed})


def test_a_loader_before_its_first_epoch_begins_none(store):
    loader = memfeed.Loader(store, 4, shuffle=True)
    state = torch.get_rng_state()
    shown = require_harmless(loader._repr_html_())
    assert torch.equal(torch.get_rng_state(), state)
    assert (loader.seed, loader._clock.seed, loader._epochs.progress, loader._epochs.reader.plan) == (None,) * 4
    for part in (
        "Loader: 12 rows, 3 batches an epoch",
        "shuffle=True",
        "drawn when the first epoch begins",
        "[3, 16, 16]",
    ):
        assert part in shown
    assert "Epoch" not in shown
    assert require_harmless(loader.stats()._repr_html_()).startswith("No epoch has begun")


def test_a_loader_within_an_epoch_goes_on(store):
    loader = memfeed.Loader(store, 4, shuffle=True, seed=1)
    expected = [batch["label"].tolist() for batch in loader]
    loader.set_epoch(0)
    found = []
    for batch in loader:
        found.append(batch["label"].tolist())
        shown = require_harmless(loader._repr_html_())
    assert found == expected
    for part in ("Epoch 0: ", "Where columns are kept", "mapped: image, label", "How batches are made"):
        assert part in shown


def test_what_waits_for_what():
    html = stats_with()._repr_html_()
    assert re.findall(r"width:([\d.]+)%;background:var\(--(\w+)\)", html) == [
        ("25.00", "waiting"),
        ("75.00", "computing"),
    ]
    assert "5.0 s, 25%" in html
    assert "20 s from the first batch on" in html


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.05, "The program waits little"),
        (0.5, "The program waits for data in this part of its time"),
        (0.95, "nearly all of the time"),
    ],
)
def test_a_line_says_it_in_words(share, text):
    assert text in require_harmless(stats_with(wait_share=share)._repr_html_())


def test_after_one_batch_there_are_no_times(store):
    loader = memfeed.Loader(store, 4)
    _ = next(iter(loader))
    assert "Times are known from the second batch on" in require_harmless(loader.stats()._repr_html_())


def test_the_measured_times_are_those_of_the_stats(store):
    loader = memfeed.Loader(store, 1, transform=lambda batch: time.sleep(0.002) or batch)
    for _ in loader:
        time.sleep(0.01)
    stats = loader.stats()
    share = float(re.search(r"width:([\d.]+)%;background:var\(--waiting\)", stats._repr_html_())[1])
    assert share == pytest.approx(100 * stats["wait_share"], abs=0.01)
    assert 0 < share < 60


def test_names_and_values_run_nothing(store):
    names = dict.fromkeys(HOSTILE, HOSTILE[0])
    shown = require_harmless(stats_with(columns=names, placement=names)._repr_html_())
    assert all(name in shown for name in HOSTILE)

    class Lying:
        def __call__(self, batch):
            return batch

        def __repr__(self):
            return HOSTILE[0]

    class Raising(Lying):
        def __repr__(self):
            raise RuntimeError(HOSTILE[1])

    assert HOSTILE[0] in require_harmless(memfeed.Loader(store, 4, transform=Lying())._repr_html_())
    assert f"RuntimeError: {HOSTILE[1]}" in require_harmless(
        memfeed.Loader(store, 4, transform=Raising())._repr_html_()
    )


def test_of_many_columns_the_first_are_shown():
    names = {f"x{i}": "mapped" for i in range(50)}
    assert "and 10 more columns" in stats_with(columns=names, placement=names)._repr_html_()


def test_a_loader_that_fills_its_store_reads_no_row_of_the_dataset(tmp_path):
    read = []
    loader = memfeed.Loader(Made(lambda i: read.append(i) or sample(i), 300), 4, cache=tmp_path / "f.mf")
    count = len(read)
    shown = require_harmless(loader._repr_html_())
    assert len(read) == count
    assert "rows are there" in shown


@needs_chromium
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_a_screen(tmp_path, width):
    names = {"n" * 200: "w" * 100, "x": "mapped"}
    (tmp_path / "a.html").write_text(page("x", stats_parts(stats_with(columns=names, placement=names))))
    assert width / 2 < widest_part(tmp_path / "a.html", width, tmp_path) <= width


class Endless:
    def __iter__(self):
        return iter(range(4))


def test_the_line_of_a_loader():
    loader = memfeed.Loader({"x": torch.arange(8)}, 2, shuffle=True, seed=3)
    assert repr(loader) == (
        "Loader(8 rows, batch_size=2, shuffle=True, seed=3, 4 batches an epoch, device=cpu, placement='auto')"
    )
    next(iter(loader))
    assert placement_text(loader) == "mapped: x"


def test_a_rank_and_a_sampler_without_a_length():
    loader = memfeed.Loader({"x": torch.arange(8)}, 2, seed=3, ranks=(1, 2))
    assert "rank 1 of 2, 2 batches an epoch" in repr(loader)
    assert count_text(memfeed.Loader({"x": torch.arange(8)}, 2, sampler=Endless())) == "?"
