"""The demo from start to end: images, epochs from DataLoader, the same epochs from memfeed, the output.

Its photos are JPEG files that take as long to decode as photographs: soft colours, a few shapes, and grain with a 1/f
amplitude spectrum, as natural images have on average (Field, 1987).
"""

from __future__ import annotations

import colorsys
import os
import platform
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, Subset

import memfeed
from memfeed.cli.demo.result import FOOTNOTE, EpochTiming, Result, Run, load_result, save_chart
from memfeed.convert.inputs import image_folder
from memfeed.system.files import local_path
from memfeed.system.machine import core_count
from memfeed.system.messages import require
from memfeed.system.progress import Progress

BATCH_SIZE = 32
EPOCHS = 5
RESIZE, CROP = 256, 224
SEED = 0
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


def run(
    images: Path | None = None,
    *,
    count: int = 1000,
    out: Path = Path("memfeed-demo.png"),
    workers: int | None = None,
    progress: bool | None = None,
    console: Console | None = None,
) -> Result:
    """Train all epochs, print the table of their times, and draw them to the PNG file ``out``.

    What was measured is written beside it, to a JSON file of the same name, from which the picture is drawn.

    Args:
        images: a tree of images, one directory per class; None generates ``count`` photos.
        count: the largest number of images to use.
        workers: worker processes of both loaders; None takes one per core.
        console: prints the table; None prints it on stdout.

    Raises:
        ModuleNotFoundError: an extra is not installed.
        OSError: no images in ``images``, or no directory for ``out``.
    """
    out = local_path(out)
    require("vision", "torchvision", "PIL")
    require("plots", "matplotlib")
    if not out.absolute().parent.is_dir():
        raise FileNotFoundError(f"{out.parent}: found no such directory; expected one to save {out.name} in")
    if out.is_dir():
        raise IsADirectoryError(f"{out}: found a directory; expected the name of a PNG file to write")
    console = console or Console(highlight=False)
    threads = torch.get_num_threads()
    # On 2 cores DataLoader trained on 560 to 600 samples/s with half of the threads, on 390 to 440 with all of them.
    torch.set_num_threads(max(1, core_count() // 2))
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with tempfile.TemporaryDirectory(prefix="memfeed-demo-") as scratch, torch.random.fork_rng(devices):
            if images is None:
                images = Path(scratch) / "photos"
                with Progress("making photos", count, unit=" photos", progress=progress) as bar:
                    make_photos(images, count, seed=SEED, advance=bar.advance)
            store_path = Path(scratch) / "demo.mf"
            result = _compare(images, count, store_path, core_count() if workers is None else workers, progress)
    finally:
        torch.set_num_threads(threads)
    measured = out.with_suffix(".json")
    result.save(measured)
    save_chart(load_result(measured), out)
    console.print(result.table())
    console.print(FOOTNOTE, style="dim")
    console.print(f"picture: {out}, drawn from {measured}", soft_wrap=True)
    return result


def _compare(root: Path, count: int, store_path: Path, workers: int, progress: bool | None) -> Result:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = image_folder(root, _torchvision_transform())
    generator = torch.Generator().manual_seed(SEED)
    indices = sorted(torch.randperm(len(folder), generator=generator)[:count].tolist())
    total, classes = len(indices), len(folder.classes)
    # Reading every file once puts it in the page cache for both loaders.
    image_bytes = sum(len(Path(folder.samples[index][0]).read_bytes()) for index in indices)
    batch_size = min(BATCH_SIZE, max(1, total // 4))
    warm_up(batch_size, classes, device)
    dataset = Subset(folder, indices)

    def plain() -> Any:
        seeded = torch.Generator().manual_seed(SEED)
        pins = device.type == "cuda"
        return DataLoader(dataset, batch_size, shuffle=True, num_workers=workers, pin_memory=pins, generator=seeded)

    def fed() -> Any:
        return memfeed.Loader(
            dataset, batch_size, shuffle=True, num_workers=workers, seed=SEED, device=device, cache=store_path,
            require="batched",
        )  # fmt: skip

    dataloader, _ = timed_run("DataLoader", plain, total, classes, device, progress=progress)
    memfed, loader = timed_run("memfeed", fed, total, classes, device, progress=progress)
    loader.store.finish()
    return Result(
        dataloader=dataloader,
        memfeed=memfed,
        store_bytes=loader.store.nbytes,
        image_bytes=image_bytes,
        batch_size=batch_size,
        workers=workers,
        machine=_machine(device),
    )


def _torchvision_transform() -> Any:
    """Return the usual transform of ImageFolder: memfeed keeps what is before the first random step."""
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


def _machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"
    return f"{name}, {core_count()} cores"


def small_cnn(classes: int) -> nn.Module:
    """Return a model of about 4 million multiplications per image of 224 x 224, so small that it waits for data."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 8, stride=8),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def warm_up(batch_size: int, classes: int, device: torch.device) -> None:
    """Train two steps on zeros, so that libraries choose their kernels before an epoch is timed."""
    batch = (torch.zeros(batch_size, 3, CROP, CROP), torch.zeros(batch_size, dtype=torch.int64))
    timed_run("", lambda: [batch, batch], 0, classes, device, epochs=1, progress=False)


def timed_run(
    name: str,
    make: Callable[[], Any],
    total: int,
    classes: int,
    device: torch.device,
    *,
    epochs: int = EPOCHS,
    progress: bool | None,
) -> tuple[Run, Any]:
    """Train a new model for a few epochs of what ``make`` returns; return their times, and the loader.

    ``name`` and ``total``, the number of samples of an epoch, are for the progress bar. The first epoch begins before
    the loader is made: the start of workers counts, and all else that a loader does before its first batch.
    """
    torch.manual_seed(SEED)
    model = small_cnn(classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    timings, loader = list[EpochTiming](), None
    with Progress(name, epochs * total, unit=" images", progress=progress) as bar:
        for _ in range(epochs):
            started = time.perf_counter()
            loader = make() if loader is None else loader
            timings.append(_timed_epoch(loader, started, model, optimizer, device, bar))
    return Run(tuple(timings)), loader


def _timed_epoch(
    batches: Any,
    started: float,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    bar: Progress,
) -> EpochTiming:
    def seconds() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    steps, wait_seconds = [(0.0, 0)], 0.0
    for images, labels in batches:
        images, labels = images.to(device), labels.to(device)
        wait_seconds += seconds() - steps[-1][0]
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps.append((seconds(), steps[-1][1] + len(images)))
        bar.advance(len(images))
    return EpochTiming(tuple(steps), wait_seconds)


# --- photos

SIZE = (500, 375)
"""Width and height in pixels of three photos in four; the others have height and width exchanged."""
CLASSES = ("red", "green", "cyan", "violet")
"""The classes, by the colour of the background: hues 0, 1/4, 1/2 and 3/4."""
QUALITY = 92
GRAIN_SIDE = 1024
GRAIN = 34.0
"""Standard deviation of the grain, in grey levels of 255."""


def make_photos(root: Path, count: int, *, seed: int = 0, advance: Callable[[int], None] = lambda done: None) -> int:
    """Write ``count`` JPEG files to ``root``/CLASS/, equal for equal seeds. Return the bytes of all files.

    Uses one thread per core (Pillow and numpy release the interpreter lock), and calls ``advance(1)`` after each file.
    """
    for name in CLASSES:
        (root / name).mkdir(parents=True, exist_ok=True)
    grain = _grain(np.random.default_rng(seed))

    def make(index: int) -> int:
        label = index % len(CLASSES)
        path = root / CLASSES[label] / f"{index:05}.jpg"
        _photo(np.random.default_rng([seed, index]), label / len(CLASSES), grain).save(path, quality=QUALITY)
        return path.stat().st_size

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        total = 0
        for size in pool.map(make, range(count)):
            total += size
            advance(1)
    return total


def _grain(rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return noise with a 1/f amplitude spectrum, [GRAIN_SIDE, GRAIN_SIDE, 3], standard deviation 1, mostly grey."""
    frequency = np.hypot(np.fft.fftfreq(GRAIN_SIDE)[:, None], np.fft.rfftfreq(GRAIN_SIDE)[None, :])
    frequency[0, 0] = 1.0
    layers = [np.fft.irfft2(np.fft.rfft2(rng.standard_normal((GRAIN_SIDE, GRAIN_SIDE))) / frequency) for _ in range(4)]
    grey, *colours = [layer / layer.std() for layer in layers]
    return np.stack([grey + 0.25 * colour for colour in colours], axis=-1).astype(np.float32)


def _photo(rng: np.random.Generator, hue: float, grain: npt.NDArray[np.float32]) -> Any:
    """Return a Pillow image: ellipses of the opposite hue on a background of ``hue``, with grain."""
    from PIL import Image, ImageDraw, ImageFilter

    width, height = SIZE if rng.random() < 0.75 else SIZE[::-1]
    hue += rng.normal(0, 0.08)
    background = np.array([[_colour(rng, hue) for _ in range(4)] for _ in range(3)], np.uint8)
    image = Image.fromarray(background).resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(rng.integers(4, 10)):
        (x, y), radius = rng.uniform(0, 1, 2) * (width, height), rng.uniform(0.06, 0.22) * min(SIZE)
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_colour(rng, hue + 0.45))
    image = image.filter(ImageFilter.GaussianBlur(1.2))
    top, left = rng.integers(0, GRAIN_SIDE - height), rng.integers(0, GRAIN_SIDE - width)
    window = grain[top : top + height, left : left + width]
    pixels = np.asarray(image, np.float32) + window * np.float32(GRAIN * rng.uniform(0.6, 1.3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _colour(rng: np.random.Generator, hue: float) -> tuple[int, ...]:
    channels = colorsys.hsv_to_rgb((hue + rng.normal(0, 0.05)) % 1, rng.uniform(0.25, 0.7), rng.uniform(0.35, 0.9))
    return tuple(int(255 * channel) for channel in channels)
