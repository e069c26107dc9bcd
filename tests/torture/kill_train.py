"""Training processes that are killed while they read: the store stays as it was."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from torch.utils.data import DataLoader

import memfeed
from memfeed import Blocks, Collate, Loader
from torture.victims import digest, left_behind, sample, start

N = 300


def kill_train(seconds: float, rng: random.Random) -> dict[str, int]:
    """Kills the reader, or its whole group, at a random moment of its epochs."""
    counts, deadline = Counter(kills=0, lost=0, left=0), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.mf"
        memfeed.cache([sample(i) for i in range(N)], path, progress=False)
        before = digest(Path(directory))
        while not counts["kills"] or time.monotonic() < deadline:
            seed = rng.randrange(1 << 30)
            with tempfile.TemporaryDirectory() as elsewhere:
                child = start(Path(elsewhere) / "stderr", train, path, seed)
                child.join(rng.uniform(0.05, 0.8))
                counts["ended by itself"] += child.exitcode is not None
                if child.exitcode is None:
                    os.kill(child.pid, signal.SIGKILL) if rng.random() < 0.5 else os.killpg(child.pid, signal.SIGKILL)
                child.join()
                counts["kills"] += 1
                counts["left"] += left_behind(child.pid, 30)
            counts["lost"] += digest(Path(directory)) != before
    counts["hung"] = counts.pop("ended by itself")  # epochs without end: one that ended raised
    return dict(counts)


def train(path: Path, seed: int) -> None:
    """Epochs without end, in one of the ways there are."""
    rng, store = random.Random(seed), memfeed.open(path)
    if rng.random() < 0.3:
        loader = DataLoader(store, 16, num_workers=1, collate_fn=Collate())
    else:
        loader = Loader(store, 16, shuffle=rng.choice([False, True, Blocks()]), prefetch_factor=rng.randrange(4))
    while True:
        for batch in loader:
            batch["image"] += 1  # a batch is the user's own
