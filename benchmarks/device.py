"""Time the way to the device: batches from each placement beside plain copies, augmentation there, and a ResNet.

On a CUDA machine the figures have targets. Without one the same programs run on the CPU, where nothing is transferred:
that shows only that the benchmark runs, and how much time the loader takes beside a model.

Every program must give the same rows before it is timed. They take turns, and the ratios come from one run.

    python benchmarks/device.py [--device cuda]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memfeed
import memfeed.transforms as T
from measure import Check, Seconds, in_turns, medians, parser, ratio, show, table, write
from memfeed.random import Keys
from transforms import MEAN, STD, tutorial

SHAPES = {"images 256": ((3, 256, 256), 64, 4000), "images 32": ((3, 32, 32), 512, 50_000)}
RESIDENT_BYTES = 20 * 10**9
RECIPE = T.Compose(
    [T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.Normalize(MEAN, STD), T.ToDtype(torch.bfloat16)],
    memory_format=torch.channels_last,
)
AUGMENT = T.Compose(
    [T.RandomCrop(224), T.RandomHorizontalFlip(), T.ToDtype(torch.bfloat16, scale=True), T.Normalize(MEAN, STD)],
    memory_format=torch.channels_last,
)


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], Any]) -> float:
    finish(device)
    start = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - start


# --- batches from each placement


def feeding(shape: tuple[int, ...], batch: int, rows: int, device: torch.device, rounds: int, at: Path) -> Seconds:
    """Time the rows of an epoch from each placement, and the plain copies that limit them."""
    data = torch.randint(0, 256, (rows, *shape), dtype=torch.uint8)
    store = memfeed.cache((data, torch.arange(rows)), at, progress=False)
    loaders = {
        where: memfeed.Loader(store, batch, shuffle=True, drop_last=True, device=device, placement=where)
        for where in ("pinned", "mapped", "device")
    }
    for where, loader in loaders.items():
        for images, labels in loader:
            assert torch.equal(images.cpu(), data[labels.cpu()]), where
    steps, column = rows // batch, store.column(0)
    here = torch.empty(batch, *shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there, other = (torch.empty(batch, *shape, dtype=torch.uint8, device=device) for _ in range(2))
    ids = torch.randperm(rows)[: steps * batch].view(steps, batch)

    def epoch(loader: memfeed.Loader) -> None:
        for batch in loader:
            del batch

    def repeat(work: Callable[[int], Any]) -> Callable[[], None]:
        def run() -> None:
            for step in range(steps):
                work(step)

        return run

    contenders = {
        where: lambda loader=loader: timed(device, lambda: epoch(loader)) for where, loader in loaders.items()
    }
    bare = {
        "bare copy to the device": repeat(lambda step: there.copy_(here, non_blocking=True)),
        "bare gather": repeat(lambda step: torch.index_select(column, 0, ids[step], out=here)),
        "bare copy on the device": repeat(lambda step: other.copy_(there)),
    }
    contenders |= {name: lambda work=work: timed(device, work) for name, work in bare.items()}
    return in_turns(contenders, rounds)


# --- the augmentation


def queued(device: torch.device, work: Callable[[], Any], calls: int, host: list[float]) -> float:
    """Return the seconds of one of ``calls`` calls that are queued together; append the caller's seconds to ``host``.

    On a GPU, events before and after say how long the device took. The caller's time ends when the last is queued.
    """
    finish(device)
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            work()
        host.append((time.perf_counter() - start) / calls)
        return host[-1]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    host.append((time.perf_counter() - start) / calls)
    end.record()
    finish(device)
    return float(begin.elapsed_time(end)) / 1e3 / calls


def augmenting(device: torch.device, rounds: int, n: int, calls: int) -> tuple[Seconds, Seconds]:
    """Time uint8 [n, 3, 256, 256] to bfloat16 channels last, other ways to make it, and a plain copy.

    Returns the seconds that the device takes for a call, and those that the caller takes to queue it.
    """
    images = torch.randint(0, 256, (n, 3, 256, 256), dtype=torch.uint8, device=device)
    keys = Keys(seed=0, epoch=0, rows=torch.arange(n))
    few = Keys(seed=0, epoch=0, rows=torch.arange(16))
    made = AUGMENT.apply(images[:16], few)
    want = tutorial(images[:16].cpu(), few)  # in float32
    assert made.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(made.cpu().float(), want, rtol=2**-8, atol=2**-8)
    source = torch.empty(moved_bytes(n) // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    roads: dict[str, Callable[[], Any]] = {
        "memfeed": lambda: AUGMENT.apply(images, keys),
        "memfeed, RandomResizedCrop": lambda: RECIPE.apply(images, keys),
        "tutorial": lambda: tutorial(images, keys).to(torch.bfloat16, memory_format=torch.channels_last),
        "copy of as many bytes": lambda: target.copy_(source),
    }
    roads |= {name: lambda road=road: road(images) for name, road in peers(device).items()}
    host: Seconds = {name: [] for name in roads}
    works = {name: lambda name=name: queued(device, roads[name], calls, host[name]) for name in roads}
    return in_turns(works, rounds), host


def peers(device: torch.device) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Return the same augmentation with the libraries that are installed. They draw one crop for the whole batch, or
    their own numbers: their results are not compared.
    """
    found: dict[str, Callable[[torch.Tensor], Any]] = {}
    if find_spec("torchvision") is not None:
        from torchvision.transforms import v2

        of_batch = v2.Compose([v2.RandomCrop(224), v2.RandomHorizontalFlip(), v2.ToDtype(torch.bfloat16, scale=True),
                               v2.Normalize(MEAN, STD)])  # fmt: skip
        found["torchvision v2, one crop for all"] = of_batch
    if find_spec("kornia") is not None:
        import kornia.augmentation as K

        mean, std = torch.tensor(MEAN), torch.tensor(STD)
        each = K.AugmentationSequential(K.RandomCrop((224, 224)), K.RandomHorizontalFlip(), K.Normalize(mean, std))
        each = each.to(device)
        found["kornia"] = lambda images: each(images.float() / 255).to(torch.bfloat16)
    return found


# --- columns that lie on the device, and the caller's time


def resident(device: torch.device, rounds: int, rows: int, epochs: int) -> Seconds:
    """Time batches from columns in the device's memory, one epoch after the other, beside plain gathers and copies."""
    data, batch = torch.randint(0, 256, (rows, 3, 64, 64), dtype=torch.uint8), min(512, rows // 4)
    loader = memfeed.Loader((data,), batch, shuffle=True, drop_last=True, device=device, placement="device")
    there, steps = data.to(device), rows // batch
    other = torch.empty_like(there[: steps * batch])
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
            other.copy_(there[: steps * batch])  # larger than the L2

    works = {"memfeed": fed, "index on the device": gathered, "copy on the device": copied}
    fed()
    return in_turns({name: lambda work=work: timed(device, work) for name, work in works.items()}, rounds)


def host_times(device: torch.device, rounds: int, rows: int) -> Seconds:
    """Time what the caller's thread spends on a step of a small batch: `next()` and nothing else."""
    data = torch.randint(0, 256, (rows, 3, 32, 32), dtype=torch.uint8), torch.arange(rows)
    augment = T.Compose([T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), T.Normalize(MEAN, STD)])
    found: Seconds = {}
    for name, transform in (("without a transform", None), ("with transforms", augment)):
        loader = memfeed.Loader(data, 64, shuffle=True, drop_last=True, device=device, transform=transform)
        found[name] = []
        for _ in range(rounds + 1):
            steps, batches = [], iter(loader)
            while True:
                start = time.thread_time()  # the CPU time of the caller: it may wait for the batches
                if next(batches, None) is None:
                    break
                steps.append(time.thread_time() - start)
            found[name].append(statistics.median(steps))
        del found[name][0]
    return found


def moved_bytes(n: int) -> int:
    """Return the bytes that the augmentation reads and writes: each pixel of the crops as uint8 and as bfloat16."""
    return n * 3 * 224 * 224 * (1 + 2)


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


def training(
    device: torch.device, rounds: int, rows: int, batch: int, *, large: bool
) -> tuple[Seconds, list[float], list[float]]:
    """Time an epoch with the loader and one that reuses a batch: of ResNet-50 at 224, or of a small net at 32.

    Returns the seconds, the shares of its time that the caller waited, and, on a GPU, the shares of the device's time
    between the end of a step and the begin of the next, by events.
    """
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

        model = resnet50().to(device, torch.bfloat16, memory_format=torch.channels_last)
    else:
        model = small_resnet().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    waits: list[float] = []

    gaps: list[float] = []
    marks: list[Any] = []

    def mark() -> None:
        if device.type == "cuda":
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        mark()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
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

    seconds = in_turns(
        {"fed": lambda: timed(device, fed), "one batch reused": lambda: timed(device, reused)}, max(rounds, 2)
    )
    return seconds, waits, gaps


def main() -> None:
    made = parser("device-cuda" if torch.cuda.is_available() else "device-cpu", __doc__)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--rounds", type=int, default=7)
    options = made.parse_args()
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    rounds = 1 if options.quick else options.rounds
    checks: list[Check] = []
    figures: dict[str, Any] = {"gigabytes_per_second": {}, "median_seconds": {}}
    with tempfile.TemporaryDirectory() as at:
        for name, (shape, batch, rows) in SHAPES.items():
            rows = rows if cuda and not options.quick else rows // 10
            seconds = feeding(shape, batch, rows, device, rounds, Path(at) / f"{batch}.mf")
            total = rows // batch * batch * torch.Size(shape).numel()
            rates = {who: total / time_s / 1e9 for who, time_s in medians(seconds).items()}
            figures["gigabytes_per_second"][name] = rates
            table(name, ["", "GB/s"], [[who, f"{rate:.2f}"] for who, rate in rates.items()])
            slower = max(("bare copy to the device", "bare gather"), key=medians(seconds).__getitem__)
            limits = {"pinned": ("bare copy to the device", 0.90), "mapped": (slower, 0.85)}
            limits["device"] = "bare copy on the device", 0.6
            for where, (limit, least) in limits.items():
                checks.append(Check(f"{name}, {where}: of the {limit}", ratio(seconds, limit, where), least, True))
    large = cuda and not options.quick
    rows, epochs = (RESIDENT_BYTES // (3 * 64 * 64) + 1, 64) if large else (256, 2)
    seconds = resident(device, rounds, rows, epochs)
    figures["median_seconds"]["resident"] = medians(seconds)
    checks.append(Check("resident, of the copy's rate", ratio(seconds, "copy on the device", "memfeed"), 0.6, True))
    hosts = {
        name: statistics.median(times) for name, times in host_times(device, rounds, 12_800 if large else 640).items()
    }
    figures["median_seconds"]["the caller's CPU time a step"] = hosts
    for (name, found_s), limit in zip(hosts.items(), (30, 60), strict=True):
        checks.append(Check(f"the caller's CPU time a step, {name}", found_s * 1e6, limit, False, "us"))
    n, calls = (4096, 50) if large else (16, 2)
    seconds, host = augmenting(device, rounds, n, calls)
    figures["median_seconds"]["augmentation"] = medians(seconds)
    figures["median_seconds"]["the caller's time to queue it"] = medians(host)
    crops = ratio(seconds, "copy of as many bytes", "memfeed, RandomResizedCrop")
    checks += [
        Check("augmentation, of copy bandwidth", ratio(seconds, "copy of as many bytes", "memfeed"), 0.6, True),
        Check("RandomResizedCrop, of copy bandwidth", crops, 0.4, True),
        Check("augmentation: the tutorial takes", ratio(seconds, "tutorial", "memfeed"), 10, True),
    ]
    trained = (16, 8) if not large and options.quick else (25_600, 256) if large else (256, 64)
    seconds, waits, gaps = training(device, rounds, *trained, large=large)
    figures["median_seconds"]["training"] = medians(seconds)
    figures["wait_shares"], figures["gap_shares"] = waits, gaps
    checks.append(Check("training: one batch reused / fed", ratio(seconds, "one batch reused", "fed"), 0.99, True))
    if gaps:
        share = statistics.median(gaps)
        checks.append(Check("training: between steps", share, 0.01, False, "of the device's time"))
    if not cuda:
        for check in checks:
            print(f"{check.what:60} {check.found:8.2f} {check.unit}")
        print("no CUDA device: nothing crosses here, and the targets are a GPU's")
        figures["without_targets"] = {check.what: check.found for check in checks}
        checks = []
    else:
        show("to the device", checks)
    about = {"device": torch.cuda.get_device_name(device) if cuda else "cpu", "images": n, "shapes": list(SHAPES)}
    write(options, about, figures, checks)


if __name__ == "__main__":
    main()
