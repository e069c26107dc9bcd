"""Conversions that are killed, or that leave samples out, write the bytes of one that was not disturbed."""

import multiprocessing
import os
import random
import signal
import time

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from memfeed.building.rows import RowWriter
from memfeed.convert.probe import probe_indices
from memfeed.store.ragged import consecutive_starts, element_counts, open_rows
from support import Made, cache, equal, wait_until

HURT = {}  # what happens before a row is read; a process has a copy


class Drawn(Made):
    """Rows of drawn sizes, of which some take long."""

    def __init__(self, seed, n):
        draw = np.random.default_rng(seed)
        super().__init__(None, n)
        self.sizes = draw.integers(0, draw.choice([3, 500]), (2, n))
        self.sizes[:, draw.random(n) < draw.random()] = 0
        self.seconds = np.where(draw.random(n) < 0.02, 0.03, draw.random(n) * draw.choice([0.0, 0.002]))

    def __getitem__(self, index):
        time.sleep(self.seconds[index] * random.SystemRandom().random())
        HURT.get(index, lambda: None)()
        one, other = self.sizes[:, index].tolist()
        return {"a": torch.arange(one), "b": (f"{index}" * other, index), "c": torch.full((3, 2), index)}


def kill_worker():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_builder():
    os.kill(os.getppid() if get_worker_info() else os.getpid(), signal.SIGKILL)


def raises():
    raise ValueError("broken")


def ends():
    """End a worker, or raise in the process that has none."""
    return kill_worker() if get_worker_info() else raises()


def bytes_by_name(store):
    return {str(one.relative_to(store.path)): one.read_bytes() for one in store.path.rglob("*") if one.is_file()}


def is_in_order(store):
    """Rows lie one after the other, without gaps."""
    for field in store.schema:
        if field.kind != "fixed":
            starts, dims = open_rows(store.path, field, len(store))
            counts = element_counts(dims)
            size = (store.path / field.stem / "heap.bin").stat().st_size
            if (starts != consecutive_starts(counts, 0)).any() or size != counts.sum() * field.itemsize:
                return False
    return True


def convert_hurt(dataset, path, row, how, in_write, options):
    """Convert. A process is killed when it has read row ``row``, or written it, but for its presence."""
    mark = RowWriter.mark

    def hurt(writer, first, count, state):
        if first <= row < first + count and get_worker_info():
            time.sleep(0.1)  # others write the rows after it
            how()
        mark(writer, first, count, state)

    if in_write:
        RowWriter.mark = hurt
    else:
        HURT[row] = how
    cache(dataset, path, **options)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Let no list be written out of order because the machine is busy."""
    monkeypatch.setattr("memfeed.convert.jobs.MOST_SECONDS", 600.0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("how", [kill_builder, kill_worker])
@pytest.mark.parametrize("in_write", [False, True])
def test_a_conversion_that_was_killed_writes_the_same_bytes(tmp_path, seed, how, in_write):
    draw = np.random.default_rng(seed)
    n = int(draw.integers(100, 600))
    expected = cache(Drawn(seed, n), tmp_path / "expected.mf", workers=0)
    path, kills = tmp_path / "a.mf", 0
    for row in sorted(draw.integers(0, n - 1, 3).tolist()):
        options = {"workers": int(draw.integers(2, 5))}
        killed = multiprocessing.get_context("fork").Process(
            target=convert_hurt, args=(Drawn(seed, n), path, row, how, in_write, options)
        )
        killed.start()
        killed.join(60)
        kills += killed.exitcode != 0
    assert kills
    store = cache(Drawn(seed, n), path, workers=int(draw.integers(0, 4)))
    assert is_in_order(store)
    assert bytes_by_name(store) == bytes_by_name(expected)


def test_rows_after_a_sample_that_takes_very_long_are_written_before_it(tmp_path, monkeypatch):
    """Else a kill, or a sample that blocks for ever, would cost all of them."""
    monkeypatch.setattr("memfeed.convert.jobs.MOST_SECONDS", 0.2)
    presence, found = tmp_path / "a.mf.build" / ".build" / "presence", tmp_path / "found"
    dataset, row = Drawn(1, 400), next(row for row in range(30, 400) if row not in probe_indices(400))

    def look():
        if get_worker_info():
            wait_until(lambda: np.count_nonzero(np.fromfile(presence, np.uint8)[row + 1 :]) >= 200, 20)
            found.write_text("True")

    monkeypatch.setitem(HURT, row, look)
    store = cache(dataset, tmp_path / "a.mf", workers=2)
    assert found.read_text() == "True"
    assert not is_in_order(store)
    monkeypatch.delitem(HURT, row)
    assert all(equal(one, dataset[i]) for i, one in enumerate(store))
    store.verify()


@pytest.mark.parametrize("seed", range(2))
def test_samples_that_are_left_out_leave_no_gaps(tmp_path, seed, monkeypatch):
    """Also where they end the worker, after it has asked for the space of other rows."""
    n = 200
    rows = np.random.default_rng(seed).integers(20, n - 1, 3).tolist()
    options = {"on_error": "skip"}
    for row in rows:
        monkeypatch.setitem(HURT, row, ends)
    expected = cache(Drawn(seed, n), tmp_path / "expected.mf", workers=0, **options)
    assert is_in_order(expected)
    with pytest.warns(RuntimeWarning, match="is left out"):
        store = cache(Drawn(seed, n), tmp_path / "a.mf", workers=3, **options)
    assert bytes_by_name(store) == bytes_by_name(expected)


def test_rows_that_a_dead_worker_had_asked_space_for_go_there(tmp_path, monkeypatch):
    """Of lists of 30 rows the second waits for the first, and its worker dies while it reads the fourth."""
    slow, dies = (next(row for row in range(first, 200) if row not in probe_indices(200)) for first in (5, 100))
    monkeypatch.setitem(HURT, slow, lambda: time.sleep(0.3))
    monkeypatch.setitem(HURT, dies, lambda: time.sleep(0.6 if get_worker_info() else 0) or ends())
    options = {"on_error": "skip"}
    dataset = Drawn(0, 200)
    dataset.seconds[:] = 0.002
    expected = cache(dataset, tmp_path / "expected.mf", workers=0, **options)
    with pytest.warns(RuntimeWarning, match="is left out"):
        store = cache(dataset, tmp_path / "a.mf", workers=2, **options)
    assert bytes_by_name(store) == bytes_by_name(expected)


def test_a_worker_that_may_keep_nothing_waits_for_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr("memfeed.convert.jobs.MOST_BYTES_READ", 0)
    one, other = (cache(Drawn(0, 500), tmp_path / f"{workers}.mf", workers=workers) for workers in (0, 3))
    assert bytes_by_name(one) == bytes_by_name(other)
