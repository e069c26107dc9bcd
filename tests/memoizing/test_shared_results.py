"""Many processes fill one path, and some are killed: each value right, none computed by two that both live."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import memfeed
from disk.mounts import mounted, run
from forked_programs import Program, run_program
from memfeed.memoizing import kept
from support import wait_until

KEYS = 200
WORKER = """
import os, random, sys, time
import numpy as np
import memfeed

folder, keys, pause, size = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] or None
log = os.open(os.path.join(folder, f"log-{os.getpid()}"), os.O_CREAT | os.O_APPEND | os.O_WRONLY)

@memfeed.memoize(os.path.join(folder, "r.mf"), version=1, size=size)
def load(number):
    begin = time.monotonic_ns()
    time.sleep(pause)
    value = np.full(number % 7 * 100 + 1, number, np.int32), str(number)
    # one write, when it is done: what a kill cuts short is not there
    os.write(log, f"{number} {begin} {time.monotonic_ns()} {os.getpid()}\\n".encode())
    return value

print("ready", flush=True)
while not os.path.exists(os.path.join(folder, "go")):
    time.sleep(0.001)
order = list(range(keys))
random.Random(os.getpid()).shuffle(order)
for number in order:
    array, text = load(number)
    assert text == str(number) and (array == number).all() and len(array) == number % 7 * 100 + 1, number
"""


def begin(folder: Path, count: int, keys: int, pause: float, size: str = "") -> list[Program]:
    """Start jobs that wait until all of them are ready."""
    (folder / "go").unlink(missing_ok=True)
    jobs = [Program(WORKER, folder, keys, pause, size, at=folder) for _ in range(count)]
    for job in jobs:
        wait_until(lambda job=job: job.out.read_text() == "ready\n" or job.process.exitcode is not None)
    (folder / "go").touch()
    return jobs


def computed(folder: Path) -> list[tuple[int, int, int, int]]:
    """Return number, begin, end and process of each computation that ended."""
    lines = [line for path in folder.glob("log-*") for line in path.read_text().splitlines()]
    return [tuple(map(int, line.split())) for line in lines]


def check(folder: Path, kills: int, keys: int) -> None:
    """Check that the rows are right, and how often a key was computed."""
    store = memfeed.open(folder / "r.mf")
    store.verify()
    rows = [store[i] for i in range(len(store))]
    numbers = [row["key"]["arguments"]["number"] for row in rows]
    assert sorted(numbers) == list(range(keys))
    for number, row in zip(numbers, rows, strict=True):
        assert (row["result"][0].numpy() == number).all()
        assert row["result"][1] == str(number)
    # the first 16 keys are computed twice; a kill costs the row under way, and one proof of it that is repeated
    spans = computed(folder)
    again = len(spans) - keys
    assert again <= 2 * 16 + 8 + 2 * kills, f"{again} computed again after {kills} kills"
    ends: dict[int, tuple[int, int]] = {}
    for number, begun, ended, pid in sorted(spans, key=lambda span: span[1]):
        if number in ends and ends[number][1] != pid:
            assert ends[number][0] <= begun, f"two processes computed {number} at the same time"
        ends[number] = (ended, pid)


def test_four_processes_compute_each_key_once(tmp_path):
    for job in begin(tmp_path, 4, KEYS, 0.001):
        assert job.wait() == 0, job.err.read_text()
    check(tmp_path, 0, KEYS)


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.long)])
def test_processes_are_killed_while_they_fill_one_path(tmp_path, kills):
    keys, draw, killed = 60 * kills + 500, random.Random(kills), 0
    jobs = begin(tmp_path, 4, keys, 0.002)
    deadline = time.monotonic() + 200
    while killed < kills and time.monotonic() < deadline:
        time.sleep(draw.uniform(0.02, 0.1))
        victim = jobs.pop(draw.randrange(len(jobs)))
        if victim.process.exitcode is None:
            victim.process.kill()
            killed += 1
        assert victim.wait() in (0, -signal.SIGKILL), victim.err.read_text()
        if victim.wait() == 0 and len(computed(tmp_path)) >= keys:
            break
        jobs += begin(tmp_path, 1, keys, 0.002)
    for job in jobs:
        assert job.wait() == 0, job.err.read_text()
    assert killed > 0
    check(tmp_path, killed, keys)
    assert np.all(np.fromfile(tmp_path / "r.mf" / ".build" / "presence", np.uint8) != 0)


def test_results_are_dropped_while_processes_are_killed(tmp_path):
    keys, draw = 150, random.Random(1)
    jobs = begin(tmp_path, 3, keys, 0.0, "100KB")
    for _ in range(4):
        time.sleep(draw.uniform(0.05, 0.3))
        victim = jobs.pop(0)
        victim.process.kill()
        assert victim.wait() in (0, -signal.SIGKILL), victim.err.read_text()
        jobs += begin(tmp_path, 1, keys, 0.0, "100KB")
    for job in jobs:
        assert job.wait() == 0, job.err.read_text()
    store = memfeed.open(tmp_path / "r.mf")
    store.verify()
    assert 10 < len(store) < keys  # about 1,300 bytes each


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk_costs_a_warning_and_no_value(tmp_path, kind):
    with mounted(tmp_path / "disk", kind, 8_000_000) as at:
        load = memfeed.memoize(np.full, at / "r.mf", version=1)
        kept._warned.clear()
        with pytest.warns(UserWarning, match="results of full are computed and not kept") as warned:
            for _ in range(2):
                for value in range(20):
                    assert (load(100_000, value) == value).all()
        assert len(warned) == 1
        assert load.report().hits > 0
        memfeed.open(at / "r.mf").verify()
        kept._memos.clear()


def test_a_disk_that_cannot_be_written_is_read(tmp_path):
    with mounted(tmp_path / "disk", "tmpfs", 8_000_000) as at:
        make = f"import memfeed, numpy; memfeed.memoize(numpy.full, {str(at / 'r.mf')!r}, version=1)(10, 3)"
        run_program(make, at=tmp_path)
        run("mount", "-o", "remount,ro", str(at))
        kept._warned.clear()
        for mapped in False, True:
            load = memfeed.memoize(np.full, at / "r.mf", version=1, mapped=mapped)
            assert (load(10, 3) == 3).all()
        with pytest.warns(UserWarning, match="Read-only file system"):
            assert (load(10, 4) == 4).all()
        assert memfeed.open(at / "r.mf")[0]["result"].tolist() == [3] * 10
        kept._memos.clear()
