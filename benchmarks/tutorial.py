"""Repeat the four measurements of the tensorclass / ImageNet tutorial: DataLoader and memfeed, train and val.

The tutorial (https://pytorch.org/tensordict/stable/tutorials/tensorclass_imagenet.html) reads hymenoptera_data, 244
train and 153 val photographs, with batches of 8. As there, the DataLoader decodes and transforms each photograph
(train: RandomResizedCrop(224), flip, normalise; val: Resize(256), CenterCrop(224), normalise); the store holds uint8
[3, 256, 256] for train, cropped, flipped and normalised per batch, and finished float32 [3, 224, 224] for val. The
tutorial put those floats into a uint8 memmap, which changes their values; here they are unchanged, in four times the
bytes. Both shuffle train, and neither shuffles val.

The DataLoader has 0 workers to one per core, which are kept between epochs; memfeed is compared with the best number.
An epoch is timed from iter() to the last batch. "Steady" is the median of the epochs after the first. "First" is the
first epoch of a new loader (the DataLoader starts its workers). "Cold" is a steady epoch after the photographs or the
store were removed from the page cache; the store is then mapped again.

    python benchmarks/tutorial.py
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import datasets, transforms

import charts
import memfeed
from measure import PHOTOS, Check, drop_pages, in_turns, medians, parser, ratio, seconds_of, show, table, write
from memfeed.order.orders import permutation
from memfeed.random import Keys
from memfeed.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
PRINTED = {"train": (911.0742, 1993.1675), "val": (537.7756, 20667.9100)}  # by the tutorial: DataLoader, tensorclass
AUGMENT = Compose([RandomCrop(224), RandomHorizontalFlip(), Normalize(MEAN, STD)])
MEMFEED = "memfeed.Loader"


@dataclass
class Part:
    """The train or the val half: what the DataLoader reads, and the store."""

    name: str
    dataset: Dataset
    cached: Dataset
    store: memfeed.Store
    directory: Path
    shuffle: bool
    transform: Compose | None

    def __len__(self) -> int:
        return len(self.store)

    def dataloader(self, batch: int, workers: int) -> DataLoader:
        """Return a DataLoader that decodes and transforms each photograph in each epoch."""
        return DataLoader(
            self.dataset, batch, shuffle=self.shuffle, num_workers=workers, persistent_workers=workers > 0
        )

    def loader(self, batch: int) -> memfeed.Loader:
        """Return a loader that reads the store and transforms each batch."""
        return memfeed.Loader(self.store, batch, shuffle=self.shuffle, transform=self.transform)


def parts(data: Path, base: Path, most: int | None) -> list[Part]:
    """Write both stores and return both halves; with ``most``, only so many images of each, for a quick run."""
    normalise = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    train = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), *normalise]
    raw = [transforms.Resize((256, 256)), transforms.PILToTensor()]
    val = [transforms.Resize(256), transforms.CenterCrop(224), *normalise]

    def folder(name: str, steps: list[Any]) -> Dataset:
        found = datasets.ImageFolder(data / name, transforms.Compose(steps))
        return found if most is None else Subset(found, range(0, len(found), len(found) // most))

    made = []
    for name, live, cached, transform in (("train", train, raw, AUGMENT), ("val", val, val, None)):
        dataset = folder(name, cached)
        store = memfeed.cache(dataset, base / f"{name}.mf", progress=False)
        made.append(Part(name, folder(name, live), dataset, store, data / name, transform is not None, transform))
    return made


def check_equal(part: Part) -> None:
    """Check that the store holds the dataset's values and that batches are right, before anything is timed."""
    rows = permutation(len(part), 0, 0) if part.shuffle else torch.arange(len(part)).numpy()
    expected = DataLoader(part.cached, 8, sampler=rows.tolist())
    plain = memfeed.Loader(part.store, 8, shuffle=part.shuffle, seed=0)
    final = memfeed.Loader(part.store, 8, shuffle=part.shuffle, seed=0, transform=part.transform)
    for number, ((images, labels), (mine, my_labels), (last, _)) in enumerate(zip(expected, plain, final, strict=True)):
        assert torch.equal(images, mine), f"{part.name}: images of batch {number}"
        assert torch.equal(labels, my_labels), f"{part.name}: labels of batch {number}"
        if part.transform is not None:
            keys = Keys(seed=0, epoch=0, rows=torch.from_numpy(rows[8 * number : 8 * number + 8]))
            images = part.transform.reference(images, keys)
            torch.testing.assert_close(last, images, rtol=0, atol=2e-6)
        else:
            assert torch.equal(images, last), f"{part.name}: batch {number}"


def drain(batches: Any, expected: int) -> None:
    seen = 0
    for images, _ in batches:
        seen += len(images)
    assert seen == expected, (seen, expected)


def steady(part: Part, batch: int, counts: list[int], rounds: int, least: float) -> tuple[dict[str, Any], int]:
    """Return the seconds of whole epochs, in turns, and the best number of workers."""
    loaders: dict[str, Any] = {f"DataLoader, {w} workers": part.dataloader(batch, w) for w in counts}
    loaders[MEMFEED] = part.loader(batch)
    first = {name: seconds_of(lambda it=it: drain(it, len(part))) for name, it in loaders.items()}
    contenders = {name: lambda it=it: seconds_of(lambda: drain(it, len(part))) for name, it in loaders.items()}
    seconds = in_turns(contenders, rounds, least)
    median = medians(seconds)
    best = min(counts, key=lambda w: median[f"DataLoader, {w} workers"])
    return {"first_seconds": first, "median_seconds": median, "seconds": seconds}, best


def cold(part: Part, batch: int, workers: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of an epoch after its files were removed from the page cache."""
    dataloader = part.dataloader(batch, workers)
    drain(dataloader, len(part))  # starts the workers
    where = part.store.path

    def decoded() -> float:
        drop_pages(part.directory)
        return seconds_of(lambda: drain(dataloader, len(part)))

    def read() -> float:
        drop_pages(where)
        part.store = memfeed.open(where)
        took = seconds_of(lambda: drain(part.loader(batch), len(part)))
        _unmap(part)
        return took

    _unmap(part)
    contenders: dict[str, Callable[[], float]] = {f"DataLoader, {workers} workers": decoded, MEMFEED: read}
    seconds = in_turns(contenders, rounds)
    return {"median_seconds": medians(seconds), "seconds": seconds}


def _unmap(part: Part) -> None:
    part.store = memfeed.open(part.store.path)  # maps a column when it is first read
    gc.collect()


def main() -> None:
    made = parser("tutorial", __doc__)
    made.add_argument("--data", type=Path, default=PHOTOS, help="hymenoptera_data, with train/ and val/")
    made.add_argument("--dir", type=Path, help="a directory on the disk for the stores")
    made.add_argument("--chart", type=Path, help="draw the chart here (default: docs/tutorial.png, none with --quick)")
    options = made.parse_args()
    if not (options.data / "train").is_dir():
        made.error(
            f"{options.data}: found no train/ there; expected the photographs of hymenoptera_data: "
            "unpack https://download.pytorch.org/tutorial/hymenoptera_data.zip and pass --data DIR"
        )
    quick = options.quick
    cores = len(os.sched_getaffinity(0))
    counts = [0, 1] if quick else list(range(cores + 1))
    rounds, cold_rounds, least = (1, 1, 0.0) if quick else (7, 5, 0.3)
    figures: dict[str, Any] = {}
    checks = []
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        for part in parts(options.data, Path(directory), 16 if quick else None):
            check_equal(part)
            figures[part.name] = {
                "images": len(part),
                "store_bytes": part.store.nbytes,
                "row": [str(field.describe()) for field in part.store.schema],
                "file_bytes": sum(path.stat().st_size for path in part.directory.rglob("*.jpg")),
                "tutorial_printed": PRINTED[part.name],
            }
            for batch in (8, 64):
                warm, best = steady(part, batch, counts, rounds, least)
                chilled = cold(part, batch, best, cold_rounds)
                rates = {name: len(part) / t for name, t in warm["median_seconds"].items()}
                theirs = f"DataLoader, {best} workers"
                times = ratio(warm["seconds"], theirs, MEMFEED)
                figures[part.name][f"batch_{batch}"] = {
                    "best_workers": best,
                    "images_per_second": rates,
                    "first_epoch_images_per_second": {n: len(part) / t for n, t in warm["first_seconds"].items()},
                    "cold_images_per_second": {n: len(part) / t for n, t in chilled["median_seconds"].items()},
                    "ratio": times,
                    "first_epoch_ratio": warm["first_seconds"][theirs] / warm["first_seconds"][MEMFEED],
                    "cold_ratio": ratio(chilled["seconds"], theirs, MEMFEED),
                    "warm": warm,
                    "cold": chilled,
                }
                _print(part, batch, figures[part.name][f"batch_{batch}"])
                printed = PRINTED[part.name][1] / PRINTED[part.name][0]
                checks.append(Check(f"{part.name}, batches of {batch}", times, printed, at_least=True))
    show("memfeed / the best DataLoader, warm, against the tutorial's ratio", checks)
    about = {"data": options.data.name, "batch_sizes": [8, 64], "rounds": rounds, "cold_rounds": cold_rounds}
    write(options, about, {"parts": figures}, checks)
    chart = options.chart or (None if quick else Path(__file__).parents[1] / "docs" / "tutorial.png")
    if chart:
        charts.tutorial(options.json, chart)


def _print(part: Part, batch: int, figures: dict[str, Any]) -> None:
    rows = []
    for name, rate in figures["images_per_second"].items():
        cold_rate = figures["cold_images_per_second"].get(name)
        first = figures["first_epoch_images_per_second"][name]
        rows.append([name, f"{rate:,.0f}", f"{first:,.0f}", f"{cold_rate:,.0f}" if cold_rate else "-"])
    title = f"{part.name}: {len(part)} images, batches of {batch}, images/s"
    table(title, ["", "steady", "first epoch", "cold cache"], rows)


if __name__ == "__main__":
    main()
