"""One lap: an epoch of a small CNN, timed, with the time it waited for data."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from memfeed.demo.result import Lap
from memfeed.system.progress import Progress

CROP = 224
RESIZE = 256
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as every tutorial has them


def small_cnn(classes: int) -> nn.Module:
    """About 4 million multiplications an image of 224 x 224: small, so that data decides the race on any machine."""
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


class Trainer:
    """A model and its optimiser, the same from the same seed."""

    def __init__(self, classes: int, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        self.device = device
        self._model = small_cnn(classes).to(device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.05, momentum=0.9)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """One step, finished when it returns."""
        loss = nn.functional.cross_entropy(self._model(images), labels)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self.synchronize()

    def synchronize(self) -> None:
        """Waits for the device, so that the clock tells the truth."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def warm_up(self, batch_size: int) -> None:
        """Two steps on zeros: libraries choose their kernels, outside the race."""
        images = torch.zeros(batch_size, 3, CROP, CROP, device=self.device)
        labels = torch.zeros(batch_size, dtype=torch.int64, device=self.device)
        for _ in range(2):
            self.step(images, labels)


def lap(name: str, batches: Iterable[Any], total: int, trainer: Trainer, *, progress: bool) -> Lap:
    """Trains on every batch once. ``total`` is the number of samples, for the bar."""
    seen, waited = 0, 0.0
    marks = [(0.0, 0)]
    with Progress(name, total, unit=" images", shown=progress) as bar:
        started = asked = time.perf_counter()
        for images, labels in batches:  # making the iterator counts too: that is where workers start
            images, labels = images.to(trainer.device), labels.to(trainer.device)
            trainer.synchronize()
            waited += time.perf_counter() - asked
            trainer.step(images, labels)
            asked = time.perf_counter()
            seen += len(images)
            marks.append((asked - started, seen))
            bar.advance(len(images))
    return Lap(tuple(marks), waited)
