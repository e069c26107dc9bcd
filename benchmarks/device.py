"""Time the way to the device: batches from each placement beside plain copies, augmentation there, and a ResNet.

On a CUDA machine the figures have targets. Without one the same programs run on the CPU, where nothing is transferred:
that shows only that the benchmark runs, and how much time the loader takes beside a model.

Every program must give the same rows before it is timed. They take turns, and the ratios come from one run.

    python benchmarks/device.py [--device cuda]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
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


def augmenting(device: torch.device, rounds: int, n: int) -> Seconds:
    """Time uint8 [n, 3, 256, 256] to bfloat16 channels last, the tutorial's version of it, and a plain copy."""
    images = torch.randint(0, 256, (n, 3, 256, 256), dtype=torch.uint8, device=device)
    keys = Keys(seed=0, epoch=0, rows=torch.arange(n))
    made = AUGMENT.apply(images, keys)
    want = tutorial(images.cpu(), keys)  # in float32
    assert made.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(made.cpu().float(), want, rtol=2**-8, atol=2**-8)
    source = torch.empty(moved_bytes(n) // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    roads = {
        "memfeed": lambda: AUGMENT.apply(images, keys),
        "tutorial": lambda: tutorial(images, keys).to(torch.bfloat16, memory_format=torch.channels_last),
        "copy of as many bytes": lambda: target.copy_(source),
    }
    return in_turns({name: lambda road=road: timed(device, road) for name, road in roads.items()}, rounds, 0.05)


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


def training(device: torch.device, rounds: int, rows: int, batch: int) -> tuple[Seconds, list[float]]:
    """Time an epoch with the loader and one that reuses a batch. Return the seconds and the shares of time waited."""
    data = torch.randint(0, 256, (rows, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (rows,))
    augment = T.Compose(
        [T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), T.Normalize(MEAN, STD)],
        memory_format=torch.channels_last,
    )
    loader = memfeed.Loader(data, batch, shuffle=True, drop_last=True, device=device, transform=augment)
    model = small_resnet().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    waits: list[float] = []

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    def fed() -> None:
        for images, labels in loader:
            step(images, labels)
        waits.append(loader.stats()["wait_share"])

    kept = [part.clone() for part in next(iter(loader))]

    def reused() -> None:
        for _ in range(len(loader)):
            step(*kept)

    seconds = in_turns(
        {"fed": lambda: timed(device, fed), "one batch reused": lambda: timed(device, reused)}, max(rounds, 2)
    )
    return seconds, waits


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
    n = 256 if cuda else 16
    seconds = augmenting(device, rounds, n)
    figures["median_seconds"]["augmentation"] = medians(seconds)
    checks += [
        Check("augmentation, of copy bandwidth", ratio(seconds, "copy of as many bytes", "memfeed"), 0.6, True),
        Check("augmentation: the tutorial takes", ratio(seconds, "tutorial", "memfeed"), 10, True),
    ]
    seconds, waits = training(device, rounds, *((16, 8) if options.quick else (50_000, 512) if cuda else (256, 64)))
    figures["median_seconds"]["training"] = medians(seconds)
    figures["wait_shares"] = waits
    checks += [
        Check("training: waited", sorted(waits)[len(waits) // 2], 0.01, False, "of the time"),
        Check("training: an epoch takes, of one batch reused", ratio(seconds, "fed", "one batch reused"), 1.02, False),
    ]
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
