"""Ctrl-C and SIGTERM while a program trains from a store that is filled."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

import memfeed
from forked_programs import Program
from memfeed.convert import driver
from memfeed.errors import BuildError
from support import Made, cache, processes_of, wait_until

ROWS = 400
PROGRAM = f"""
import signal, sys, time, torch, memfeed

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background programs ignore it
torch.multiprocessing.set_start_method("fork")  # the dataset is no module's

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return {ROWS}

    def __getitem__(self, i):
        time.sleep(0.02)
        return {{"x": torch.full((5,), i)}}

for batch in memfeed.Loader(Slow(), 4, shuffle=True, num_workers=int(sys.argv[2]), cache=sys.argv[1]):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGINT, 2),
        pytest.param(signal.SIGINT, 0, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.long),
    ],
)
def test_no_row_is_lost_and_no_process_is_left(number, workers, tmp_path):
    path, read = tmp_path / "s.mf", []
    presence = tmp_path / "s.mf.build" / ".build" / "presence"
    arguments = [sys.executable, "-c", PROGRAM, str(path), str(workers)]
    program = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 120
    while not presence.exists() or np.count_nonzero(np.fromfile(presence, np.uint8)) < 40:
        assert program.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if number == signal.SIGINT:
        os.killpg(program.pid, number)  # as a terminal does
    else:
        program.terminate()
    _, told = program.communicate(timeout=120)
    assert program.returncode == -number, told
    wait_until(lambda: not processes_of(program.pid))
    present = np.flatnonzero(np.fromfile(presence, np.uint8)).tolist()
    kept = [line for line in told.splitlines() if "rows are kept; the same call goes on from there" in line]
    assert len(kept) == (number == signal.SIGINT)
    if kept:
        assert f"{len(present)} of {ROWS} rows" in kept[0]
        assert told.count("Traceback") == 1, "workers say nothing"

    def sample(i):
        if get_worker_info() is None and Path(tmp_path / "s.mf.build").exists():
            read.append(i)
        return {"x": torch.full((5,), i)}

    cache(Made(sample, ROWS), path, lazily=True, workers=0).finish()
    store = memfeed.open(path)
    assert torch.equal(store.column("x")[:, 0], torch.arange(ROWS))
    probed = len(store._view.manifest.fingerprint.probes)
    assert len(set(read) & set(present)) <= 2 * probed  # the probe, and the check before the commit


NOTEBOOK = """
import os, signal, sys, torch, memfeed

signal.signal(signal.SIGINT, signal.default_int_handler)
torch.multiprocessing.set_start_method("fork", force=True)  # the dataset is no module's

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, i):
        return {"x": torch.full((5,), i)}

loader = memfeed.Loader(Rows(), 4, shuffle=True, num_workers=2, cache=sys.argv[1])
for cell in range(3):  # the third is not interrupted
    found = []
    try:
        for batch in loader:
            found += batch["x"][:, 0].tolist()
            if len(found) == 8 and cell < 2:
                os.killpg(0, signal.SIGINT)  # as a notebook's button does
    except KeyboardInterrupt:
        continue
assert cell == 2 and sorted(found) == list(range(60)), found
loader.store.finish()
"""


def test_a_loader_goes_on_after_an_interrupt(tmp_path):
    """Ctrl-C in a notebook reaches the workers too, and the program goes on."""
    notebook = Program(NOTEBOOK, tmp_path / "s.mf", at=tmp_path)
    assert notebook.wait() == 0, notebook.err.read_text()
    assert "Traceback" not in notebook.err.read_text()
    assert torch.equal(memfeed.open(tmp_path / "s.mf").column("x")[:, 0], torch.arange(60))


class Interrupted(Made):
    """Interrupts the worker that reads a sample of ``at``: ``times`` times in all, counted in a file."""

    def __init__(self, n, at, times, log):
        super().__init__(lambda i: {"x": torch.full((5,), i)}, n)
        self.at, self.times, self.log = at, times, log

    def __getitem__(self, index):
        if get_worker_info() is not None and self.at(index):
            count = self.log.stat().st_size if self.log.exists() else 0
            if count < self.times:
                with open(self.log, "a") as file:
                    file.write("x")
                raise KeyboardInterrupt
        return super().__getitem__(index)


def test_an_interrupt_of_the_check_before_the_commit(tmp_path):
    presence = tmp_path / "s.mf.build" / ".build" / "presence"
    full = Interrupted(40, lambda _: 0 not in presence.read_bytes(), 1, tmp_path / "log")
    cache(full, tmp_path / "s.mf", lazily=True, workers=1).finish()
    assert (tmp_path / "log").read_text() == "x"
    assert len(memfeed.open(tmp_path / "s.mf")) == 40


def test_a_sample_that_interrupts_each_worker_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "INTERRUPT_SECONDS", 0.01)
    monkeypatch.setattr(driver, "MOST_INTERRUPTS", 2)
    dataset = Interrupted(40, lambda i: i == 30, 1000, tmp_path / "log")
    store = cache(dataset, tmp_path / "s.mf", lazily=True, workers=1)
    with pytest.raises(BuildError, match="interrupted by SIGINT.*the rows that were written are kept"):
        store.finish()
    assert len((tmp_path / "log").read_text()) >= 3  # more while other rows are written


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_time_limit_of_the_caller_is_no_error_of_the_sample(on_error, path):
    armed = []

    def too_long(*_):
        raise TimeoutError("the epoch took too long")

    def sample(i):
        if armed and i >= 20:
            armed.clear()
            signal.raise_signal(signal.SIGALRM)
        return torch.full((2,), i)

    before = signal.signal(signal.SIGALRM, too_long)
    try:
        store = cache(Made(sample, 50), path, lazily=True, workers=0, on_error=on_error)
        loader = memfeed.Loader(store, 10)
        armed.append(True)
        with pytest.raises(TimeoutError, match="the epoch took too long"):
            list(loader)
    finally:
        signal.signal(signal.SIGALRM, before)
    store.finish()
    assert [row[0].item() for row in store] == list(range(50))


class Counted(torch.utils.data.Dataset):
    """A dataset whose reads are counted: a time limit of the caller comes at one of them."""

    def __init__(self, at):
        self.tick = Tick(at)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor(self.tick(float(index)))


class Flipped(Counted):
    def __init__(self, at):
        super().__init__(at)
        self.transform = lambda x: self.tick(-x if random.random() < 0.5 else x)

    def __getitem__(self, index):
        return torch.tensor(self.transform(float(index)))


class Together(Counted):
    def __getitems__(self, indices):
        return [torch.tensor(self.tick(float(index))) for index in indices]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, at):
        self.tick = Tick(at)

    def __iter__(self):
        return (torch.tensor(self.tick(float(index))) for index in range(40))


class Tick:
    count = 0

    def __init__(self, at):
        self.at = at

    def __call__(self, value):
        Tick.count += 1
        if Tick.count == self.at:
            signal.raise_signal(signal.SIGALRM)
        return value


@pytest.mark.parametrize("kind", [Counted, Flipped, Together, Stream])
def test_a_time_limit_of_the_caller_arrives_whatever_is_read(path, kind, monkeypatch):
    def limit(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, limit)
    try:
        for at in (1, 2, 5, 18, 33, 40):
            monkeypatch.setattr(Tick, "count", 0)
            with pytest.raises(TimeoutError):
                list(memfeed.Loader(kind(at), 5, cache=path.with_name(f"{at}.mf")))
    finally:
        signal.signal(signal.SIGALRM, before)
