"""Measure what grows with the number of rows: time to the first batch, memory, and the gain of a second process.

First batch: from ``Loader(...)`` to the first batch of a store just opened, and the time of each batch after it, for
10^4 to 10^10 rows (sparse files) in order, in blocks and shuffled uniformly.

Memory: anonymous and shared memory of a new process during an epoch, minus that of its imports. Pages of mapped files
are not counted: they belong to the page cache.

Ranks: two processes that each read half of an epoch, compared with one that reads all of it.

    python benchmarks/scale.py
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import memfeed
from measure import Check, parser, show, table, write

BATCH = 512
BATCHES = 300
BOUND_BYTES = 40e6
MEMORY = Path(__file__).parent / "memory.py"
READER = Path(__file__).parent / "reader.py"
ORDERS: dict[str, Any] = {"in order": False, "blocks": memfeed.Blocks(), "uniform": True}


def sparse_numbers(path: Path, rows: int) -> None:
    """Write a directory of TensorDict.memmap() with this number of int64, in a sparse file."""
    TensorDict({"x": torch.zeros(2, dtype=torch.int64)}, [2]).memmap(str(path))
    meta = json.loads((path / "meta.json").read_text())
    meta["shape"] = [rows]
    meta["x"]["shape"] = [rows]
    (path / "meta.json").write_text(json.dumps(meta))
    os.truncate(path / "x.memmap", 8 * rows)


def starts(path: Path, order: str) -> tuple[float, float]:
    """Return the seconds to the first batch of a store just opened, and of a batch after it."""
    store = memfeed.open(path)
    began = time.perf_counter()
    batches = iter(memfeed.Loader(store, BATCH, shuffle=ORDERS[order]))
    next(batches)
    first = time.perf_counter() - began
    began = time.perf_counter()
    count = sum(1 for _, _ in zip(range(BATCHES), batches, strict=False))
    return first, (time.perf_counter() - began) / max(count, 1)


def memory_over_epoch(path: Path, batch: int, shuffle: bool) -> dict[str, int]:
    """Return the memory of a new process that runs an epoch, in bytes."""
    command = [sys.executable, str(MEMORY), str(path), str(batch), str(int(shuffle))]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@contextlib.contextmanager
def readers(path: Path, batch: int, world_size: int) -> Iterator[Callable[[str, int], float]]:
    """Start processes that read one rank each. Yield a function that sends a request and returns bytes per second."""
    arguments = [sys.executable, str(READER), str(path), str(batch)]
    started = [
        subprocess.Popen(
            [*arguments, str(rank), str(world_size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in range(world_size)
    ]

    def lines() -> list[str]:
        return [reader.stdout.readline() for reader in started if reader.stdout is not None]

    def rate(what: str, epochs: int) -> float:
        began = time.perf_counter()
        for reader in started:
            assert reader.stdin is not None
            reader.stdin.write(f"{what} {epochs}\n")
            reader.stdin.flush()
        return sum(map(int, lines())) / (time.perf_counter() - began)

    try:
        assert set(lines()) == {"ready\n"}
        yield rate
    finally:
        for reader in started:
            reader.communicate(timeout=60)  # closes its stdin, which ends it


def main() -> None:
    made = parser("scale", __doc__)
    made.add_argument("--dir", type=Path, help="a directory on the disk to write to")
    options = made.parse_args()
    quick = options.quick
    sizes = [10**3, 10**4] if quick else [10**4, 10**6, 10**8, 10**10]
    rounds = 2 if quick else 7
    written = {"images": 2048} if quick else {"images": 50_000, "large": 500_000}
    first: dict[str, dict[str, float]] = {}
    later: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        base = Path(directory)
        for n in sizes:
            sparse_numbers(base / f"numbers{n}", n)
            for order in ORDERS:
                if order == "uniform" and n > 10**8:
                    continue
                found = [starts(base / f"numbers{n}", order) for _ in range(3 if n >= 10**8 else rounds)]
                first.setdefault(order, {})[f"{n:.0e}"] = statistics.median(one for one, _ in found)
                later.setdefault(order, {})[f"{n:.0e}"] = statistics.median(one for _, one in found)
        for name, rows in written.items():
            with memfeed.Writer(
                base / f"{name}.mf", like=(torch.zeros(3, 32, 32, dtype=torch.uint8), 0), length=rows
            ) as writer:
                for at in range(0, rows, 50_000):
                    count = min(50_000, rows - at)
                    pictures = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)
                    writer[at : at + count] = (pictures, torch.arange(at, at + count))
        memory = {
            f"{rows:,} images, shuffled": memory_over_epoch(base / f"{name}.mf", BATCH, True)
            for name, rows in written.items()
        }
        epochs = 2 if quick else 40
        ranks = {"read": [], "copy": []}  # type: dict[str, list[float]]
        with readers(base / "images.mf", BATCH, 1) as one, readers(base / "images.mf", BATCH // 2, 2) as two:
            for _ in range(1 if quick else 5):
                for what, ratios in ranks.items():
                    alone = one(what, epochs)
                    ratios.append(two(what, epochs) / alone)
    scaling = {what: statistics.median(ratios) for what, ratios in ranks.items()}
    names = [f"{n:.0e}" for n in sizes]
    for title, figures in (("to the first batch", first), (f"a batch of {BATCH}, int64 rows", later)):
        rows = [
            [order, *(f"{figures[order][name] * 1e3:,.3f} ms" if name in figures[order] else "" for name in names)]
            for order in ORDERS
        ]
        table(title, ["rows", *names], rows)
    smallest, largest = names[1 if len(names) > 2 else 0], names[-1]  # below, all rows fit one window of blocks
    checks = [
        Check(
            f"first batch, {order}: {largest} rows against {smallest}",
            first[order][largest] / first[order][smallest],
            3,
            False,
        )
        for order in ("in order", "blocks")
    ]
    checks += [
        Check(
            f"batch, {order}: {largest} rows against {smallest}",
            later[order][largest] / later[order][smallest],
            3,
            False,
        )
        for order in ("in order", "blocks")
    ]
    if "1e+06" in first["uniform"]:
        checks.append(Check("first batch, uniform: 1e+06 rows", first["uniform"]["1e+06"] * 1e3, 20, False, "ms"))
    checks += [
        Check(f"memory beside batch buffers: {name}", m["beyond_buffers"] / 1e6, BOUND_BYTES / 1e6, False, "MB")
        for name, m in memory.items()
    ]
    checks.append(
        Check(
            "two reading processes, of what two copying ones gain (1.8 if 2)",
            scaling["read"],
            min(1.8, 0.9 * scaling["copy"]),
            True,
        )
    )
    show("scale", checks)
    write(
        options,
        {"sizes": sizes, "batch_size": BATCH, "batches": BATCHES},
        {
            "first_batch_seconds": first,
            "batch_seconds": later,
            "memory_bytes": memory,
            "two_processes": scaling,
            "two_processes_rounds": ranks,
        },
        checks,
    )


if __name__ == "__main__":
    main()
