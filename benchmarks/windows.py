"""Windows over rows that are kept once: two frames, two states, 16 actions of each row of a made robot data set.

`Store.windows` in a Loader, beside a plain Loader of a store in which each row holds its windows (the same bytes, each
frame twice and each action 16 times on disk), and beside a torch Dataset that stacks the windows of one row of the
first store, in DataLoader. All read the same rows in the same shuffled order; the page cache is warm.

    python benchmarks/windows.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import memfeed
from measure import Check, cpu_seconds, in_turns, medians, parser, ratio, seconds_of, show, table, write

OFFSETS = {"frame": [-1, 0], "state": [-1, 0], "action": list(range(16))}
BATCH_SIZE = 64


def make(path: Path, episodes: int, steps: int, side: int) -> memfeed.Store:
    """Write a store of episodes of one length: frames, states, actions."""
    generator, rows = torch.Generator().manual_seed(0), episodes * steps
    made = {
        "frame": torch.randint(0, 256, (rows, 3, side, side), dtype=torch.uint8, generator=generator),
        "state": torch.rand(rows, 14, generator=generator),
        "action": torch.rand(rows, 7, generator=generator),
        "episode": torch.arange(rows) // steps,
    }
    return memfeed.cache(made, path, progress=False)


class Windows(Dataset[Any]):
    """Windows as a Dataset gives them: each sample is stacked from rows of the mapped store."""

    def __init__(self, store: memfeed.Store, steps: int) -> None:
        self.columns = {name: store.column(name) for name in (*OFFSETS, "episode")}
        self.steps = steps

    def __len__(self) -> int:
        return len(self.columns["episode"])

    def __getitem__(self, row: int) -> dict[str, Any]:
        first = row // self.steps * self.steps
        sample = {"episode": self.columns["episode"][row]}
        for name, offsets in OFFSETS.items():
            rows = [min(max(row + offset, first), first + self.steps - 1) for offset in offsets]
            sample[name] = self.columns[name][rows]
            sample[f"{name}_mask"] = torch.tensor(
                [row + offset == at for offset, at in zip(offsets, rows, strict=True)]
            )
        return sample


def consume(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def cpu_seconds_of(function: Callable[[], None]) -> float:
    """Return the CPU seconds that one call takes, on all cores."""
    start = cpu_seconds()
    function()
    return cpu_seconds() - start


def consume_again(loader: memfeed.Loader[Any]) -> None:
    loader.set_epoch(0)
    consume(loader)


def consume_on_one_thread(batches: Iterable[Any]) -> None:
    """Read with one thread, as a worker does: a Dataset copies too little at once for several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    consume(batches)
    torch.set_num_threads(threads)


def main() -> None:
    options = parser("windows", __doc__).parse_args()
    episodes, steps, side, rounds = (4, 50, 16, 2) if options.quick else (24, 200, 64, 5)
    with tempfile.TemporaryDirectory() as directory:
        store = make(Path(directory) / "robot.mf", episodes, steps, side)
        view = store.windows(OFFSETS, within="episode")
        loader = memfeed.Loader(view, BATCH_SIZE, shuffle=True, seed=0)
        order = list(memfeed.Loader(torch.arange(len(view)), BATCH_SIZE, shuffle=True, seed=0))
        stored = memfeed.cache(view[:], Path(directory) / "stored.mf", progress=False)
        plain_loader = memfeed.Loader(stored, BATCH_SIZE, shuffle=True, seed=0)
        plain = Windows(store, steps)
        others = {n: DataLoader(plain, batch_sampler=[ids.tolist() for ids in order], num_workers=n) for n in (0, 2)}
        for ours, *theirs in zip(loader, plain_loader, others[0], strict=True):
            for one in theirs:
                assert ours.keys() == one.keys()
                assert all(torch.equal(ours[key], one[key]) for key in ours)
        contenders = {
            "Loader of windows": lambda: consume_again(loader),
            "Loader of stored windows": lambda: consume_again(plain_loader),
            **{
                f"DataLoader, {n} workers": lambda other=other: consume_on_one_thread(other)
                for n, other in others.items()
            },
        }
        seconds = in_turns({name: lambda run=run: seconds_of(run) for name, run in contenders.items()}, rounds)
        loaders = [name for name in contenders if name.startswith("Loader")]
        cpu = in_turns({name: lambda run=contenders[name]: cpu_seconds_of(run) for name in loaders}, 3 * rounds)
        nbytes = sum(leaf.nbytes for batch in loader for leaf in batch.values())
    median = medians(seconds)
    table(
        f"{len(view):,} windows, {nbytes / 1e6:,.0f} MB an epoch, of {store.nbytes / 1e6:,.0f} MB on disk",
        ["", "epoch", "windows/s", "GB/s"],
        [[name, f"{took * 1e3:.0f} ms", f"{len(view) / took:,.0f}", f"{nbytes / took / 1e9:.2f}"]
         for name, took in median.items()],
    )  # fmt: skip
    best = min((name for name in seconds if name.startswith("DataLoader")), key=median.__getitem__)
    checks = [
        Check("stored windows take, in CPU time", ratio(cpu, loaders[1], loaders[0]), 0.95, at_least=True),
        Check("the faster DataLoader takes", ratio(seconds, best, "Loader of windows"), 2.0, at_least=True),
    ]
    show("windows", checks)
    write(
        options,
        {"windows": len(view), "batch_size": BATCH_SIZE, "frame": [3, side, side], "offsets": OFFSETS,
         "bytes": nbytes, "bytes_on_disk": {"windows": store.nbytes, "stored": stored.nbytes}, "rounds": rounds},
        {"median_seconds": median, "seconds": seconds, "cpu_seconds": cpu},
        checks,
    )  # fmt: skip


if __name__ == "__main__":
    main()
