"""Compare writing a store with one epoch of the plain DataLoader: both decode and resize every photograph once.

The dataset gives JPEG photographs as uint8 [3, 256, 256] and a label. memfeed.cache probes it, decodes, writes,
computes checksums and commits; the DataLoader decodes, collates and returns batches. Same dataset, same number of
workers, in turns. fsync is timed apart, see columnar.py. The CPU time of all processes together is given too, because
it depends less on other programs.

    python benchmarks/convert.py
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import pil_to_tensor

import memfeed
from measure import (
    PHOTOS,
    Check,
    Seconds,
    cpu_seconds,
    in_turns,
    medians,
    parser,
    ratio,
    seconds_of,
    show,
    sync_files,
    table,
    without_sync,
    write,
)

SIDE = 256


class Photographs(Dataset):
    """JPEG files, repeated to a length, decoded and resized at every access."""

    def __init__(self, files: list[Path], length: int) -> None:
        self.files, self.length = files, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        with Image.open(self.files[index % len(self.files)]) as image:
            resized = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        return pil_to_tensor(resized), index % 2


def make_photographs(directory: Path, count: int) -> list[Path]:
    """Write smooth random pictures of about 500 x 375 pixels, for machines without the photographs."""
    generator = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (24, 32, 3), np.uint8))
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(directory / f"{number}.jpg", quality=90)
    return sorted(directory.glob("*.jpg"))


def check_equal(dataset: Dataset, base: Path) -> None:
    """Check that the store holds the samples that the DataLoader gives."""
    store = memfeed.cache(dataset, base / "checked", workers=2, progress=False)
    ours = memfeed.Loader(store, 32)
    for (images, labels), (mine, my_labels) in zip(DataLoader(dataset, 32), ours, strict=True):
        assert torch.equal(images, mine), "images"
        assert torch.equal(labels, my_labels), "labels"
    shutil.rmtree(base / "checked")


def main() -> None:
    made = parser("convert", __doc__)
    made.add_argument("--dir", type=Path, help="a directory on the disk to write to")
    made.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    options = made.parse_args()
    length, rounds = (40, 1) if options.quick else (1588, 7)
    counts = options.workers[-1:] if options.quick else options.workers
    syncs: Seconds = {}
    cpu: Seconds = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        base = Path(directory)
        real = PHOTOS.is_dir()
        files = sorted(PHOTOS.rglob("*.jpg")) if real else make_photographs(base, 16 if options.quick else 200)
        dataset = Photographs(files, length)
        check_equal(dataset, base)

        def epoch(workers: int) -> float:
            def run() -> None:
                for _ in DataLoader(dataset, batch_size=32, num_workers=workers):
                    pass

            return seconds_of(run)

        def cache(name: str, workers: int) -> float:
            with without_sync():
                took = seconds_of(lambda: memfeed.cache(dataset, base / "store", workers=workers, progress=False))
            syncs.setdefault(name, []).append(sync_files(base / "store"))
            shutil.rmtree(base / "store")
            return took

        def counted(name: str, run: Callable[[], float]) -> float:
            before = cpu_seconds()
            took = run()
            cpu.setdefault(name, []).append(cpu_seconds() - before)
            return took

        contenders = {}
        for workers in counts:
            plain, ours = f"DataLoader, {workers} workers", f"memfeed.cache, {workers} workers"
            contenders[plain] = lambda n=plain, w=workers: counted(n, lambda: epoch(w))
            contenders[ours] = lambda n=ours, w=workers: counted(n, lambda: cache(n, w))
        seconds = in_turns(contenders, rounds)
    median = medians(seconds)
    synced, busy = medians(syncs), medians(cpu)
    table(
        f"{length} photographs",
        ["", "time", "CPU time", "images/s", "fsync"],
        [
            [name, f"{took:.2f} s", f"{busy[name]:.2f} s", f"{length / took:,.0f}", f"{synced.get(name, 0):.2f} s"]
            for name, took in median.items()
        ],
    )
    checks = [
        Check(
            f"cache / DataLoader epoch, {workers} workers",
            ratio(seconds, f"memfeed.cache, {workers} workers", f"DataLoader, {workers} workers"),
            1.05,
            at_least=False,
        )
        for workers in counts
    ]
    show("conversion, fsync apart", checks)
    write(
        options,
        {"images": length, "files": len(files), "real": real, "side": SIDE, "batch_size": 32, "rounds": rounds},
        {
            "median_seconds": median,
            "median_cpu_seconds": busy,
            "median_sync_seconds": synced,
            "seconds": seconds,
            "cpu_seconds": cpu,
        },
        checks,
    )


if __name__ == "__main__":
    main()
