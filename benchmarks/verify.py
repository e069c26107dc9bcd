"""Compare ``verify`` with a plain read of the same files in order, cold (removed from the page cache) and warm.

Both read in turns. The plain read fills one buffer of 4 MiB again and again, file after file.

    python benchmarks/verify.py
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import memfeed
from measure import Check, drop_pages, in_turns, medians, parser, ratio, seconds_of, show, table, write

BUFFER_BYTES = 4 << 20


def read_all(path: Path) -> int:
    """Read every column file once, in order. Return the bytes read."""
    buffer, done = memoryview(bytearray(BUFFER_BYTES)), 0
    for file in sorted([*path.rglob("*.memmap"), *path.rglob("*.bin")]):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while got := os.readv(fd, [buffer]):
                done += got
        finally:
            os.close(fd)
    return done


def main() -> None:
    made = parser("verify", __doc__)
    made.add_argument("--dir", type=Path, help="a directory on the disk to read from")
    options = made.parse_args()
    size, rounds = (16 << 20, 2) if options.quick else (1 << 30, 5)
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        path = Path(directory) / "store.mf"
        generator = torch.Generator().manual_seed(0)
        row = 64 << 10
        rows = torch.randint(0, 256, (size // row, row), dtype=torch.uint8, generator=generator)
        memfeed.cache({"x": rows, "y": torch.arange(len(rows))}, path, progress=False)
        del rows
        total = sum(file.stat().st_size for file in [*path.rglob("*.memmap"), *path.rglob("*.bin")])
        assert read_all(path) == total
        memfeed.open(path).verify()

        def warm(work: Callable[[], object]) -> float:
            return seconds_of(work)

        def cold(work: Callable[[], object]) -> float:
            drop_pages(path)
            return seconds_of(work)

        works: dict[str, Callable[[], object]] = {
            "verify": lambda: memfeed.open(path).verify(),
            "read": lambda: read_all(path),
        }
        seconds = {
            f"{name}, {state}": times
            for state, timed in (("cold", cold), ("warm", warm))
            for name, times in in_turns(
                {name: lambda work=work, timed=timed: timed(work) for name, work in works.items()}, rounds
            ).items()
        }
    median = medians(seconds)
    rates = {name: total / took / 1e9 for name, took in median.items()}
    table(f"verify, {total / 1e6:,.0f} MB", ["", "GB/s"], [[name, f"{rate:.2f}"] for name, rate in rates.items()])
    checks = [
        Check(
            f"verify's rate, of a read's, {state}",
            ratio(seconds, f"read, {state}", f"verify, {state}"),
            0.7,
            True,
        )
        for state in ("cold", "warm")
    ]
    show("verify", checks)
    write(
        options,
        {"bytes": total, "rounds": rounds},
        {"gigabytes_per_second": rates, "median_seconds": median, "seconds": seconds},
        checks,
    )


if __name__ == "__main__":
    main()
