"""Shared by several tests: classes of samples, small datasets, and a check for a disk."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import memfeed
from memfeed.store.copied_ranges import LOOPS
from memfeed.system.compiled import Loops
from memfeed.testing import equal

__all__ = [
    "Counting",
    "Labelled",
    "Made",
    "Pair",
    "Point",
    "cache",
    "copies_by",
    "equal",
    "processes_of",
    "rich_sample",
    "skip_without_disk",
    "wait_until",
]

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Labelled:
    image: Any
    label: int


@tensorclass
class Pair:
    images: torch.Tensor
    targets: torch.Tensor


class Made(Dataset):
    """A map-style dataset of given samples, or of the samples that a function returns for an index."""

    def __init__(self, samples: Any, n: int | None = None) -> None:
        self.samples, self.n = samples, n

    def __len__(self) -> int:
        return len(self.samples) if self.n is None else self.n

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.samples(index) if callable(self.samples) else self.samples[index]


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Return once ``condition()`` is true. Raise AssertionError if it is not after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not become true within {seconds:g} s"
        time.sleep(0.002)


def processes_of(group: int) -> list[str]:
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


def skip_without_disk(path: Any) -> None:
    """Skip a test that reads from the disk if ``path`` is in memory: such files cannot be dropped from it."""
    stat = ["stat", "--file-system", "--format=%T", str(path)]
    kind = subprocess.run(stat, capture_output=True, text=True, check=True).stdout.strip()
    if kind in ("tmpfs", "ramfs"):
        pytest.skip(f"{path} is in memory ({kind}): set TMPDIR to a directory on a disk")


def rich_sample(i: int) -> dict[str, Any]:
    """Return a sample with one of everything that a store can hold, different for every ``i``."""
    g = torch.Generator().manual_seed(i)
    return {
        "image": torch.randint(0, 256, (3, 4, 5), generator=g, dtype=torch.uint8),
        "label": i,
        "weight": i / 7,
        "flag": i % 2 == 0,
        "point": Point(torch.rand(2, generator=g), (i, [i + 1, i + 2])),
        "record": Labelled(np.full((2, 2), i, np.int16), i),
        "td": TensorDict({"a": torch.rand(3, generator=g), "note": f"n{i}"}, []),
        "pair": Pair(images=torch.rand(2, generator=g), targets=torch.tensor(i), batch_size=[]),
        "boxes": torch.rand(i % 4, 4, generator=g),
        "classes": torch.arange(i % 4),
        "picture": torch.randint(0, 256, (1 + i % 2, 2 + i % 3, 4), generator=g, dtype=torch.uint8),
        "ids": list(range(i % 5)),
        "text": f"sample é {i}",
        "raw": bytes(range(i % 6)),
        "meta": {"v": i} if i % 2 else [i, None, "x"],
        "maybe": None if i % 3 == 0 else torch.full((2,), float(i)),
        "nothing": None,
    }


def cache(dataset: Any, path: Any = None, **options: Any) -> Any:
    """`memfeed.cache` without a progress bar."""
    return memfeed.cache(dataset, path, **{"progress": False, **options})


class Counting(IterableDataset):
    """Yields ``make(i)`` for i < n; workers share them out."""

    def __init__(self, n: int, make: Callable[[int], Any] = lambda i: (torch.full((2,), i), i)) -> None:
        self.n, self.make = n, make

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        share, shares = (info.id, info.num_workers) if info else (0, 1)
        return (self.make(i) for i in range(share, self.n, shares))


@contextmanager
def copies_by(way):
    """Let ranges of bytes be copied, and documents be cut, by `way`: "numpy" or "numba"."""
    if way == "numba":
        pytest.importorskip("numba")
    loops = Loops("memfeed.store.copy_loops").wait() if way == "numba" else None  # LOOPS itself stays as it is
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LOOPS, "get", lambda work=0: loops)
        yield
