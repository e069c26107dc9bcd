"""Rates against the size of a row, the number of columns, the size of the store and the cores; quiet and busy.

Each point is a shuffled epoch, page cache warm, of ``memfeed.Loader`` and of a loop that copies the same rows with
`torch.index_select` into one buffer. Both must give the same sum of row numbers. Busy: a process spins on every core.
"Read once" is what a store costs that is read for one epoch only: `memfeed.cache` from memory and that epoch, against
the loop over the tensor in memory.

    python benchmarks/curves.py
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import memfeed
from measure import in_turns, medians, parser, ratio, seconds_of, table, write

LOOP, OURS, ONCE = "index_select loop", "memfeed.Loader", "memfeed, converted and read once"
BATCH_BYTES, MOST_BATCH = 8 << 20, 512
Contenders = dict[str, Callable[[], float]]


@contextlib.contextmanager
def spinning(count: int) -> Iterator[None]:
    """Take this many cores: a process spins on each."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def columns_of(rows: int, row_bytes: int, columns: int) -> dict[str, torch.Tensor]:
    """Return a tensor of row numbers, int64 [rows], and others of random bytes, ``row_bytes`` a row in all."""
    made = {"row": torch.arange(rows)}
    each = (row_bytes - 8) // max(columns - 1, 1)
    for number in range(columns - 1):
        made[f"c{number}"] = torch.randint(0, 256, (rows, each), dtype=torch.uint8)
    return made


def loop(columns: list[torch.Tensor], batch: int) -> int:
    """Copy all rows in random order to one buffer per column. Return the sum of the row numbers."""
    buffers = [torch.empty(batch, *column.shape[1:], dtype=column.dtype) for column in columns]
    total = 0
    for ids in torch.randperm(len(columns[0])).split(batch):
        for column, buffer in zip(columns, buffers, strict=True):
            torch.index_select(column, 0, ids, out=buffer[: len(ids)])
        total += int(buffers[0][: len(ids)].sum())
    return total


def drain(loader: memfeed.Loader) -> int:
    """Read an epoch. Return the sum of the row numbers."""
    return sum(int(batch["row"].sum()) for batch in loader)


def contenders(data: dict[str, torch.Tensor], path: Path, once: bool = False) -> tuple[Contenders, dict[str, Any]]:
    """Return functions that take an epoch each, after a comparison of what they read, and what they read."""
    rows, row_bytes = len(data["row"]), sum(column[0].nbytes for column in data.values())
    batch = max(1, min(MOST_BATCH, BATCH_BYTES // row_bytes))
    store = memfeed.cache(data, path, progress=False)
    mapped = [store.column(name) for name in data]
    loader = memfeed.Loader(store, batch, shuffle=True, seed=0)
    expected = rows * (rows - 1) // 2
    assert drain(loader) == loop(mapped, batch) == expected, "the programs read other rows"
    made: Contenders = {
        LOOP: lambda: seconds_of(lambda: loop(mapped, batch)),
        OURS: lambda: seconds_of(lambda: drain(loader)),
    }
    if once:
        again = path.with_name("once.mf")

        def convert_and_read() -> None:
            drain(memfeed.Loader(memfeed.cache(data, again, progress=False), batch, shuffle=True))

        def timed() -> float:
            shutil.rmtree(again, ignore_errors=True)
            return seconds_of(convert_and_read)

        made[ONCE] = timed
    return made, {"rows": rows, "row_bytes": row_bytes, "columns": len(data), "batch_size": batch}


def main() -> None:
    made = parser("curves", __doc__)
    made.add_argument("--dir", type=Path, help="a directory on the disk to write to")
    options = made.parse_args()
    quick, cores = options.quick, os.cpu_count() or 1
    total = (1 if quick else 128) << 20
    sizes = [8, 4096] if quick else [8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 8 << 20]
    counts = [1, 10] if quick else [1, 10, 100, 1000]
    stores = [1] if quick else [1, 8, 64, 256]
    threads = sorted({1, cores, *(2**e for e in range(cores.bit_length()) if 2**e <= cores)})
    points: list[tuple[str, float, dict[str, Any]]] = [
        *(("row size", size, {"shape": (max(6, min(400_000, total // size)), size, 1 + (size > 8))}) for size in sizes),
        *(("columns", n, {"shape": (4_000 if n < 1000 else 1_000, 8 * n + 8, n)}) for n in counts),
        *(("store size", mb << 20, {"shape": ((mb << 20) // 4096, 4096, 2)}) for mb in stores),
        *(("cores", n, {"shape": (total // 196_608, 196_608 + 8, 2), "threads": n}) for n in threads),
    ]
    rounds, least = (1, 0.0) if quick else (5, 0.15)
    curves: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        path = Path(directory) / "a.mf"
        for axis, at, point in points:
            torch.set_num_threads(point.get("threads", cores))
            data = columns_of(*point["shape"])
            programs, about = contenders(data, path, once=axis == "row size")
            found: dict[str, Any] = {"at": at, **about}
            for load, spinners in (("quiet", 0), ("busy", cores)):  # what is busy is slow: fewer rounds
                running = {who: run for who, run in programs.items() if who != ONCE or load == "quiet"}
                with spinning(spinners):
                    seconds = in_turns(running, rounds if load == "quiet" else min(rounds, 3), least)
                found[load] = {
                    "median_seconds": medians(seconds),
                    "ratio": ratio(seconds, LOOP, OURS),  # memfeed is x times as fast
                    "seconds": seconds,
                }
            curves.setdefault(axis, []).append(found)
            shutil.rmtree(path)
    for axis, found_points in curves.items():
        table(
            axis,
            ["", *(f"{who}, {load}" for load in ("quiet", "busy") for who in (OURS, LOOP)), "memfeed is"],
            [
                [
                    f"{one['at']:,}",
                    *(
                        f"{one['rows'] * one['row_bytes'] / one[load]['median_seconds'][who] / 1e9:.2f} GB/s"
                        for load in ("quiet", "busy")
                        for who in (OURS, LOOP)
                    ),
                    f"{one['quiet']['ratio']:.2f} x",
                ]
                for one in found_points
            ],
        )
    write(options, {"cores": cores, "rounds": rounds}, {"curves": curves}, [])


if __name__ == "__main__":
    main()
