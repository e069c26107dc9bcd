"""Train a small network on raw images and on JPEG of quality 95, with several seeds each."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import memfeed

SIDE, NOISE, TRAINED = 32, 24.0, 1200
FORMS: dict[str, Any] = {"raw": {"0": "raw"}, "jpeg:95": {"0": "jpeg:95"}}


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return scikit-learn's digits, enlarged to uint8 [3, 32, 32] and with noise, and their classes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    small = torch.from_numpy(found.images).float()[:, None] * (255 / 16)
    large = nn.functional.interpolate(small, size=SIDE, mode="bilinear").expand(-1, 3, -1, -1)
    noise = torch.from_numpy(np.random.default_rng(0).normal(0, NOISE, tuple(large.shape)).astype(np.float32))
    return (large + noise).clamp(0, 255).to(torch.uint8), torch.from_numpy(found.target)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10)
    )


def accuracy(train: Any, images: torch.Tensor, labels: torch.Tensor, seed: int, epochs: int) -> float:
    """Return the share of raw test images whose class a network finds that was trained on ``train``."""
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = memfeed.Loader(train, 64, shuffle=True, seed=seed)
    for _ in range(epochs):
        for batch, classes in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.float() / 255 - 0.5), classes).backward()
            optimizer.step()
    with torch.no_grad():
        return float((model(images.float() / 255 - 0.5).argmax(1) == labels).float().mean())


def compare(base: Path, seeds: int, epochs: int) -> dict[str, Any]:
    """Return the accuracies of each form by seed, and how far the means are apart."""
    images, labels = digits()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train = torch.utils.data.TensorDataset(images[:TRAINED], labels[:TRAINED])
    found = {}
    for form, forms in FORMS.items():
        store = memfeed.cache(train, base / f"digits-{form.replace(':', '-')}.mf", forms=forms, progress=False)
        test = images[TRAINED:], labels[TRAINED:]
        found[form] = [accuracy(store, *test, seed, epochs) for seed in range(seeds)]
    torch.set_num_threads(threads)
    raw, coded = found["raw"], found["jpeg:95"]
    return {
        "accuracies": found,
        "difference": abs(statistics.mean(raw) - statistics.mean(coded)),
        "spread": max(raw) - min(raw),
        "seeds": seeds,
        "epochs": epochs,
        "rows": TRAINED,
    }
