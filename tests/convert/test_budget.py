"""``budget=``: the fastest form that fits is chosen by measurement."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import memfeed
from memfeed.convert import budget
from memfeed.convert.budget import MeasuredForm, fastest_within
from memfeed.errors import SpaceError
from memfeed.schema.compare import equal
from memfeed.system import files
from memfeed.system.messages import format_bytes


class Smooth:
    """Images that JPEG makes small, and zstd not much."""

    def __len__(self):
        return 200

    def __getitem__(self, index):
        draw = np.random.default_rng(index)
        ramp = np.add.outer(np.arange(48) * 2, np.arange(64))[None] + draw.integers(0, 100, (3, 1, 1))
        noise = draw.integers(0, 6, (3, 48, 64))
        return torch.from_numpy(((ramp + noise) % 256).astype(np.uint8)), index


RAW_BYTES = 200 * (3 * 48 * 64 + 8)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(budget, "SECONDS", 0.05)


def codec_of(store):
    coding = store._view.manifest.schema.fields[0].coding
    return None if coding is None else coding.codec


def cached(path, **options):
    return memfeed.cache(Smooth(), path, workers=0, **options)


def test_what_fits_raw_may_stay_raw_and_a_line_says_so(tmp_path, capsys):
    store = cached(tmp_path / "s.mf", budget="1GB")
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith("memfeed: forms='")
    assert "rows/s a core; the next one is forms='" in line
    assert codec_of(store) in (None, "lz4", "zstd")
    assert equal(store[7], Smooth()[7])


def test_lossy_forms_are_taken_only_if_they_are_allowed(tmp_path, capsys):
    small = RAW_BYTES // 4
    with pytest.raises(SpaceError, match=r'no form of 200 rows that fits .*forms="lossy"'):
        cached(tmp_path / "s.mf", budget=small)
    assert not (tmp_path / "s.mf").exists()
    store = cached(tmp_path / "s.mf", budget=small, forms="lossy")
    assert codec_of(store) == "jpeg"
    assert store.nbytes < small
    assert "pixels differ by" in capsys.readouterr().err
    assert cached(tmp_path / "s.mf", budget=small) == store  # a store that exists is only opened


def test_a_store_beyond_the_budget_stays_as_it_is_and_a_line_says_so(tmp_path, capsys):
    cached(tmp_path / "s.mf")
    capsys.readouterr()
    store = cached(tmp_path / "s.mf", budget="1KB")
    assert f"has {format_bytes(store.nbytes)}, more than the budget of 1.0 KB, and stays" in capsys.readouterr().err
    cached(tmp_path / "s.mf", budget="1GB")
    assert capsys.readouterr().err == ""


def test_a_form_that_is_given_by_hand_stays(tmp_path):
    store = cached(tmp_path / "s.mf", budget="1GB", forms={0: "zstd:7"})
    assert store._view.manifest.schema.fields[0].coding.parameters == {"level": 7}


def test_the_choice_is_kept_while_the_store_is_built(tmp_path, monkeypatch):
    dataset, path = Smooth(), tmp_path / "s.mf"

    def breaks(self, index):
        if index == 155 and os.path.exists(away):
            raise OSError("the disk is away")
        return whole(self, index)

    whole, away = Smooth.__getitem__, tmp_path / "away"
    away.touch()
    monkeypatch.setattr(Smooth, "__getitem__", breaks)
    with pytest.raises(memfeed.errors.SampleError):
        memfeed.cache(dataset, path, budget=RAW_BYTES // 4, forms="lossy", workers=0, progress=False)
    away.unlink()
    monkeypatch.setattr(budget, "measure_forms", lambda *arguments: pytest.fail("measured again"))
    store = memfeed.cache(dataset, path, budget=RAW_BYTES // 4, forms="lossy", workers=0, progress=False)
    assert codec_of(store) == "jpeg"
    assert not (path / ".build").exists()


RANK = """
import sys
import memfeed
from memfeed.convert import budget
sys.path.insert(0, {tests!r})
from test_budget import RAW_BYTES, Smooth, codec_of
measured, measure = [], budget.measure_forms
budget.measure_forms = lambda *a: measured.append(1) or measure(*a)
if __name__ == "__main__":
    loader = memfeed.Loader(Smooth(), 50, cache=sys.argv[1], budget=RAW_BYTES // 4, forms="lossy")
    print(codec_of(loader.store), len(list(loader)), len(measured), flush=True)
    loader.store.finish()
"""


def test_processes_that_begin_together_take_one_form(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(tests=str(Path(__file__).parent)))
    command = [sys.executable, str(script), str(tmp_path / "s.mf")]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [rank.communicate(timeout=100) for rank in ranks]
    assert sorted(out for out, _ in said) == ["jpeg 4 0\n", "jpeg 4 1\n"], said
    assert codec_of(memfeed.open(tmp_path / "s.mf")) == "jpeg"


def test_the_fastest_form_that_fits():
    forms = [MeasuredForm("raw", 100, 9000), MeasuredForm("lz4", 60, 4000), MeasuredForm("zstd", 40, 1000)]
    assert [one and one.given for one in fastest_within(forms, 1000, 10)] == ["raw", "lz4"]
    assert [one and one.given for one in fastest_within(forms, 600, 10)] == ["lz4", "zstd"]
    assert [one and one.given for one in fastest_within(forms, 400, 10)] == ["zstd", None]
    with pytest.raises(SpaceError, match="the smallest is forms='zstd': 400 B"):
        fastest_within(forms, 399, 10)


@pytest.mark.parametrize("text", ["much", 0, -5, "60 apples"])
def test_a_budget_without_a_meaning(tmp_path, text):
    with pytest.raises(ValueError, match="expected bytes"):
        cached(tmp_path / "s.mf", budget=text)


def test_a_budget_needs_samples_by_number(tmp_path):
    with pytest.raises(ValueError, match="expected a map-style dataset"):
        memfeed.cache(iter([torch.zeros(3)] * 4), tmp_path / "s.mf", budget="1GB")


def test_a_full_disk_names_the_forms_that_fit(tmp_path, monkeypatch):
    free = files.free_bytes
    monkeypatch.setattr(files, "free_bytes", lambda path: RAW_BYTES // 2 if "here" in str(path) else free(path))
    (tmp_path / "here").mkdir()
    with pytest.raises(SpaceError, match=r"These forms fit: forms='jpeg:\d+': .*; forms='jpeg:") as raised:
        cached(tmp_path / "here" / "s.mf", progress=False)
    assert raised.value.errno == errno.ENOSPC
    assert "'zstd'" not in str(raised.value)
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("lazily", [False, True])
def test_a_store_that_fits_in_its_forms_is_written(tmp_path, monkeypatch, lazily):
    monkeypatch.setattr(files, "free_bytes", lambda path: RAW_BYTES // 2)
    with pytest.raises(SpaceError, match="bytes free"):
        memfeed.cache(Smooth(), tmp_path / "a.mf", lazily=lazily, progress=False)
    store = memfeed.cache(Smooth(), tmp_path / "b.mf", forms="jpeg:90", lazily=lazily, progress=False)
    store.finish()
    assert store.nbytes < RAW_BYTES // 2


def test_a_full_disk_of_temporary_files_too_hides_no_error(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/x")

    monkeypatch.setattr(files, "free_bytes", lambda path: 1000)
    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(SpaceError, match=r"s\.mf"):
        cached(tmp_path / "s.mf", progress=False)


def test_no_form_that_fits_leaves_nothing_behind(tmp_path):
    with pytest.raises(SpaceError, match="expected|Expected"):
        cached(tmp_path / "s.mf", budget=1000, progress=False)
    assert list(tmp_path.iterdir()) == []
