"""Time epochs from the disk: the page cache is emptied before each, and one store is larger than the memory allowed.

Compares memfeed.Loader with the index_select loop over the same mapped file, whose page faults read one place after
the other, and with reading as many bytes of the file in order, which is fastest for a disk.

    python benchmarks/cold.py
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import memfeed
from measure import Check, drop_pages, in_turns, medians, parser, ratio, seconds_of, show, table, write

OURS = "memfeed.Loader"
FAULTS = "bare loop, page faults"
IN_ORDER = "reading the file in order"
BOUNDED = Path(__file__).parent / "bounded.py"
CGROUPS = Path("/sys/fs/cgroup")


def write_images(path: Path, rows: int, side: int) -> None:
    """Write images whose first bytes and label are their row number."""
    step = 500
    rng = np.random.default_rng(0)
    with memfeed.Writer(path, like=(torch.zeros(3, side, side, dtype=torch.uint8), 0), length=rows) as writer:
        for first in range(0, rows, step):
            numbers = np.arange(first, min(first + step, rows))
            pictures = rng.integers(0, 256, (len(numbers), 3, side, side), np.uint8)
            pictures.reshape(len(numbers), -1)[:, :8] = numbers.view(np.uint8).reshape(-1, 8)
            writer[first : first + len(numbers)] = (torch.from_numpy(pictures), torch.from_numpy(numbers))


def numbers_of(pictures: torch.Tensor) -> torch.Tensor:
    return pictures.flatten(1)[:, :8].contiguous().view(torch.int64)[:, 0]


class Cold:
    """The programs to compare, over some rows of a store, each from an empty page cache."""

    def __init__(self, path: Path, batch: int, rows: np.ndarray | None) -> None:
        self.path, self.batch, self.rows = path, batch, rows
        store = memfeed.open(path)
        self.count = len(store) if rows is None else len(rows)
        self.row_bytes = store.schema.fields[0].row_bytes
        self.shape = store.schema.fields[0].row_shape
        self.file = path / "0.memmap"

    def loader(self, epoch: int = 0) -> memfeed.Loader:
        """Open the store again and return a loader on it."""
        store = memfeed.open(self.path)
        loader = memfeed.Loader(store if self.rows is None else store.subset(self.rows), self.batch, shuffle=True)
        loader.set_epoch(epoch)
        return loader

    def ours(self) -> float:
        """Return the seconds of an epoch of memfeed."""
        drop_pages(self.path)

        def run() -> None:
            for _ in self.loader():
                pass

        return seconds_of(run)

    def faults(self) -> float:
        """Return the seconds of the bare loop."""
        drop_pages(self.path)
        store = memfeed.open(self.path)
        columns = [store.column(0), store.column(1)]
        buffers = [torch.empty(self.batch, *self.shape, dtype=torch.uint8), torch.empty(self.batch, dtype=torch.int64)]
        rows = torch.arange(len(store)) if self.rows is None else torch.from_numpy(self.rows)

        def run() -> None:
            for at in torch.randperm(len(rows)).split(self.batch):
                ids = rows[at]
                for column, buffer in zip(columns, buffers, strict=True):
                    torch.index_select(column, 0, ids, out=buffer[: len(ids)])

        return seconds_of(run)

    def sigterm_unwinds(self) -> float:
        """Return the seconds to read as many bytes in order."""
        drop_pages(self.path)
        left, buffer = self.count * self.row_bytes, memoryview(bytearray(1 << 24))

        def run() -> None:
            at = 0
            with open(self.file, "rb", buffering=0) as file:
                while at < left:
                    at += file.readinto(buffer[: min(len(buffer), left - at)]) or left

        return seconds_of(run)

    def check(self) -> None:
        """Check that every row comes once, with its own label, and that rows are read ahead from the disk."""
        drop_pages(self.path)
        loader, seen = self.loader(), []
        for pictures, labels in loader:
            assert torch.equal(numbers_of(pictures), labels)
            seen.append(labels.clone())
        expected = np.arange(self.count) if self.rows is None else np.sort(self.rows)
        assert np.array_equal(torch.cat(seen).sort().values.numpy(), expected)
        assert loader.stats()["cold"], "the rows came out of the page cache"

    def race(self, rounds: int) -> dict[str, Any]:
        """Time all three in turns."""
        self.check()
        seconds = in_turns({OURS: self.ours, FAULTS: self.faults, IN_ORDER: self.sigterm_unwinds}, rounds)
        return {
            "rows": self.count,
            "bytes": self.count * self.row_bytes,
            "median_seconds": medians(seconds),
            "ratios": {name: ratio(seconds, name, OURS) for name in seconds},
            "seconds": seconds,
        }


# --- more than memory


@contextlib.contextmanager
def limited(limit: int) -> Iterator[Path | None]:
    """Make a control group with this limit in bytes, page cache included. Return None where that is not possible."""
    v1 = CGROUPS / "memory"
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    group = next((path for _, names, path in own if names == ("memory" if v1.exists() else "")), "/")
    parent = (v1 if v1.exists() else CGROUPS) / group.lstrip("/")
    made = parent / f"memfeed-benchmark-{os.getpid()}"
    try:
        made.mkdir()
        (made / ("memory.limit_in_bytes" if v1.exists() else "memory.max")).write_text(str(limit))
    except OSError:
        with contextlib.suppress(OSError):
            made.rmdir()
        yield None
        return
    try:
        yield made
    finally:
        made.rmdir()


def beyond_memory(path: Path, limit: int, batch: int, orders: Sequence[str]) -> dict[str, Any]:
    """Time epochs in a process limited to ``limit`` bytes, by order; "read" is one of them. See bounded.py."""
    found: dict[str, Any] = {}
    with limited(limit) as group:
        for order in orders:
            drop_pages(path)
            command = [sys.executable, str(BOUNDED), str(path), order, str(batch), str(limit), str(group or "")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if done.returncode:
                raise RuntimeError(f"{order}: {done.stderr}")
            found[order] = json.loads(done.stdout)
        return {"limit_bytes": limit, "cgroup": group is not None, "orders": found}


def main() -> None:
    made = parser("cold", __doc__)
    made.add_argument("--dir", type=Path, help="a directory on the disk to write to; not one in memory")
    options = made.parse_args()
    quick = options.quick
    rounds, share = (1, 20) if quick else (5, 1)
    works: dict[str, Callable[[Path], Cold]] = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        base = Path(directory)
        whole, large, small = 4_000 // share, 12_000 // share, 50_000 // share
        write_images(base / "whole.mf", whole, 256)
        write_images(base / "large.mf", large, 256)
        write_images(base / "small.mf", small, 32)
        eighth = np.random.default_rng(1).permutation(large)[: large // 8]
        works = {
            f"{whole:,} images of 196 KB": lambda base: Cold(base / "whole.mf", 64, None),
            f"a random eighth of {large:,} images of 196 KB": lambda base: Cold(base / "large.mf", 64, eighth),
            f"{small:,} images of 3 KB": lambda base: Cold(base / "small.mf", 512, None),
        }
        results = {name: make(base).race(rounds) for name, make in works.items()}
        limit = max(3 * 256 * 256 * large // 3, 700_000_000)
        orders = ["read", "uniform"] if quick else ["read", "in order", "blocks", "uniform"]
        bounded = beyond_memory(base / "large.mf", limit, 64, orders)
    for name, found in results.items():
        table(
            f"{name}, {found['bytes'] / 1e6:,.0f} MB, page cache emptied before each epoch",
            ["", "epoch", "GB/s", "memfeed is"],
            [
                [who, f"{t:.3f} s", f"{found['bytes'] / t / 1e9:.2f}", f"{found['ratios'][who]:.2f} x as fast"]
                for who, t in found["median_seconds"].items()
            ],
        )
    in_orders = bounded["orders"]
    reading = in_orders["read"]["bytes_per_second"]
    table(
        f"a store of {in_orders['read']['bytes'] / 1e6:,.0f} MB with {bounded['limit_bytes'] / 1e6:,.0f} MB of memory",
        ["", "GB/s", "of reading in order", "largest resident"],
        [
            [
                name,
                f"{one['bytes_per_second'] / 1e9:.2f}",
                f"{one['bytes_per_second'] / reading:.2f}",
                f"{one['most_resident_bytes'] / 1e6:,.0f} MB",
            ]
            for name, one in in_orders.items()
        ],
    )
    first, second, _ = list(results)
    checks = [
        Check(f"{first}: {FAULTS} take", results[first]["ratios"][FAULTS], 1.3, at_least=True),
        Check(f"{first}: {IN_ORDER} takes", results[first]["ratios"][IN_ORDER], 0.9, at_least=True),
        Check(f"{second}: {FAULTS} take", results[second]["ratios"][FAULTS], 5, at_least=True),
        Check(f"{second}: {IN_ORDER} takes", results[second]["ratios"][IN_ORDER], 0.8, at_least=True),
    ]
    checks += [
        Check(f"beyond memory, {name}: of reading in order", in_orders[name]["bytes_per_second"] / reading, 0.8, True)
        for name in orders[1:]
    ]
    show("cold", checks)
    write(
        options,
        {"rounds": rounds},
        {"works": results, "median_seconds": {k: v["median_seconds"] for k, v in results.items()}, "bounded": bounded},
        checks,
    )


if __name__ == "__main__":
    main()
