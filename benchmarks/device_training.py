"""A part of ``device.py``: epochs of a ResNet with the loader, beside epochs that use one batch again and again."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import nn

import memfeed
import memfeed.transforms as T
from device_run import RECIPE, Run, finish, timed
from measure import Check, medians
from transforms import MEAN, STD


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
