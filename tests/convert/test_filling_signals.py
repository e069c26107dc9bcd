"""Ctrl-C and SIGTERM while a program trains from a store that is filled."""

import os
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
from support import Made, cache

ROWS = 400
PROGRAM = f"""
import signal, sys, time, torch, memfeed

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background programs ignore it

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return {ROWS}

    def __getitem__(self, i):
        time.sleep(0.02)
        return {{"x": torch.full((5,), i)}}

for batch in memfeed.Loader(Slow(), 4, shuffle=True, num_workers=int(sys.argv[2]), cache=sys.argv[1]):
    time.sleep(0.01)
"""


def processes_of(group):
    """Return the processes of a group that have not ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, of_group = (entry / "stat").read_text().rpartition(") ")[2].split()[:3]
        except OSError:  # it has ended
            continue
        if int(of_group) == group and state not in "ZX":
            found.append(entry.name)
    return found


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 2), (signal.SIGINT, 0), (signal.SIGTERM, 2)])
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
    while processes_of(program.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not processes_of(program.pid)
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

    cache(Made(sample, ROWS), path, lazily=True, workers=0, check=False).finish()
    store = memfeed.open(path)
    assert torch.equal(store.column("x")[:, 0], torch.arange(ROWS))
    probed = len(store.manifest.fingerprint.probes)
    assert len(set(read) & set(present)) <= 2 * probed  # the probe, and the check before the commit
