"""Time warm shuffled epochs of memfeed.Loader and of every other way to write the loop.

Six workloads, from 300,000 single numbers to 4,000 images of 196 KB, documents of any length and samples of six fields.
Each is run by the loops of the slides "The fast train loops", by DataLoader in several forms, and by bare loops that
only copy rows: they write into one buffer again and again, so the caller cannot keep a batch. A loop that holds a batch
while the next one is made needs two buffers, which use more of the processor's caches; that loop is timed too.

    python benchmarks/loader.py
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, Dataset, TensorDataset

import memfeed
from measure import Check, in_turns, medians, parser, ratio, seconds_of, show, table, write

OURS = "memfeed.Loader"
DATALOADER = "DataLoader"
WORKERS = "DataLoader, 2 workers"
MAPPED = "DataLoader(TensorDict memmap)"
BARE, TWO = "bare loop, one buffer", "bare loop, two buffers"
NUMPY = "numpy loop"
ROWS = "Loader of rows of one length"
STACKED = "one index a row, stacked"

Epoch = Callable[[], Iterable[Any]]


@dataclass
class Work:
    """The rows of a workload, and the loops that read them.

    Args:
        about: the workload in words.
        rows: number of rows.
        batches: number of batches per epoch.
        loops: by name; a call gives the batches of one shuffled epoch.
        slow: the loops that run only a few rounds.
        targets: (other, times): the other must take at least that many times as long.
        check: asserts that the loops give equal batches.
    """

    about: str
    rows: int
    batches: int
    loops: dict[str, Epoch]
    check: Callable[[], None]
    row_bytes: float
    slow: tuple[str, ...] = ()
    targets: list[tuple[str, float]] = field(default_factory=list)


def identity(batch: Any) -> Any:
    return batch


def gathers(columns: list[torch.Tensor], size: int, sets: int = 1) -> Epoch:
    """Return the bare loop, which fills this number of sets of buffers in turns."""
    made = [[torch.empty(size, *c.shape[1:], dtype=c.dtype) for c in columns] for _ in range(sets)]

    def epoch() -> Iterator[list[torch.Tensor]]:
        for ids, buffers in zip(torch.randperm(len(columns[0])).split(size), itertools.cycle(made), strict=False):
            yield [torch.index_select(c, 0, ids, out=b[: len(ids)]) for c, b in zip(columns, buffers, strict=True)]

    return epoch


def check_rows(
    loops: dict[str, Epoch], columns: list[torch.Tensor], marks: Callable[[Any], list[torch.Tensor]]
) -> None:
    """Check that each loop visits every row once, with all its fields. The last column holds the row numbers."""
    for name, epoch in loops.items():
        seen = []
        for batch in epoch():
            leaves = marks(batch)
            rows = leaves[-1].long()
            for leaf, column in zip(leaves, columns, strict=True):
                assert torch.equal(leaf, column[rows]), name
            seen.append(rows.clone())
        assert torch.equal(torch.cat(seen).sort().values, torch.arange(len(columns[0]))), name


class Whole(Dataset):
    """A dataset with ``__getitems__``: one index gives a batch."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.data[row]

    def __getitems__(self, rows: list[int]) -> torch.Tensor:
        return self.data[rows]


def tiny(base: Path, n: int, size: int, as_tensordict: bool) -> Work:
    """Return the workload of the slides: single numbers."""
    numbers = torch.arange(n)
    array, listed, generator = numbers.numpy(), list(range(n)), np.random.default_rng(0)
    source: Any = TensorDict({"x": numbers}, [n]) if as_tensordict else numbers
    loader = memfeed.Loader(source, size, shuffle=True)
    plain, whole = DataLoader(numbers, size, shuffle=True), DataLoader(Whole(numbers), size, True, collate_fn=identity)

    def pure() -> Iterator[list[int]]:
        drawn = random.sample(listed, k=n)
        for first in range(0, n, size):
            yield drawn[first : first + size]

    def handwritten() -> Iterator[torch.Tensor]:
        drawn = torch.randperm(n)
        for first in range(0, n, size):
            yield numbers[drawn[first : first + size]]

    def stacked() -> Iterator[torch.Tensor]:
        for ids in torch.randperm(n).split(size):
            yield torch.stack([numbers[i] for i in ids])

    loops: dict[str, Epoch] = {
        OURS: lambda: loader,
        NUMPY: lambda: generator.permutation(array).reshape(-1, size),
        "pure Python loop": pure,
        "hand-written randperm loader": handwritten,
        "DataLoader, __getitems__": lambda: whole,
        STACKED: stacked,
        DATALOADER: lambda: plain,
    }
    if as_tensordict:
        mapped = source.memmap(str(base / "tiny-td"))
        held = DataLoader(mapped, size, shuffle=True, collate_fn=identity)
        loops = {OURS: loops[OURS], NUMPY: loops[NUMPY], MAPPED: lambda: held}

    def leaves(batch: Any) -> list[torch.Tensor]:
        return [batch["x"] if isinstance(batch, TensorDict) else torch.as_tensor(batch)]

    return Work(
        f"{n:,} int64 {'in a TensorDict, TensorDict batches' if as_tensordict else 'in memory'}, batches of {size}",
        n,
        n // size,
        loops,
        lambda: check_rows(loops, [numbers], leaves),
        8,
        slow=() if as_tensordict else (DATALOADER, STACKED),
        targets=[(NUMPY, 1 / 1.5)] if as_tensordict else [(NUMPY, 1 / 0.75), (DATALOADER, 100)],
    )


def images(base: Path, n: int, side: int, size: int, least: float, workers: bool) -> Work:
    """Return a workload of uint8 images and a label, from a store."""
    pictures = torch.randint(0, 256, (n, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(n)
    store = memfeed.cache((pictures, labels), base / f"images{side}.mf", progress=False)
    loader = memfeed.Loader(store, size, shuffle=True)
    memory = TensorDict({"images": pictures, "labels": labels}, batch_size=[n])
    mapped = DataLoader(memory.memmap(str(base / f"images{side}")), size, shuffle=True, collate_fn=identity)
    dataset = TensorDataset(pictures, labels)
    plain = DataLoader(dataset, size, shuffle=True)
    columns = [store.column(0), store.column(1)]
    buffers = [torch.empty(size, 3, side, side, dtype=torch.uint8), torch.empty(size, dtype=torch.int64)]

    def copied() -> Iterator[list[torch.Tensor]]:
        for first in range(0, n, size):
            parts = [column[first : first + size] for column in columns]
            yield [buffer[: len(part)].copy_(part) for buffer, part in zip(buffers, parts, strict=True)]

    loops: dict[str, Epoch] = {
        OURS: lambda: loader,
        DATALOADER: lambda: plain,
        MAPPED: lambda: mapped,
        BARE: gathers(columns, size),
        TWO: gathers(columns, size, sets=2),
        "copy in order, one buffer": copied,
    }
    if workers:  # they are kept between epochs: their start is not compared
        busy = DataLoader(dataset, size, shuffle=True, num_workers=2, persistent_workers=True)
        loops[WORKERS] = lambda: busy

    def leaves(batch: Any) -> list[torch.Tensor]:
        return [batch["images"], batch["labels"]] if isinstance(batch, TensorDict) else list(batch)

    return Work(
        f"{n:,} uint8 [3, {side}, {side}] and a label, batches of {size}",
        n,
        -(-n // size),
        loops,
        lambda: check_rows(loops, [pictures, labels], leaves),
        store.nbytes / n,
        slow=(DATALOADER, MAPPED, *([WORKERS] if workers else [])),
        targets=[(BARE, 0.85), (MAPPED, least), *([(DATALOADER, 15)] if workers else [])],
    )


def documents(base: Path, n: int, size: int) -> Work:
    """Return a workload of documents of 50 to 1,000 token ids: jagged batches."""
    lengths = np.random.default_rng(0).integers(50, 1001, n)
    with memfeed.Writer(base / "documents.mf") as writer:
        for row, length in enumerate(lengths.tolist()):
            writer.append(torch.full((length,), row, dtype=torch.int32))
    store = memfeed.open(base / "documents.mf")
    loader = memfeed.Loader(store, size, shuffle=True)
    flat = np.fromfile(base / "documents.mf" / "value" / "heap.bin", np.int32)
    ragged = store.tensordict()["value"]
    starts, counts = ragged["start"].numpy(), ragged["dims"].numpy()[:, 0]
    buffer = np.empty(size * 1000, np.int32)
    equal_rows = memfeed.Loader(torch.from_numpy(flat[: n * (len(flat) // n)]).view(n, -1), size, shuffle=True)

    def bare() -> Iterator[Any]:
        order = np.random.permutation(n)
        for first in range(0, n, size):
            ids = order[first : first + size]
            begins, ends = starts[ids], starts[ids] + counts[ids]
            out = buffer[: int((ends - begins).sum())]
            yield ids, np.concatenate([flat[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)], out=out)

    def check() -> None:
        seen = []
        for batch in loader:
            for row in batch.unbind():
                assert len(row) == lengths[int(row[0])]
                assert bool((row == row[0]).all())
                seen.append(int(row[0]))
        assert sorted(seen) == list(range(n))
        for ids, rows in bare():
            assert np.array_equal(rows, np.repeat(ids, lengths[ids]))

    return Work(
        f"{n:,} documents of 50 to 1,000 int32, batches of {size}",
        n,
        -(-n // size),
        {OURS: lambda: loader, ROWS: lambda: equal_rows, "np.concatenate loop, one buffer": bare},
        check,
        store.nbytes / n,
        targets=[(ROWS, 0.6), ("np.concatenate loop, one buffer", 0.8)],
    )


def six_fields(n: int, size: int) -> Work:
    """Return a workload of samples of six small fields of fixed size."""
    made = {
        "image": torch.randint(0, 256, (n, 3, 16, 16), dtype=torch.uint8),
        "point": torch.rand(n, 4),
        "scores": torch.rand(n, 10),
        "flag": torch.rand(n) > 0.5,
        "grid": torch.rand(n, 8, 8),
        "row": torch.arange(n),
    }
    columns = list(made.values())
    loader = memfeed.Loader(made, size, shuffle=True)
    loops: dict[str, Epoch] = {OURS: lambda: loader, BARE: gathers(columns, size)}
    return Work(
        f"{n:,} samples of 6 fields, batches of {size}",
        n,
        -(-n // size),
        loops,
        lambda: check_rows(loops, columns, lambda batch: list(batch.values() if isinstance(batch, dict) else batch)),
        sum(column.nbytes for column in columns) / n,
    )


def drain(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def race(work: Work, rounds: int, least_seconds: float) -> dict[str, Any]:
    """Check equality, then time all loops in turns, and the slow ones in a few rounds, again beside memfeed."""
    work.check()
    timed = {name: (lambda epoch=epoch: seconds_of(lambda: drain(epoch()))) for name, epoch in work.loops.items()}
    fast = {name: run for name, run in timed.items() if name not in work.slow}
    seconds = in_turns(fast, rounds, least_seconds)
    ratios = {name: ratio(seconds, name, OURS) for name in fast}
    if work.slow:
        few = in_turns({name: timed[name] for name in (OURS, *work.slow)}, min(rounds, 5), 0.0)
        ratios |= {name: ratio(few, name, OURS) for name in work.slow}
        seconds |= {name: few[name] for name in work.slow}
    median = medians(seconds)
    return {
        "about": work.about,
        "rows": work.rows,
        "batches": work.batches,
        "row_bytes": work.row_bytes,
        "median_seconds": median,
        "ratios": ratios,
        "seconds": seconds,
    }


def main() -> None:
    made = parser("loader", __doc__)
    made.add_argument("--dir", type=Path, help="a directory on the disk to write to")
    options = made.parse_args()
    quick = options.quick
    rounds, least = (1, 0.0) if quick else (15, 0.15)
    share = 50 if quick else 1
    results: dict[str, Any] = {}
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        base = Path(directory)
        works: dict[str, Callable[[], Work]] = {
            "tiny": lambda: tiny(base, 300_000 // share, 300, as_tensordict=False),
            "tiny, TensorDict": lambda: tiny(base, 300_000 // share, 300, as_tensordict=True),
            "small images": lambda: images(base, 50_000 // share, 32, 512, 7, workers=True),
            "large images": lambda: images(base, 4_000 // share, 256, 64, 4, workers=False),
            "documents": lambda: documents(base, 100_000 // share, 256),
            "six fields": lambda: six_fields(20_000 // share, 8),
        }
        for name, make in works.items():
            work = make()
            found = results[name] = race(work, rounds, least)
            for other, factor in work.targets:
                checks.append(Check(f"{name}: {other} takes", found["ratios"][other], factor, at_least=True))
            if name == "six fields":
                times = found["median_seconds"]
                extra = (times[OURS] - times[BARE]) / found["batches"] * 1e6
                checks.append(Check("six fields: overhead a batch over the bare gathers", extra, 15, False, "us"))
            show_work(found)
            del work
    show("loader", checks)
    write(
        options,
        {"rounds": rounds},
        {"works": results, "median_seconds": {name: found["median_seconds"] for name, found in results.items()}},
        checks,
    )


def show_work(found: dict[str, Any]) -> None:
    volume = found["rows"] * found["row_bytes"] / 1e9
    table(
        found["about"],
        ["", "epoch", "rows/s", "GB/s", "memfeed is"],
        [
            [
                name,
                f"{t * 1e3:,.2f} ms",
                f"{found['rows'] / t:,.0f}",
                f"{volume / t:.2f}",
                f"{found['ratios'][name]:.2f} x as fast",
            ]
            for name, t in found["median_seconds"].items()
        ],
    )


if __name__ == "__main__":
    main()
