"""The demo from start to finish: images, a lap from DataLoader, conversion, a lap from memfeed, table, picture."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils.data import DataLoader, Subset

from memfeed.convert.cache import cache
from memfeed.convert.image_folder import FIELDS, image_folder, to_pixels
from memfeed.demo.photos import make_photos
from memfeed.demo.picture import save_picture
from memfeed.demo.race import CROP, MEAN, RESIZE, STD, Trainer, lap
from memfeed.demo.result import Result
from memfeed.demo.table import FOOTNOTE, table
from memfeed.loading.loader import Loader
from memfeed.system.extras import require
from memfeed.system.progress import Progress
from memfeed.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip

BATCH_SIZE = 32
SEED = 0


def run(
    images: Path | None = None,
    *,
    count: int = 1000,
    out: Path = Path("memfeed-demo.png"),
    workers: int | None = None,
    progress: bool = True,
    console: Console | None = None,
) -> Result:
    """Runs the race, prints its table, and draws it into the PNG file ``out``.

    Args:
        images: a tree of images, one directory per class; None makes ``count`` photo-like JPEGs.
        count: images at most.
        workers: of DataLoader and of the conversion; None: one per core.
        console: where the table goes; None: stdout.

    Raises:
        ModuleNotFoundError: an extra is missing. OSError: no images there, or no place for ``out``.
    """
    require("vision", "torchvision", "PIL")
    require("plots", "matplotlib")
    if not out.absolute().parent.is_dir():
        raise FileNotFoundError(f"{out.parent}: found no such directory; expected one to save {out.name} in")
    if out.is_dir():
        raise IsADirectoryError(f"{out}: found a directory; expected the name of a PNG file to write")
    console = console or Console(highlight=False)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with (
        tempfile.TemporaryDirectory(prefix="memfeed-demo-") as scratch,
        torch.random.fork_rng(devices),
        _half_the_threads(),
    ):
        if images is None:
            images = Path(scratch) / "photos"
            with Progress("making photos", count, unit=" photos", shown=progress) as bar:
                make_photos(images, count, seed=SEED, advance=bar.advance)
        result = _race(images, count, Path(scratch) / "demo.mf", _cores() if workers is None else workers, progress)
    save_picture(result, out)
    console.print(table(result))
    console.print(FOOTNOTE, style="dim")
    console.print(f"picture: {out}", soft_wrap=True)
    return result


def _race(root: Path, count: int, store_path: Path, workers: int, progress: bool) -> Result:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder, chosen = _chosen(root, count)
    total, classes = len(chosen), len(folder.classes)
    image_bytes = _read_once([folder.samples[index][0] for index in chosen])
    batch_size = min(BATCH_SIZE, max(1, total // 4))
    Trainer(classes, device, SEED).warm_up(batch_size)

    decoding = Subset(image_folder(root, _usual_transform()), chosen)
    batches = DataLoader(
        decoding,
        batch_size,
        shuffle=True,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator().manual_seed(SEED),
    )
    plain = lap("DataLoader", batches, total, Trainer(classes, device, SEED), progress=progress)

    started = time.perf_counter()
    pixels = Subset(image_folder(root, to_pixels(f"{RESIZE}x{RESIZE}")), chosen)
    store = cache(pixels, store_path, fields=FIELDS, workers=workers, progress=progress)
    cache_seconds = time.perf_counter() - started

    augment = Compose([RandomCrop(CROP), RandomHorizontalFlip(), Normalize(MEAN, STD)])
    loader = Loader(store, batch_size, shuffle=True, seed=SEED, device=device, transform=augment)
    fed = lap("memfeed", loader, total, Trainer(classes, device, SEED), progress=progress)
    return Result(
        dataloader=plain,
        memfeed=fed,
        cache_seconds=cache_seconds,
        store_bytes=store.nbytes,
        image_bytes=image_bytes,
        batch_size=batch_size,
        workers=workers,
        machine=_machine(device),
    )


def _usual_transform() -> Any:
    """What training scripts give ImageFolder; it squashes as the store does, so both laps see the same pixels."""
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.Resize((RESIZE, RESIZE)),
            transforms.RandomCrop(CROP),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def _chosen(root: Path, count: int) -> tuple[Any, list[int]]:
    """The tree, and which of its images race: all, or ``count`` drawn from all classes alike."""
    folder = image_folder(root)
    total = len(folder)
    drawn = torch.randperm(total, generator=torch.Generator().manual_seed(SEED))[:count]
    return folder, sorted(drawn.tolist())


def _read_once(paths: list[str]) -> int:
    """Reads every file, so that both laps find them in the page cache; returns their bytes."""
    return sum(len(Path(path).read_bytes()) for path in paths)


@contextmanager
def _half_the_threads() -> Iterator[None]:
    """Leaves half of the cores to DataLoader's workers while training runs on a CPU.

    With all of them (torch's default) both fight for cores, and DataLoader comes out slower still: 390 to 440 samples/s
    instead of 560 to 600 on 2 cores, with a wait that looks small because every step takes longer.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, _cores() // 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _machine(device: torch.device) -> str:
    cores = f"{_cores()} cores"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {cores}"
    return f"CPU {platform.machine()}, {cores}"
