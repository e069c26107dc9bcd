"""Time the way to the device: batches from each placement beside plain copies, augmentation there, and a ResNet.

On a CUDA machine the figures have targets. Without one the same programs run on the CPU, where nothing is transferred:
that shows only that the benchmark runs, and how much time the loader takes beside a model.

Every program must give the same rows before it is timed. They take turns, and the ratios come from one run. Other
libraries take part where they are installed. Each part has an amount of time; what fails is written down with its
error, the result is written after each part, and the other parts follow.

    python benchmarks/device.py [--device cuda] [--parts feeding,resident]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import memfeed
import memfeed.transforms as T
from device_peers import Epoch, augmenters, feeders
from forms import make_folder
from forms_contenders import BATCH, FORMS, dataset_of
from measure import PHOTOS, Check, Seconds, in_turns, medians, parser, ratio, show, table, write
from memfeed.codecs.codec import parse_codec
from memfeed.random import Keys
from memfeed.transfer.streams import CudaStreams
from transforms import MEAN, STD, tutorial

LARGE_ROW_BYTES = 64 << 10  # one copy a row is worth a comparison from here on
SHAPES = {"images 256": ((3, 256, 256), 64), "images 32": ((3, 32, 32), 512)}
RECIPE = T.Compose(
    [T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.Normalize(MEAN, STD), T.ToDtype(torch.bfloat16)],
    memory_format=torch.channels_last,
)
AUGMENT = T.Compose(
    [T.RandomCrop(224), T.RandomHorizontalFlip(), T.ToDtype(torch.bfloat16, scale=True), T.Normalize(MEAN, STD)],
    memory_format=torch.channels_last,
)


class Sizes(NamedTuple):
    """How much of everything is measured.

    Args:
        rows: of the shapes that are fed.
        resident: rows of 12 KB that lie on the device, and the epochs over them, one after the other.
        augmented: images of a call, and calls that are queued together.
        peer_calls: the same of other libraries, whose calls take longer.
        host_rows: of which the caller's time a step is taken.
        photographs: that are decoded.
        copies: of each photograph, in epochs from files.
        trained: images, and those of a batch.
        rounds: turns of each contender, if there is time.
        seconds: that the turns of one part take at most. A turn that has begun is finished.
        workers: processes of DataLoader.
    """

    rows: tuple[int, int]
    resident: tuple[int, int]
    augmented: tuple[int, int]
    peer_calls: int
    host_rows: int
    photographs: int
    copies: int
    trained: tuple[int, int]
    rounds: int
    seconds: float
    workers: int


RESIDENT = 20 * 10**9 // (3 * 64 * 64) + 1  # rows
GPU = Sizes((4000, 50_000), (RESIDENT, 64), (4096, 50), 3, 12_800, 2048, 32, (12_800, 256), 7, 30.0, 8)
CPU = Sizes((256, 2560), (256, 2), (16, 2), 2, 1280, 256, 1, (256, 64), 7, 60.0, 0)
QUICK = Sizes((128, 1024), (64, 2), (4, 2), 2, 640, 16, 1, (16, 8), 1, 60.0, 0)
QUICK_GPU = Sizes((64, 512), (16, 2), (2, 2), 1, 128, 16, 1, (4, 2), 1, 60.0, 0)


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], Any]) -> float:
    finish(device)
    start = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - start


class Run:
    """One run: its device, how much it measures, and what it has found so far."""

    def __init__(self, options: argparse.Namespace, device: torch.device, sizes: Sizes) -> None:
        self.options, self.device, self.sizes = options, device, sizes
        self.checks: list[Check] = []
        self.skipped: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.rates: dict[str, dict[str, float]] = {}
        self.median_seconds: dict[str, dict[str, float]] = {}
        self.shares: dict[str, list[float]] = {}

    def turns(self, contenders: Mapping[str, Callable[[], float]]) -> Seconds:
        """Time contenders in turns, as long as there is time; at least once. One that fails is left out by name."""
        end, left = time.perf_counter() + self.sizes.seconds, dict(contenders)
        found: Seconds = {}
        for number in range(self.sizes.rounds if left else 0):
            names = [*left][number % len(left) :] + [*left][: number % len(left)]
            for name in names:
                try:
                    found.setdefault(name, []).extend(in_turns({name: left[name]}, 1)[name])
                except Exception as error:
                    self.note_failure(name, error)
                    del left[name], found[name]
            if time.perf_counter() > end or not left:
                break
        return found

    def check(self, what: str, seconds: Seconds, one: str, other: str, least: float) -> None:
        """Note that ``one`` must take at least so many times as long as ``other``, if both were timed."""
        if one in seconds and other in seconds:
            self.checks.append(Check(what, ratio(seconds, one, other), least, True))

    def note_failure(self, name: str, error: BaseException) -> None:
        """Write down what failed, and print where."""
        traceback.print_exception(error)
        self.failed[name] = f"{type(error).__name__}: {str(error)[:300]}"

    def write(self) -> None:
        """Write what was found so far."""
        cuda = self.device.type == "cuda"
        about = {
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
            "images": self.sizes.augmented[0],
            "shapes": list(SHAPES),
            "sizes": self.sizes._asdict(),
        }
        figures: dict[str, Any] = {
            "gigabytes_per_second": self.rates, "median_seconds": self.median_seconds, **self.shares,
            "skipped": self.skipped, "failed": self.failed,
        }  # fmt: skip
        if not cuda:
            figures["without_targets"] = {check.what: check.found for check in self.checks}
        write(self.options, about, figures, self.checks if cuda else [])


# --- batches from each placement


def feeding(run: Run) -> None:
    """Time the rows of an epoch from each placement, by other libraries, and by the plain copies that limit them."""
    with tempfile.TemporaryDirectory() as at:
        for (name, (shape, batch)), rows in zip(SHAPES.items(), run.sizes.rows, strict=True):
            seconds = feed_one(run, shape, batch, rows, Path(at) / name.replace(" ", ""))
            total = rows // batch * batch * torch.Size(shape).numel()
            rates = run.rates[name] = {who: total / time_s / 1e9 for who, time_s in medians(seconds).items()}
            table(name, ["", "GB/s"], [[who, f"{rate:.2f}"] for who, rate in rates.items()])
            slower = max(("bare copy to the device", "bare gather"), key=lambda who: medians(seconds).get(who, 0.0))
            limits = {"pinned": ("bare copy to the device", 0.9), "mapped": (slower, 0.9)}
            limits["device"] = "bare copy on the device", 0.6
            for where, (limit, least) in limits.items():
                run.check(f"{name}, {where}: of the {limit}", seconds, limit, where, least)
            run.check(f"{name}, pinned: one copy a row takes", seconds, "one copy a row", "pinned", 1.0)
            for who in seconds:
                if who.startswith("DataLoader"):
                    run.check(f"{name}, {who}: takes", seconds, who, "mapped", 2.0)


def feed_one(run: Run, shape: tuple[int, ...], batch: int, rows: int, at: Path) -> Seconds:
    device, cuda = run.device, run.device.type == "cuda"
    data, labels = torch.randint(0, 256, (rows, *shape), dtype=torch.uint8), torch.arange(rows)
    at.mkdir()
    store = memfeed.cache((data, labels), at / "rows.mf", progress=False)
    loaders = {
        where: memfeed.Loader(store, batch, shuffle=True, drop_last=True, device=device, placement=where)
        for where in ("pinned", "mapped", "device")
    }
    for where, loader in loaders.items():
        for images, numbers in loader:
            assert torch.equal(images.cpu(), data[numbers.cpu()]), where
    others, skipped = feeders(data, labels, batch, device, at / "peers", run.sizes.workers)
    run.skipped.update(skipped)
    steps, column = rows // batch, store.column(0)
    here = torch.empty(batch, *shape, dtype=torch.uint8, pin_memory=cuda)
    there, other = (torch.empty(batch, *shape, dtype=torch.uint8, device=device) for _ in range(2))
    ids = torch.randperm(rows)[: steps * batch].view(steps, batch)

    def repeat(work: Callable[[int], Any]) -> Callable[[], None]:
        def run_all() -> None:
            for step in range(steps):
                work(step)

        return run_all

    bare = {
        "bare copy to the device": repeat(lambda step: there.copy_(here, non_blocking=True)),
        "bare gather": repeat(lambda step: torch.index_select(column, 0, ids[step], out=here)),
        "bare copy on the device": repeat(lambda step: other.copy_(there)),
    }
    if cuda:
        streams = CudaStreams(device)
        locked = streams.allocate_page_locked(data.nbytes).view(data.shape).copy_(data)
        seen = streams.device_view(locked.view(-1)).view(data.shape)
        there_ids = ids.to(device)
        bare["bare gather over the bus"] = repeat(lambda step: torch.index_select(seen, 0, there_ids[step], out=there))
        if data[0].nbytes >= LARGE_ROW_BYTES:

            def copy_rows(step: int) -> None:
                for at_row, row in enumerate(ids[step].tolist()):
                    there[at_row].copy_(locked[row], non_blocking=True)

            bare["one copy a row"] = repeat(copy_rows)

    def consume(epoch: Epoch) -> None:
        for part in epoch():
            del part

    epochs = {name: lambda loader=loader: iter(loader) for name, loader in loaders.items()} | others
    works = {name: lambda epoch=epoch: timed(device, lambda: consume(epoch)) for name, epoch in epochs.items()}
    return run.turns(works | {name: lambda work=work: timed(device, work) for name, work in bare.items()})


# --- the augmentation


def queued(device: torch.device, work: Callable[[], Any], calls: int, host: list[float], own_streams: bool) -> float:
    """Return the seconds of one of ``calls`` calls that are queued together; append the caller's seconds to ``host``.

    On a GPU, events before and after say how long the device took. The caller's time ends when the last is queued. For
    work on ``own_streams`` it is the time until the device is done.
    """
    finish(device)
    by_events = device.type == "cuda" and not own_streams
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if by_events else (None, None)
    if begin is not None:
        begin.record()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    host.append((time.perf_counter() - start) / calls)
    if end is not None:
        end.record()
    finish(device)
    if begin is None:
        return (time.perf_counter() - start) / calls
    return float(begin.elapsed_time(end)) / 1e3 / calls


def augmenting(run: Run) -> None:
    """Time uint8 [n, 3, 256, 256] to bfloat16 channels last, other ways to make it, and a plain copy.

    The seconds that the device takes for a call, and those that the caller takes to queue it.
    """
    device, (n, calls) = run.device, run.sizes.augmented
    images = torch.randint(0, 256, (n, 3, 256, 256), dtype=torch.uint8, device=device)
    keys, few = (Keys(seed=0, epoch=0, rows=torch.arange(count)) for count in (n, min(n, 16)))
    made = AUGMENT.apply(images[:16], few)
    want = tutorial(images[:16].cpu(), few)  # in float32
    assert made.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(made.cpu().float(), want, rtol=2**-6, atol=2**-5)  # without Triton each step rounds
    source = torch.empty(moved_bytes(n) // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    roads: dict[str, Callable[[], Any]] = {
        "memfeed": lambda: AUGMENT.apply(images, keys),
        "memfeed, RandomResizedCrop": lambda: RECIPE.apply(images, keys),
        "copy of as many bytes": lambda: target.copy_(source),
    }
    ours = set(roads)
    others, skipped, own_streams = augmenters(device, images)
    run.skipped.update(skipped)
    roads["tutorial"] = lambda: tutorial(images, keys).to(torch.bfloat16, memory_format=torch.channels_last)
    roads |= {name: lambda road=road: road(images) for name, road in others.items()}
    host: Seconds = {name: [] for name in roads}

    def work(name: str) -> float:
        count = calls if name in ours else run.sizes.peer_calls
        return queued(device, roads[name], count, host[name], name in own_streams)

    for name in ours:
        roads[name]()  # compiles
    seconds = run.turns({name: lambda name=name: work(name) for name in roads})
    run.median_seconds["augmentation"] = medians(seconds)
    run.median_seconds["the caller's time to queue it"] = medians({name: host[name] for name in seconds})
    copy = "copy of as many bytes"
    run.check("augmentation, of copy bandwidth", seconds, copy, "memfeed", 0.6)
    run.check("RandomResizedCrop, of copy bandwidth", seconds, copy, "memfeed, RandomResizedCrop", 0.4)
    run.check("augmentation: the tutorial takes", seconds, "tutorial", "memfeed", 10)


def moved_bytes(n: int) -> int:
    """Return the bytes that the augmentation reads and writes: each pixel of the crops as uint8 and as bfloat16."""
    return n * 3 * 224 * 224 * (1 + 2)


# --- columns that lie on the device, and the caller's time


def resident(run: Run) -> None:
    """Time batches from columns in the device's memory, one epoch after the other, beside plain gathers and copies."""
    device, (rows, epochs) = run.device, run.sizes.resident
    block = torch.randint(0, 256, (min(rows, 1 << 14), 3, 64, 64), dtype=torch.uint8)
    data, batch = torch.empty(rows, 3, 64, 64, dtype=torch.uint8), min(512, rows // 4)
    for start in range(0, rows, len(block)):  # to draw 20 GB takes half a minute
        data[start : start + len(block)] = block[: rows - start]
    numbers = torch.arange(rows)
    loader = memfeed.Loader((data, numbers), batch, shuffle=True, drop_last=True, device=device, placement="device")
    images, found = next(iter(loader))
    assert torch.equal(images.cpu(), data[found.cpu()])
    there, steps = data.to(device), rows // batch
    other = torch.empty_like(there[: min(rows, 1 << 18)])  # 3 GB, beside which the L2 is small
    ids = torch.randperm(rows)[: steps * batch].view(steps, batch).to(device)

    def fed() -> None:
        for _ in range(epochs):
            for part in loader:
                del part

    def gathered() -> None:
        for _ in range(epochs):
            for step in range(steps):
                there[ids[step]]

    def copied() -> None:
        for _ in range(epochs):
            for start in range(0, steps * batch, len(other)):
                part = there[start : min(start + len(other), steps * batch)]
                other[: len(part)].copy_(part)

    works = {"memfeed": fed, "index on the device": gathered, "copy on the device": copied}
    seconds = run.turns({name: lambda work=work: timed(device, work) for name, work in works.items()})
    run.median_seconds[f"resident, {epochs} epochs of {data.nbytes / 1e9:.1f} GB"] = medians(seconds)
    run.check("resident, of the copy's rate", seconds, "copy on the device", "memfeed", 0.6)


def host_times(run: Run) -> None:
    """Time what the caller's thread spends on a step of a small batch: `next()` and nothing else."""
    rows = run.sizes.host_rows
    data = torch.randint(0, 256, (rows, 3, 32, 32), dtype=torch.uint8), torch.arange(rows)
    augment = T.Compose([T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), T.Normalize(MEAN, STD)])
    found: dict[str, float] = {}
    for name, transform, limit in (("without a transform", None, 30), ("with transforms", augment, 60)):
        loader = memfeed.Loader(data, 64, shuffle=True, drop_last=True, device=run.device, transform=transform)
        of_epochs = []
        for _ in range(run.sizes.rounds + 1):
            steps, batches = [], iter(loader)
            while True:
                start = time.thread_time()  # the CPU time of the caller: it may wait for the batches
                if next(batches, None) is None:
                    break
                steps.append(time.thread_time() - start)
            of_epochs.append(statistics.median(steps))
        found[name] = statistics.median(of_epochs[1:])
        what = f"the caller's CPU time a step, {name}"
        run.checks.append(Check(what, found[name] * 1e6, limit, False, "us"))
    run.median_seconds["the caller's CPU time a step"] = found


# --- photographs


def decoding(run: Run) -> None:
    """Time photographs of 256 x 256 that a store has as JPEG: decoded by the GPU and by the CPU, beside raw rows.

    The bare calls give the same files, which lie in memory, to torchvision: in batches to nvJPEG, and one by one to the
    CPU. What differs between nvJPEG and libjpeg-turbo is noted in grey levels.
    """
    from torchvision.io import ImageReadMode, decode_jpeg

    device, count = run.device, run.sizes.photographs
    images = photographs(count)
    batch = min(64, count // 2)
    with tempfile.TemporaryDirectory() as at:
        stores = {}
        for name, forms in (("raw", None), ("jpeg", {"0": "jpeg:90"})):
            stores[name] = memfeed.cache((images, torch.arange(count)), Path(at) / name, forms=forms, progress=False)
        options = {"batch_size": batch, "shuffle": True, "drop_last": True, "device": device}
        loaders = {
            "raw rows, mapped": memfeed.Loader(stores["raw"], **options, placement="mapped"),
            "jpeg:90, decoded by the CPU": memfeed.Loader(stores["jpeg"], **options, placement="mapped"),
        }
        if device.type == "cuda":
            place = {"0": "nvjpeg", "1": "mapped"}
            loaders["jpeg:90, decoded by nvJPEG"] = memfeed.Loader(stores["jpeg"], **options, placement=place)
        expected = next(iter(memfeed.Loader(stores["jpeg"], count)))[0]
        apart: list[torch.Tensor] = []
        for name, loader in loaders.items():
            for found, numbers in loader:
                wanted = (images if name.startswith("raw") else expected)[numbers.cpu()]
                difference = (found.cpu().int() - wanted.int()).abs()
                if "nvJPEG" in name:
                    apart.append(difference.float().flatten())
                else:
                    assert not difference.any(), name
        if apart:
            levels = torch.cat(apart)
            run.shares["nvjpeg_levels_mean_and_largest"] = [float(levels.mean()), float(levels.max())]
        files = [torch.frombuffer(bytearray(jpeg_of(image)), dtype=torch.uint8) for image in images]
        rgb = ImageReadMode.RGB

        def bare(call: Callable[[list[torch.Tensor]], Any]) -> Callable[[], None]:
            def run_all() -> None:
                for start in range(0, count // batch * batch, batch):
                    call(files[start : start + batch])

            return run_all

        works = {name: bare_epoch(loader) for name, loader in loaders.items()}
        works["bare torchvision on the CPU"] = bare(lambda part: [decode_jpeg(one, rgb) for one in part])
        if device.type == "cuda":
            works["bare torchvision with nvJPEG"] = bare(lambda part: torch.stack(decode_jpeg(part, rgb, device)))
        seconds = run.turns({name: lambda work=work: timed(device, work) for name, work in works.items()})
        found_rates = {name: count // batch * batch / value for name, value in medians(seconds).items()}
        run.median_seconds[f"{count // batch * batch} photographs"] = medians(seconds)
        table(
            "photographs of 256 x 256", ["", "images/s"], [[name, f"{rate:,.0f}"] for name, rate in found_rates.items()]
        )
        what = "nvJPEG: of the bare call"
        run.check(what, seconds, "bare torchvision with nvJPEG", "jpeg:90, decoded by nvJPEG", 0.9)


def bare_epoch(loader: memfeed.Loader[Any]) -> Callable[[], None]:
    """Return a function that reads an epoch and keeps nothing of it."""

    def read() -> None:
        for part in loader:
            del part

    return read


def photographs(count: int) -> torch.Tensor:
    """Return photographs, cut and shrunk to uint8 [count, 3, 256, 256]: of the shared data, or those of scikit-image.

    There are fewer files than ``count``, so each is cut at several places.
    """
    from PIL import Image

    files = sorted(PHOTOS.rglob("*.jpg")) if PHOTOS.is_dir() else []
    opened = [Image.open(file).convert("RGB") for file in files[: min(count, 128)]] or pictures()
    made = torch.empty(count, 3, 256, 256, dtype=torch.uint8)
    for number in range(count):
        image, turn = opened[number % len(opened)], number // len(opened)
        scale = 288 / min(image.size)
        small = image.resize((round(image.width * scale), round(image.height * scale)))
        left, top = turn * 5 % (small.width - 255), turn * 3 % (small.height - 255)
        cut = small.crop((left, top, left + 256, top + 256))
        made[number] = torch.frombuffer(bytearray(cut.tobytes()), dtype=torch.uint8).view(256, 256, 3).permute(2, 0, 1)
    return made


def pictures() -> list[Any]:
    """Return the pictures in color that scikit-image brings along."""
    from PIL import Image
    from skimage import data

    return [Image.fromarray(image) for image in (data.astronaut(), data.coffee(), data.chelsea())]


def jpeg_of(image: torch.Tensor) -> bytes:
    """Return an image, uint8 [3, h, w], as a JPEG file of quality 90."""
    codec = parse_codec("jpeg:90").fitted(np.dtype(np.uint8), (3, *image.shape[1:]))
    return bytes(codec.encode(image.numpy()))


# --- training


class Block(nn.Module):
    """Two convolutions and a connection past them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [layer for _ in range(2) for layer in (nn.Conv2d(width, width, 3, padding=1, bias=False),
                  nn.BatchNorm2d(width), nn.ReLU())]  # fmt: skip
        self.body = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images [n, width, h, w] to the same shape."""
        return x + self.body(x)


def small_resnet() -> nn.Module:
    """Return a ResNet of nine layers for 32 x 32 images."""
    parts: list[nn.Module] = []
    for before, width, residual in ((3, 64, False), (64, 128, True), (128, 256, False), (256, 256, True)):
        parts += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        parts += [nn.MaxPool2d(2)] if before > 3 else []
        parts += [Block(width)] if residual else []
    return nn.Sequential(*parts, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def training(run: Run) -> None:
    """Time an epoch with the loader and one that reuses a batch: of ResNet-50 at 224 on a GPU, else of a net at 32.

    Also the share of its time that the caller waited, and, on a GPU, the share of the device's time between the end of
    a step and the begin of the next, by events.
    """
    device, (rows, batch) = run.device, run.sizes.trained
    large = device.type == "cuda"
    side, classes = (256, 1000) if large else (32, 10)
    data = torch.randint(0, 256, (rows, 3, side, side), dtype=torch.uint8), torch.randint(0, classes, (rows,))
    small = T.Compose(
        [T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), T.Normalize(MEAN, STD)],
        memory_format=torch.channels_last,
    )
    augment = RECIPE if large else small
    loader = memfeed.Loader(data, batch, shuffle=True, drop_last=True, device=device, transform=augment)
    if large:
        from torchvision.models import resnet50

        torch.backends.cudnn.benchmark = True
        model = resnet50()
    else:
        model = small_resnet()
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    waits: list[float] = []
    gaps: list[float] = []
    marks: list[Any] = []

    def mark() -> None:
        if large:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        mark()
        with torch.autocast(device.type, torch.bfloat16, enabled=large):
            loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        mark()

    def fed() -> None:
        marks.clear()
        for images, labels in loader:
            step(images, labels)
        if marks:
            finish(device)
            between = sum(a.elapsed_time(b) for a, b in zip(marks[1:-1:2], marks[2::2], strict=True))
            gaps.append(between / marks[0].elapsed_time(marks[-1]))
        waits.append(loader.stats()["wait_share"])

    kept = [part.clone() for part in next(iter(loader))]

    def reused() -> None:
        for _ in range(len(loader)):
            step(*kept)

    for _ in range(3 if large else 1):  # chooses algorithms
        step(*kept)
    works = {"fed": fed, "one batch reused": reused}
    seconds = run.turns({name: lambda work=work: timed(device, work) for name, work in works.items()})
    name = "ResNet-50 at 224" if large else "a small ResNet at 32"
    run.median_seconds[f"training, {rows} images, {name}"] = medians(seconds)
    run.shares |= {"wait_shares": waits, "gap_shares": gaps}
    run.check("training: one batch reused / fed", seconds, "one batch reused", "fed", 0.99)
    if gaps:
        share = statistics.median(gaps)
        run.checks.append(Check("training: between steps", share, 0.01, False, "of the device's time"))


def photo_epochs(run: Run) -> None:
    """Time epochs of photographs from files while a ResNet-18 is trained on a GPU: DataLoader, and stores of each form.

    The first epochs, in which a store is filled, are timed beside first epochs of DataLoader, which start its workers.
    """
    device, copies, workers = run.device, run.sizes.copies, run.sizes.workers
    step = trained_step(device)
    with tempfile.TemporaryDirectory() as at:
        dataset = dataset_of(make_folder(Path(at), copies, 2 * BATCH if copies == 1 else 0))
        paths = (Path(at) / f"{number}.mf" for number in itertools.count())

        def epoch(loader: Iterable[Any]) -> float:
            def train() -> None:
                for images, labels in loader:
                    step(images.to(device, non_blocking=True), labels.to(device, non_blocking=True) % 1000)

            return timed(device, train)

        def today(persistent: bool) -> torch.utils.data.DataLoader[Any]:
            return torch.utils.data.DataLoader(
                dataset, BATCH, shuffle=True, num_workers=workers, pin_memory=device.type == "cuda",
                persistent_workers=persistent and workers > 0,
            )  # fmt: skip

        def filled(form: str) -> float:
            path = next(paths)
            start = time.perf_counter()
            loader = memfeed.Loader(
                dataset, BATCH, shuffle=True, num_workers=workers, cache=path, forms=FORMS[form], device=device
            )
            seconds = time.perf_counter() - start + epoch(loader)
            loader.store.finish()
            stores[form] = path
            return seconds

        stores: dict[str, Path] = {}
        epoch(today(False))  # chooses algorithms
        began = {f"filling {form}": lambda form=form: filled(form) for form in ("raw 256", "jpeg:90")}
        seconds = run.turns({"DataLoader": lambda: epoch(today(False))} | began)
        run.median_seconds[f"the first epoch of {len(dataset)} photographs"] = medians(seconds)
        loaders: dict[str, Iterable[Any]] = {f"DataLoader, {workers} workers": today(True)}
        for form, path in stores.items():
            for place in ("auto", "nvjpeg") if form == "jpeg:90" and device.type == "cuda" else ("auto",):
                name = f"memfeed, {form}" + (", nvJPEG" if place == "nvjpeg" else "")
                placement = {"0": "nvjpeg"} if place == "nvjpeg" else "auto"
                loaders[name] = memfeed.Loader(
                    dataset, BATCH, shuffle=True, cache=path, forms=FORMS[form], device=device, placement=placement
                )
        kept = [part.to(device) for part in next(iter(loaders["memfeed, raw 256"]))]
        works = {name: lambda loader=loader: epoch(loader) for name, loader in loaders.items()}
        works["one batch reused"] = lambda: epoch([kept] * (len(dataset) // BATCH))
        for name in loaders:
            works[name]()  # starts workers
        seconds = run.turns(works)
    name = f"an epoch of {len(dataset)} photographs"
    run.median_seconds[name] = medians(seconds)
    table(name, ["", "images/s"], [[who, f"{len(dataset) / t:,.0f}"] for who, t in medians(seconds).items()])


def trained_step(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return one step of training a ResNet-18 on a GPU, and on the CPU a step that does nothing."""
    if device.type != "cuda":
        return lambda images, labels: None
    from torchvision.models import resnet18

    model = resnet18().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images.to(memory_format=torch.channels_last)), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


PARTS: dict[str, Callable[[Run], None]] = {
    "feeding": feeding, "host": host_times, "augmenting": augmenting, "resident": resident, "decoding": decoding,
    "training": training, "photo_epochs": photo_epochs,
}  # fmt: skip


def sizes_of(device: torch.device, *, quick: bool) -> Sizes:
    """Return how much to measure on a device."""
    if device.type == "cuda":
        return QUICK_GPU if quick else GPU
    return QUICK if quick else CPU


def chosen(names: str) -> Iterator[tuple[str, Callable[[Run], None]]]:
    """Yield the parts of these names, separated by commas; all of them for an empty string."""
    for name in names.split(",") if names else PARTS:
        yield name, PARTS[name]


def main() -> None:
    made = parser("device-cuda" if torch.cuda.is_available() else "device-cpu", __doc__)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--rounds", type=int, help="turns of each contender, if there is time")
    made.add_argument("--seconds", type=float, help="that the turns of one part take at most")
    made.add_argument("--parts", default="", help=f"some of {','.join(PARTS)}")
    made.add_argument("--minutes", type=float, default=7.0, help="no part begins later")
    options = made.parse_args()
    device = torch.device(options.device)
    sizes = sizes_of(device, quick=options.quick)
    changed = {name: value for name in ("rounds", "seconds") if (value := getattr(options, name)) is not None}
    run = Run(options, device, sizes._replace(**changed))
    print(f"{os.cpu_count()} cores, {device}")
    end = time.perf_counter() + 60 * options.minutes
    for name, part in chosen(options.parts):
        start = time.perf_counter()
        if start > end:
            run.skipped[name] = f"{options.minutes:g} minutes were over"
            continue
        try:
            part(run)
        except Exception as error:
            run.note_failure(name, error)
        finally:
            run.write()
        print(f"{name}: {time.perf_counter() - start:.0f} s")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if device.type == "cuda":
        show("to the device", run.checks)
    else:
        for check in run.checks:
            print(f"{check.what:60} {check.found:8.2f} {check.unit}")
        print("no CUDA device: nothing crosses here, and the targets are a GPU's")
    for kind, found in (("skipped", run.skipped), ("failed", run.failed)):
        for name, why in found.items():
            print(f"{kind}: {name}: {why}")
    if run.failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
