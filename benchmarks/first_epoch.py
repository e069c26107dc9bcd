"""Compare the first epochs of a training: plain DataLoader, a store that is filled while it is read, cache then train.

Each contender reads three epochs, shuffled, of the same dataset with as many workers, in turns: JPEG photographs that
are decoded and resized at every access, and images that NumPy makes. The store that was filled is compared with the one
that cache() wrote, byte by byte.

    python benchmarks/first_epoch.py
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import memfeed
from convert import Photographs, make_photographs
from measure import PHOTOS, Check, Seconds, in_turns, medians, parser, ratio, seconds_of, show, table, write

EPOCHS = 3
PLAIN, FILLED, CACHED = "DataLoader", "filled while it is read", "cache, then train"


class Made(Dataset):
    """Images that take some milliseconds of NumPy each."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = np.random.default_rng(index)
        coarse = generator.standard_normal((3, 160, 160), np.float32)
        image = np.cumsum(np.cumsum(coarse, 1), 2)
        return torch.from_numpy((image - image.min()).astype(np.uint8)), index % 10


def epochs(batches: Iterable[Any], length: int, found: list[float]) -> None:
    """Read all epochs and add the seconds of each to ``found``."""
    found.extend(seconds_of(lambda: count(batches, length)) for _ in range(EPOCHS))


def count(batches: Iterable[Any], length: int) -> None:
    assert sum(len(images) for images, _ in batches) == length


def compare(dataset: Dataset, base: Path, length: int, workers: int, rounds: int) -> dict[str, Seconds]:
    """Return the seconds of each contender: of the first epoch (with what comes before it), the second, and all."""
    seconds: dict[str, Seconds] = {"first": {}, "second": {}, "total": {}}

    def note(name: str, before: float, found: list[float]) -> float:
        seconds["first"].setdefault(name, []).append(before + found[0])
        seconds["second"].setdefault(name, []).append(found[1])
        seconds["total"].setdefault(name, []).append(before + sum(found))
        return before + sum(found)

    def plain() -> float:
        found: list[float] = []
        epochs(DataLoader(dataset, 32, shuffle=True, num_workers=workers), length, found)
        return note(PLAIN, 0.0, found)

    def stored(name: str, *, lazily: bool) -> float:
        path, found, made = base / name.replace(" ", "-"), [], []
        shutil.rmtree(path, ignore_errors=True)
        before = seconds_of(
            lambda: made.append(memfeed.cache(dataset, path, lazily=lazily, workers=workers, progress=False))
        )
        epochs(memfeed.Loader(made[0], 32, shuffle=True, seed=0), length, found)
        made[0].finish()
        return note(name, before, found)

    in_turns(
        {PLAIN: plain, FILLED: lambda: stored(FILLED, lazily=True), CACHED: lambda: stored(CACHED, lazily=False)},
        rounds,
    )
    names = [base / name.replace(" ", "-") for name in (FILLED, CACHED)]
    for file in names[0].rglob("*.memmap"):
        assert file.read_bytes() == (names[1] / file.relative_to(names[0])).read_bytes(), file
    return seconds


def main() -> None:
    made = parser("first_epoch", __doc__)
    made.add_argument("--dir", type=Path, help="a directory on the disk to write to")
    made.add_argument("--workers", type=int, default=2)
    made.add_argument("--length", type=int, default=2000)
    made.add_argument("--rounds", type=int, default=5)
    options = made.parse_args()
    length, rounds = (48, 1) if options.quick else (options.length, options.rounds)
    figures: dict[str, Any] = {}
    checks = []
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        base = Path(directory)
        files = (
            sorted(PHOTOS.rglob("*.jpg")) if PHOTOS.is_dir() else make_photographs(base, 16 if options.quick else 200)
        )
        for what, dataset in (("photographs", Photographs(files, length)), ("made images", Made(length))):
            seconds = compare(dataset, base, length, options.workers, rounds)
            figures[what] = {part: medians(found) for part, found in seconds.items()}
            table(
                f"{length} {what}, {options.workers} workers",
                ["", "first epoch", "second epoch", f"{EPOCHS} epochs"],
                [
                    [name, *(f"{figures[what][part][name]:.2f} s" for part in seconds)]
                    for name in (PLAIN, FILLED, CACHED)
                ],
            )
            for part, other, limit in (
                ("first", PLAIN, 1.08),
                ("second", CACHED, 1.1),
                ("total", PLAIN, 1.0),
                ("total", CACHED, 1.0),
            ):
                what_is = f"{what}: {part}{'' if part == 'total' else ' epoch'}, {FILLED} / {other}"
                checks.append(Check(what_is, ratio(seconds[part], FILLED, other), limit, at_least=False))
    show("first epochs", checks)
    write(options, {"length": length, "workers": options.workers, "rounds": rounds}, {"seconds": figures}, checks)


if __name__ == "__main__":
    main()
