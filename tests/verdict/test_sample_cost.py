"""What each step of a sample costs, by name."""

import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from memfeed.verdict import sample_cost
from memfeed.verdict.sample_cost import DECODE, FILE, OWN, SLEEP, files_below, measure_samples, noted_files, size_of


class Wait:
    """A transform that takes a known time."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, value):
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        return value


class Long(Wait):
    pass


class Chain:
    def __init__(self, *parts):
        self.parts = parts

    def __call__(self, value):
        for part in self.parts:
            value = part(value)
        return value


class Numbers:
    def __init__(self, transform, slow=()):
        self.transform, self.slow = transform, slow

    def __len__(self):
        return 400

    def __getitem__(self, i):
        if i in self.slow:
            Wait(0.03)(i)
        return self.transform(i)


def shares(cost):
    return {one.name: one.share for one in cost.steps}


@pytest.fixture
def _own_time(monkeypatch):
    """Count the time of this thread alone: other processes take the cores meanwhile."""
    monkeypatch.setattr(sample_cost, "time", SimpleNamespace(perf_counter=time.thread_time))


@pytest.mark.usefixtures("_own_time")
def test_each_transform_has_its_own_time():
    cost = measure_samples(Numbers(Chain(Wait(0.001), Long(0.003))), range(20), 1)
    found = shares(cost)
    assert found["Long"] == pytest.approx(0.75, abs=0.1)
    assert found["Wait"] == pytest.approx(0.25, abs=0.1)
    assert sum(found.values()) == pytest.approx(1)
    assert sum(one.seconds for one in cost.steps) == pytest.approx(cost.seconds)
    assert cost.seconds >= 0.004
    assert sys.getprofile() is None


@pytest.mark.usefixtures("_own_time")
def test_the_slowest_one_per_cent_are_named():
    cost = measure_samples(Numbers(Wait(0.0001), slow=(7, 250)), range(400), 10)
    assert set(cost.slowest_rows) <= {7, 250} | set(range(400))
    assert {7, 250} <= set(cost.slowest_rows)
    assert cost.slowest_seconds > 10 * cost.median_seconds


@pytest.mark.usefixtures("_own_time")
def test_reading_and_decoding_files_are_apart(tmp_path):
    from torchvision.datasets import ImageFolder

    pixels = np.random.default_rng(0).integers(0, 256, (700, 700, 3), dtype=np.uint8)
    (tmp_path / "tree" / "a").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "tree" / "a" / "1.jpg")
    cost = measure_samples(ImageFolder(tmp_path / "tree", Wait(0.002)), [0] * 10, 1)
    found = shares(cost)
    assert found[DECODE] > found[OWN]
    assert found[FILE] > 0
    assert found["Wait"] > 0.02
    size = (tmp_path / "tree" / "a" / "1.jpg").stat().st_size
    assert cost.file_bytes == size  # ten samples share the file, and it is all of the dataset


class Sleeper:
    def __getitem__(self, i):
        time.sleep(0.002)
        return i


class Remote:
    def read(self):
        time.sleep(0.002)

    def __getitem__(self, i):
        return self.read()


@pytest.mark.parametrize(("dataset", "step"), [(Sleeper(), SLEEP), (Remote(), FILE)])
def test_waiting_is_named(dataset, step):
    assert shares(measure_samples(dataset, range(5), 1))[step] > 0.8


def test_an_error_of_the_dataset_leaves_no_profiler_and_no_other_open():
    own = open

    class Broken:
        def __getitem__(self, i):
            raise ValueError("unreadable")

    with pytest.raises(ValueError, match="unreadable"):
        measure_samples(Broken(), range(5), 1)
    assert open is own
    assert sys.getprofile() is None


def test_files_that_are_read_are_noted(tmp_path):
    (tmp_path / "a").write_text("abc")
    with noted_files() as found:
        (tmp_path / "a").read_text()
        (tmp_path / "b").write_text("abcd")
        open(tmp_path / "a", "rb").close()
    assert found == {str(tmp_path / "a")}
    assert sorted(files_below(tmp_path)) == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert size_of([str(tmp_path / "a"), str(tmp_path / "gone")]) == 3
