"""Eight processes that want one store at once, and whose builder is killed twice."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from memfeed.building.partial import ABSENT, DURABLE, SYNCING
from torture.victims import (
    HANG_SECONDS,
    PROBE,
    Logged,
    compared,
    convert,
    ended,
    is_stopped,
    left_behind,
    presence,
    reads,
    start,
    wait_for,
)

PROCESSES, KILLS = 8, 2


def builders(seconds: float, rng: random.Random) -> dict[str, int]:
    """One builds, the others wait; at the end there is one store, and no row that was there was read again.

    A builder that is killed while it syncs costs the rows that were not durable yet.
    """
    counts, deadline = Counter(stores=0), time.monotonic() + seconds
    while not counts["stores"] or time.monotonic() < deadline:
        with tempfile.TemporaryDirectory() as directory:
            counts.update(_one_store(Path(directory), rng))
    return dict(counts)


def _one_store(directory: Path, rng: random.Random) -> Counter[str]:
    path, log, n = directory / "a.mf", directory / "log", rng.randint(200, 400)
    counts = Counter[str](stores=1, kills=0, repeated=0, hung=0, left=0)
    gate = directory / "gate"
    children = [
        start(directory / f"stderr{k}", _at_once, gate, path, Logged(n, log, k, 0.01)) for k in range(PROCESSES)
    ]
    gate.touch()
    killed: list[int] = []
    there: list[tuple[int, np.ndarray]] = []
    enough, deadline = 0, time.monotonic() + HANG_SECONDS
    while len(killed) < KILLS and time.monotonic() < deadline and not path.exists():
        time.sleep(0.01)
        owner, rows = _owner(path), presence(path)
        if owner is None or owner in killed or np.count_nonzero(rows) <= enough + 40:
            continue
        os.kill(owner, signal.SIGSTOP)  # so that the mark of a sync is seen before another process removes it
        wait_for(lambda owner=owner: is_stopped(owner))
        rows = presence(path)
        there.append((log.stat().st_size, rows == DURABLE if _is_syncing(path) else rows != ABSENT))
        os.kill(owner, signal.SIGKILL)
        killed.append(owner)
        enough = int(np.count_nonzero(presence(path))) + rng.randrange(20)
    for child in children:
        counts["hung"] += not ended(child)
        counts["left"] += left_behind(child.pid)
    counts["kills"] = len(killed)
    for k, child in enumerate(children):
        if child.exitcode and child.pid not in killed:
            counts["lost"] += 1
            print((directory / f"stderr{k}").read_text())
    for size, rows in there:
        counts["repeated"] += sum(worker != PROBE and bool(rows[index]) for _, worker, index in reads(log, size))
    computed = Counter(index for _, worker, index in reads(log) if worker != PROBE)
    counts["in flight at a kill"] = sum(computed.values()) - len(computed)
    counts["told who builds"] = sum("is building" in (directory / f"stderr{k}").read_text() for k in range(PROCESSES))
    counts["left"] += [p.name for p in directory.iterdir() if p.name.startswith("a.mf")] != ["a.mf"]
    counts.update(compared(path, n), rows=n)
    return counts


def _at_once(gate: Path, path: Path, dataset: Logged) -> None:
    wait_for(gate.exists)
    convert(path, dataset, 2, 0.1)


def _is_syncing(path: Path) -> bool:
    return (path.with_name(path.name + ".build") / ".build" / SYNCING).exists()


def _owner(path: Path) -> int | None:
    try:
        pid: int = json.loads((path.with_name(path.name + ".build") / ".build" / "owner").read_bytes())["pid"]
        return pid
    except (OSError, ValueError):
        return None
