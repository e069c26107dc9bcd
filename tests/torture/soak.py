"""A process that trains for long, with all that goes wrong in one: memory, maps, threads and descriptors stay flat."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import memfeed
from memfeed import Blocks, Loader
from memfeed.testing import equal
from memfeed.transforms import RandomHorizontalFlip
from support import Made
from torture.victims import ended, sample, start

N, M = 300, 30
WARM_EPOCHS = 30
MORE = {"bytes": 48 << 20, "maps": 40, "threads": 0, "files": 0}  # how much more there may be at the end


known = functools.cache(sample)  # each row is compared some hundred times


def soak(seconds: float, rng: random.Random) -> dict[str, int]:
    """Loaders of every setting: whole, dropped, resumed, forked, in threads, with exceptions; and small conversions."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "counts"
        memfeed.cache([sample(i) for i in range(N)], Path(directory) / "a.mf", progress=False)
        child = start(Path(directory) / "stderr", _train, Path(directory) / "a.mf", seconds, rng.random(), result)
        child.join(seconds)
        if not ended(child) or child.exitcode:
            print((Path(directory) / "stderr").read_text())
            return {"hung": 1}
        return dict(json.loads(result.read_text()))


def _used() -> dict[str, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
    }


def _train(path: Path, seconds: float, seed: float, result: Path) -> None:
    rng, counts, store = random.Random(seed), Counter(epochs=0, wrong=0), memfeed.open(path)
    deadline, before = time.monotonic() + seconds, None
    actions = [_whole, _every_setting, _broken_off, _resumed, _raising, _several, _in_threads, _forked, _converting]
    while before is None or time.monotonic() < deadline:
        rng.choice(actions)(store, rng, counts)
        counts["epochs"] += 1
        if counts["epochs"] == WARM_EPOCHS:
            before = _used()
    after = _used()
    counts["grown"] = sum(after[name] > before[name] + more for name, more in MORE.items())
    for name in MORE:
        counts[f"more {name}"] = after[name] - before[name]
    result.write_text(json.dumps(counts))


def _loader(store: memfeed.Store, rng: random.Random) -> Loader:
    shuffle = rng.choice([False, True, Blocks()])
    return Loader(store, rng.choice([7, 32]), shuffle=shuffle, prefetch_factor=rng.randrange(4), seed=rng.randrange(99))


def _labels(batches: Iterable[Any]) -> list[int]:
    """Return the labels of all batches, after comparing every row with the sample of its label."""
    seen = []
    for batch in batches:
        labels = batch["label"].tolist()
        jagged = {name for name, value in batch.items() if isinstance(value, torch.Tensor) and value.is_nested}
        columns = {name: value.unbind() if name in jagged else value for name, value in batch.items()}
        for k, label in enumerate(labels):
            row = {name: label if name == "label" else columns[name][k] for name in batch if name != "valid"}
            assert equal(row, known(label)), f"row {label} is wrong"
        seen += labels
    return seen


def _whole(store: memfeed.Store, rng: random.Random, counts: Counter[str]) -> None:
    counts["wrong"] += sorted(_labels(_loader(store, rng))) != list(range(N))


def _every_setting(store: memfeed.Store, rng: random.Random, counts: Counter[str]) -> None:
    """Give each row once, in another way than `_loader` does."""
    ranks = rng.choice([2, 3])
    cut = rng.randrange(1, N)
    sampler = rng.sample(range(N), N)
    epochs: list[Callable[[], list[int]]] = [
        lambda: sum(
            (_labels(Loader(store, 8, shuffle=True, seed=1, ranks=(r, ranks), last="uneven")) for r in range(ranks)),
            [],
        ),
        lambda: _labels(Loader(store, 8, sampler=sampler)),
        lambda: _labels(Loader(store, batch_sampler=[sampler[i : i + 9] for i in range(0, N, 9)])),
        lambda: _labels(Loader(store.subset(range(cut)), 7)) + _labels(Loader(store.subset(range(cut, N)), 7)),
        lambda: _labels(Loader(store, 16, shuffle=True, placement={"image": "mapped"}, transform=lambda batch: batch)),
        lambda: _labels(Loader(store, 16, transform=RandomHorizontalFlip(0.0, on="image"), shuffle=Blocks(9))),
        lambda: [
            label
            for batch in Loader(store, 16, last="pad")
            for label, valid in zip(batch["label"].tolist(), batch["valid"].tolist(), strict=True)
            if valid
        ],
        lambda: [row["label"] for row in store],
        lambda: _labels(DataLoader(store, 16, collate_fn=memfeed.Collate())),
    ]
    counts["wrong"] += sorted(rng.choice(epochs)()) != list(range(N))


def _broken_off(store: memfeed.Store, rng: random.Random, counts: Counter[str]) -> None:
    stop = rng.randrange(8)
    for step, _ in enumerate(_loader(store, rng)):
        if step == stop:
            break


def _in_threads(store: memfeed.Store, rng: random.Random, counts: Counter[str]) -> None:
    loaders = [_loader(store, rng) for _ in range(3)]
    with ThreadPoolExecutor(len(loaders)) as pool:
        counts["wrong"] += sum(sorted(labels) != list(range(N)) for labels in pool.map(_labels, loaders))


def _forked(store: memfeed.Store, rng: random.Random, counts: Counter[str]) -> None:
    """Continue an epoch in a forked child, which indexes the store too, and then here."""
    batches = iter(_loader(store, rng))
    seen = _labels([next(batches)])
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(60)
            good = sorted(seen + _labels(batches)) == list(range(N)) and _labels([store[list(range(9))]]) == list(
                range(9)
            )
            status = 0 if good else 2
        finally:
            os._exit(status)
    counts["wrong"] += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
    counts["wrong"] += sorted(seen + _labels(batches)) != list(range(N))


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
        list(Loader(store, 16, shuffle=True, seed=0, transform=transform, prefetch_factor=rng.randrange(4)))
        counts["wrong"] += 1
    except _Planned:
        pass


def _several(store: memfeed.Store, rng: random.Random, counts: Counter[str]) -> None:
    together = zip(*(_loader(store, rng) for _ in range(3)), strict=False)
    counts["wrong"] += not [label for batches in together for label in _labels(batches)]
