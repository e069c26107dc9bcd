"""Store columns that are in memory: a TensorDict of 64 tensors, 256 MB, with memfeed.cache, torch.save and memmap.

All write the same tensors to the same disk in turns, each to a new directory. fsync is timed apart: it does nothing
while they run (torch.save and memmap() never call it, memfeed.cache calls it before its commit), and is called for all
of them afterwards. The time of memfeed includes the checksums of every byte and the commit.

    python benchmarks/columnar.py
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tensordict import TensorDict

import memfeed
from measure import Check, in_turns, medians, parser, ratio, seconds_of, show, sync_files, table, without_sync, write

TENSORS = 64


def columns(rows: int, width: int) -> TensorDict:
    """Return random float32 tensors [rows, width], by name."""
    generator = torch.Generator().manual_seed(0)
    made = {f"column{i}": torch.rand(rows, width, generator=generator) for i in range(TENSORS)}
    return TensorDict(made, batch_size=[rows])


def save(data: TensorDict, path: Path) -> None:
    path.mkdir()
    torch.save(data, path / "data.pt")


def memmap(data: TensorDict, path: Path, threads: int) -> None:
    data.memmap(str(path), num_threads=threads)


def cache(data: TensorDict, path: Path) -> None:
    memfeed.cache(data, path, progress=False)


def roads() -> dict[str, Callable[[TensorDict, Path], None]]:
    return {
        "memfeed.cache": cache,
        "torch.save": save,
        "memmap(num_threads=32)": lambda data, path: memmap(data, path, 32),
        "memmap()": lambda data, path: memmap(data, path, 0),
    }


def check_equal(data: TensorDict, base: Path) -> None:
    """Check that every program that is timed gives the same tensors back."""
    for name, road in roads().items():
        path = base / "checked"
        road(data, path)
        if name == "torch.save":
            found = torch.load(path / "data.pt", weights_only=False)
        elif name == "memfeed.cache":
            found = memfeed.open(path).tensordict()
        else:
            found = TensorDict.load_memmap(path)
        assert (found == data).all(), name
        shutil.rmtree(path)


def main() -> None:
    made = parser("columnar", __doc__)
    made.add_argument("--dir", type=Path, help="a directory on the disk to write to")
    options = made.parse_args()
    rows, width, rounds = (512, 64, 2) if options.quick else (16384, 64, 9)
    data = columns(rows, width)
    syncs: dict[str, list[float]] = {name: [] for name in roads()}
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        base = Path(directory)
        check_equal(data, base)

        def run(name: str) -> float:
            path = base / "store"
            with without_sync():
                took = seconds_of(lambda: roads()[name](data, path))
            syncs[name].append(sync_files(path))
            shutil.rmtree(path)
            return took

        seconds = in_turns({name: lambda name=name: run(name) for name in roads()}, rounds)
    median, synced = medians(seconds), medians(syncs)
    table(
        f"{TENSORS} tensors, {data.bytes() / 1e6:.0f} MB",
        ["", "without fsync", "fsync"],
        [[name, f"{took * 1e3:.0f} ms", f"{synced[name] * 1e3:.0f} ms"] for name, took in median.items()],
    )
    checks = [
        Check(f"faster than {other}", ratio(seconds, other, "memfeed.cache"), limit, at_least=True)
        for other, limit in (("torch.save", 1.0), ("memmap(num_threads=32)", 1.0))
    ]
    show("columnar cache, fsync apart", checks)
    write(
        options,
        {"tensors": TENSORS, "shape": [rows, width], "dtype": "float32", "bytes": data.bytes(), "rounds": rounds},
        {"median_seconds": median, "median_sync_seconds": synced, "seconds": seconds, "sync_seconds": syncs},
        checks,
    )


if __name__ == "__main__":
    main()
