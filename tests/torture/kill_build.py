"""Conversions of every kind that are killed at random moments and gone on with, again and again."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from memfeed.building.partial import DURABLE
from memfeed.convert.fingerprint import indices_between
from memfeed.convert.probe import probe_indices
from torture.victims import (
    CODED,
    PROBE,
    Logged,
    compared,
    convert,
    convert_coded,
    convert_stream,
    ended,
    left_behind,
    presence,
    reads,
    start,
    workers_of,
    write,
)

MOST_KILLS = 12
_HOW = ("worker", "parent", "group", "Ctrl-C", "SIGINT", "SIGTERM")


def kill_build(seconds: float, rng: random.Random) -> dict[str, int]:
    """Kills a worker, the builder, or all of them; or interrupts it. Then compares with an uninterrupted run."""
    counts, deadline = (
        Counter(stores=0, kills=0, lost=0, wrong=0, repeated=0, hung=0, left=0),
        time.monotonic() + seconds,
    )
    while not counts["stores"] or time.monotonic() < deadline:
        with tempfile.TemporaryDirectory() as directory:
            counts.update(_one_store(Path(directory), rng, deadline))
    return dict(counts)


def _one_store(directory: Path, rng: random.Random, deadline: float) -> Counter[str]:
    path, log, counts = directory / "a.mf", directory / "log", Counter[str](stores=1)
    n, workers, each = rng.randint(100, 400), rng.randint(0, 3), rng.uniform(0.001, 0.004)
    work = rng.choice((convert, convert, convert_coded, convert_stream, write))
    counts[work.__name__] += 1
    sync_seconds, present, run = rng.uniform(0.01, 0.2), {0: presence(path)}, 0
    while not path.exists():
        child = start(directory / "stderr", work, path, Logged(n, log, run, each), workers, sync_seconds)
        last = run >= MOST_KILLS or (run > 2 and time.monotonic() > deadline)
        if not last:
            child.join(0.1 + rng.uniform(0, n * each / max(workers, 1)))
            counts.update(_kill(child.pid, rng))
        if not ended(child):
            counts["hung"] += 1
            print((directory / "stderr").read_text(), flush=True)
        counts["left"] += left_behind(child.pid)
        if last and child.exitcode:
            counts["lost"] += n  # nothing disturbed it: it had to finish
            return counts
        run += 1
        present[run] = presence(path)
    # read on purpose: before the conversion, and once more at its end
    probed = set() if work is write else {*probe_indices(n), *indices_between(probe_indices(n))}
    for run_of, worker, index in reads(log) if work is not convert_stream else ():  # an iterator cannot skip them
        before = present[run_of]
        if (worker != PROBE or index not in probed) and index < len(before) and before[index]:
            counts["repeated" if before[index] == DURABLE else "written again"] += 1
    counts.update(_compared(path, n, work), rows=n)
    counts["synced rows at a kill"] += int(sum(np.count_nonzero(rows == DURABLE) for rows in present.values()))
    counts["left"] += sorted(p.name for p in directory.iterdir()) != ["a.mf", "log", "stderr"]
    return counts


def _compared(path: Path, n: int, work: Callable[..., None]) -> dict[str, int]:
    is_coded, is_stream = work is convert_coded, work is convert_stream
    same_bytes, forms = work is convert or is_coded, CODED if is_coded else None
    return compared(path, n, ordered=not is_stream, same_bytes=same_bytes, forms=forms)


def _kill(pid: int, rng: random.Random) -> dict[str, int]:
    how, workers = rng.choice(_HOW), workers_of(pid)
    try:
        if how == "worker":
            if not workers:
                return {}
            os.kill(rng.choice(workers), signal.SIGKILL)
        elif how == "group":
            os.killpg(pid, signal.SIGKILL)
        elif how == "Ctrl-C":  # a terminal sends it to the workers, too
            os.killpg(pid, signal.SIGINT)
        else:
            os.kill(pid, signal.SIGKILL if how == "parent" else signal.Signals[how])
    except ProcessLookupError:
        return {}
    return {"kills": 1, how: 1}
