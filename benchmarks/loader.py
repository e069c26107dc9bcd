"""Shuffled epochs from a store of small images, the time to the first batch, and the memory over an epoch.

Epochs: 50,000 uint8 [3, 32, 32] with an int64 label, batches of 512, page cache warm. memfeed.Loader against the plain
DataLoader over the same tensors in memory, DataLoader over a memory-mapped TensorDict, the bare index_select loop into
one buffer, and the copy of the same bytes in order, which is the limit.

First batch: from ``Loader(...)`` to the first batch of a store just opened, unshuffled and shuffled, for many sizes.

Memory: anonymous and shared memory of a fresh process over an epoch, beyond what its imports took. Pages of mapped
files are not counted: they belong to the page cache.

    python benchmarks/loader.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, TensorDataset

import memfeed
from measure import Check, in_turns, medians, parser, ratio, seconds_of, show, table, write
from memfeed.order import permutation

BATCH = 512
OURS = "memfeed.Loader"
BOUND_BYTES = 40e6
MEMORY = Path(__file__).parent / "memory.py"


def identity(batch: Any) -> Any:
    return batch


class Epochs:
    """The contenders over the same rows; each gives the batches of an epoch in a given order, or in its own."""

    def __init__(self, base: Path, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 256, (rows, 3, 32, 32), dtype=torch.uint8, generator=generator)
        self.labels = torch.randint(0, 10, (rows,), generator=generator)
        self.store = memfeed.cache((self.images, self.labels), base / "images.mf", progress=False)
        memory = TensorDict({"images": self.images, "labels": self.labels}, batch_size=[rows])
        self.mapped = memory.memmap(str(base / "memmap"))
        self.dataset = TensorDataset(self.images, self.labels)
        self.columns = [self.store.column(0), self.store.column(1)]
        self.buffers = [torch.empty(BATCH, 3, 32, 32, dtype=torch.uint8), torch.empty(BATCH, dtype=torch.int64)]
        self.loader = memfeed.Loader(self.store, BATCH, shuffle=True)
        # workers that live on: their start is not what is compared
        self.workers = DataLoader(self.dataset, BATCH, shuffle=True, num_workers=2, persistent_workers=True)

    def bare(self, order: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """The loop that any loader's gather comes down to."""
        for ids in order.split(BATCH):
            yield tuple(
                torch.index_select(column, 0, ids, out=buffer[: len(ids)])
                for column, buffer in zip(self.columns, self.buffers, strict=True)
            )

    def copied(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """The same bytes, copied in order."""
        for first in range(0, len(self.labels), BATCH):
            parts = [column[first : first + BATCH] for column in self.columns]
            yield tuple(buffer[: len(part)].copy_(part) for buffer, part in zip(self.buffers, parts, strict=True))

    def check_equal(self) -> None:
        """Every contender gives the same batches for one order, and memfeed's own order is that permutation."""
        order = torch.from_numpy(permutation(len(self.labels), 0, 0))
        roads: dict[str, Any] = {
            "memfeed, shuffled": memfeed.Loader(self.store, BATCH, shuffle=True, seed=0),
            "memfeed, sampler": memfeed.Loader(self.store, BATCH, sampler=order.tolist()),
            "DataLoader": DataLoader(self.dataset, BATCH, sampler=order.tolist()),
            "DataLoader, 2 workers": DataLoader(self.dataset, BATCH, sampler=order.tolist(), num_workers=2),
            "TensorDict": DataLoader(self.mapped, BATCH, sampler=order.tolist(), collate_fn=identity),
            "bare": self.bare(order),
        }
        for name, batches in roads.items():
            seen = 0
            for ids, batch in zip(order.split(BATCH), batches, strict=True):
                images, labels = batch.values() if isinstance(batch, TensorDict) else batch
                assert torch.equal(images, self.images[ids]), name
                assert torch.equal(labels, self.labels[ids]), name
                seen += len(ids)
            assert seen == len(order), name
        for first, (images, labels) in zip(range(0, len(order), BATCH), self.copied(), strict=True):
            assert torch.equal(images, self.images[first : first + BATCH])
            assert torch.equal(labels, self.labels[first : first + BATCH])

    def contenders(self) -> dict[str, Callable[[], float]]:
        """One epoch of each, in seconds."""

        def drain(batches: Any) -> None:
            for _ in batches:
                pass

        plain = DataLoader(self.dataset, BATCH, shuffle=True)
        mapped = DataLoader(self.mapped, BATCH, shuffle=True, collate_fn=identity)
        return {
            OURS: lambda: seconds_of(lambda: drain(self.loader)),
            "DataLoader": lambda: seconds_of(lambda: drain(plain)),
            "DataLoader, 2 workers": lambda: seconds_of(lambda: drain(self.workers)),
            "DataLoader(TensorDict memmap)": lambda: seconds_of(lambda: drain(mapped)),
            "bare index_select loop": lambda: seconds_of(lambda: drain(self.bare(torch.randperm(len(self.labels))))),
            "contiguous copy": lambda: seconds_of(lambda: drain(self.copied())),
        }


def write_numbers(path: Path, rows: int) -> None:
    """A store whose row i is the int64 i."""
    step = 1 << 20
    with memfeed.Writer(path, like=torch.tensor(0), length=rows) as writer:
        for first in range(0, rows, step):
            last = min(first + step, rows)
            writer[first:last] = torch.arange(first, last)


def first_batch(path: Path, shuffle: bool) -> float:
    """Seconds from ``Loader(...)`` to its first batch, on a store just opened."""
    store = memfeed.open(path)
    batches: list[torch.Tensor] = []
    took = seconds_of(lambda: batches.append(next(iter(memfeed.Loader(store, BATCH, shuffle=shuffle)))))
    ids = torch.from_numpy(permutation(len(store), 0, 0)[:BATCH]) if shuffle else torch.arange(BATCH)
    assert torch.equal(batches[0], ids)
    return took


def memory_over_epoch(path: Path, batch: int, shuffle: bool) -> dict[str, int]:
    """What a fresh process says of itself, in bytes."""
    command = [sys.executable, str(MEMORY), str(path), str(batch), str(int(shuffle))]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    made = parser("loader", __doc__)
    made.add_argument("--dir", type=Path, help="a directory on the disk to write to")
    options = made.parse_args()
    quick = options.quick
    rows, rounds, least = (2048, 1, 0.0) if quick else (50_000, 15, 0.15)
    sizes = [10**3, 10**4] if quick else [10**4, 10**5, 10**6, 10**7, 10**8]
    most_shuffled, openings = 10**6, 3 if quick else 31
    large = 4096 if quick else 500_000
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        base = Path(directory)
        epochs = Epochs(base, rows)
        epochs.check_equal()
        seconds = in_turns(epochs.contenders(), rounds, least)
        median = medians(seconds)
        row_bytes = epochs.store.nbytes / rows

        starts: dict[str, Callable[[], float]] = {}
        for n in sizes:
            write_numbers(base / f"{n}.mf", n)
            for shuffle in (False, True):
                if not shuffle or n <= most_shuffled:
                    name = f"{n:,} rows, {'shuffled' if shuffle else 'in order'}"
                    starts[name] = lambda n=n, shuffle=shuffle: first_batch(base / f"{n}.mf", shuffle)
        first_seconds = in_turns(starts, openings)
        first_median = medians(first_seconds)

        with memfeed.Writer(base / "large.mf", like=(epochs.images[0], 0), length=large) as writer:
            for first in range(0, large, rows):
                count = min(rows, large - first)
                writer[first : first + count] = (epochs.images[:count], epochs.labels[:count])
        memory = {
            f"{rows:,} images, shuffled": memory_over_epoch(base / "images.mf", BATCH, True),
            f"{large:,} images, shuffled": memory_over_epoch(base / "large.mf", BATCH, True),
            f"{sizes[-1]:,} numbers, in order": memory_over_epoch(base / f"{sizes[-1]}.mf", 64 * BATCH, False),
        }

    ratios = {name: ratio(seconds, name, OURS) for name in seconds}
    volume = rows * row_bytes / 1e9
    table(
        f"epochs of {rows:,} uint8 [3, 32, 32] and a label, batches of {BATCH}, warm",
        ["", "epoch", "samples/s", "GB/s", "memfeed is"],
        [
            [
                name,
                f"{t * 1e3:.1f} ms",
                f"{rows / t:,.0f}",
                f"{volume / t:.1f}",
                f"{ratios[name]:.2f} x",
            ]
            for name, t in median.items()
        ],
    )
    checks = [
        Check(f"epoch: faster than {other}", ratio(seconds, other, OURS), 10, at_least=True)
        for other in ("DataLoader", "DataLoader, 2 workers")
    ]
    checks += [Check(f"first batch: {name}", t * 1e3, 20, False, "ms") for name, t in first_median.items()]
    checks += [
        Check(f"memory beside batch buffers: {name}", m["beyond_buffers"] / 1e6, BOUND_BYTES / 1e6, False, "MB")
        for name, m in memory.items()
    ]
    show("loader", checks)
    write(
        options,
        {"rows": rows, "row_bytes": row_bytes, "batch_size": BATCH, "rounds": rounds, "large_rows": large},
        {
            "median_seconds": median,
            "ratios": ratios,
            "median_first_batch_seconds": first_median,
            "memory_bytes": memory,
            "seconds": seconds,
            "first_batch_seconds": first_seconds,
        },
        checks,
    )


if __name__ == "__main__":
    main()
