"""A process that trains for long, with all that goes wrong in one: its memory, threads and descriptors stay flat."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import memfeed
from memfeed import Loader
from support import Made
from torture.victims import ended, sample, start

N, M = 300, 30
WARM_EPOCHS = 30
MOST_BYTES, MOST_THREADS, MOST_FILES = 48 << 20, 0, 0  # how much more there may be at the end


def soak(seconds: float, rng: random.Random) -> dict[str, int]:
    """Epochs that break off, resume from a state, raise in a transform, or run beside others; and small conversions."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "counts"
        memfeed.cache([sample(i) for i in range(N)], Path(directory) / "a.mf", progress=False)
        child = start(Path(directory) / "stderr", _train, Path(directory) / "a.mf", seconds, rng.random(), result)
        child.join(seconds)
        if not ended(child) or child.exitcode:
            print((Path(directory) / "stderr").read_text())
            return {"hung": 1}
        return dict(json.loads(result.read_text()))


def _used() -> tuple[int, int, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), threading.active_count(), len(os.listdir("/proc/self/fd"))


def _train(path: Path, seconds: float, seed: float, result: Path) -> None:
    rng, counts, store = random.Random(seed), Counter(epochs=0, wrong=0), memfeed.open(path)
    deadline, before = time.monotonic() + seconds, None
    while before is None or time.monotonic() < deadline:
        rng.choice([_whole, _broken_off, _resumed, _raising, _several, _converting])(store, rng, counts)
        counts["epochs"] += 1
        if counts["epochs"] == WARM_EPOCHS:
            before = _used()
    after = _used()
    allowed = MOST_BYTES, MOST_THREADS, MOST_FILES
    counts["grown"] = sum(now > then + more for now, then, more in zip(after, before, allowed, strict=True))
    for name, now, then in zip(("bytes", "threads", "files"), after, before, strict=True):
        counts[f"more {name}"] = now - then
    result.write_text(json.dumps(counts))


def _loader(store: memfeed.Store, rng: random.Random) -> Loader:
    shuffle = rng.choice([False, True, "blocks"])
    return Loader(store, rng.choice([7, 32]), shuffle=shuffle, prefetch=rng.randrange(4), seed=rng.randrange(99))


def _labels(batches: object) -> list[int]:
    return [label for batch in batches for label in batch["label"].tolist()]  # type: ignore[attr-defined]


def _whole(store: memfeed.Store, rng: random.Random, counts: Counter[str]) -> None:
    counts["wrong"] += sorted(_labels(_loader(store, rng))) != list(range(N))


def _broken_off(store: memfeed.Store, rng: random.Random, counts: Counter[str]) -> None:
    stop = rng.randrange(8)
    for step, _ in enumerate(_loader(store, rng)):
        if step == stop:
            break


def _resumed(store: memfeed.Store, rng: random.Random, counts: Counter[str]) -> None:
    where = rng.getstate()
    batches = iter(loader := _loader(store, rng))
    seen = _labels(next(batches) for _ in range(rng.randrange(1, 8)))
    state = json.loads(json.dumps(loader.state_dict()))
    del batches
    rng.setstate(where)
    other = _loader(store, rng)
    other.load_state_dict(state)
    counts["wrong"] += sorted(seen + _labels(other)) != list(range(N))


class _Planned(Exception):
    pass


def _converting(store: memfeed.Store, rng: random.Random, counts: Counter[str]) -> None:
    """Another store, made here; now and then its dataset raises."""
    bad = rng.randrange(3 * M)

    def read(i: int) -> dict[str, Any]:
        if i == bad:
            raise _Planned
        return sample(i)

    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(memfeed.errors.SampleError):
        made = memfeed.cache(Made(read, M), Path(directory) / "b.mf", workers=0, progress=False)
        counts["wrong"] += [row["label"] for row in made] != list(range(M))


def _raising(store: memfeed.Store, rng: random.Random, counts: Counter[str]) -> None:
    left = rng.randrange(5)

    def transform(batch: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise _Planned
        return batch

    try:
        list(Loader(store, 16, shuffle=True, seed=0, transform=transform, prefetch=rng.randrange(4)))
        counts["wrong"] += 1
    except _Planned:
        pass


def _several(store: memfeed.Store, rng: random.Random, counts: Counter[str]) -> None:
    together = zip(*(_loader(store, rng) for _ in range(3)), strict=False)
    counts["wrong"] += not [label for batches in together for label in _labels(batches)]
