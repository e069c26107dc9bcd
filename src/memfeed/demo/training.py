"""One timed epoch of a small CNN."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import nn

from memfeed.demo.result import EpochTiming
from memfeed.system.progress import Progress

CROP = 224
SEED = 0


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
    timed_epoch("", [batch, batch], 0, classes, device, progress=False)


def timed_epoch(
    name: str,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    total: int,
    classes: int,
    device: torch.device,
    *,
    progress: bool,
) -> EpochTiming:
    """Train a new model on every batch once. ``name`` and ``total``, the number of samples, are for the progress bar.

    The time to start the iterator counts too: DataLoader starts its workers there.
    """
    torch.manual_seed(SEED)
    model = small_cnn(classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def seconds() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    with Progress(name, total, unit=" images", shown=progress) as bar:
        started = time.perf_counter()
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
