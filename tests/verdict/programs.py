"""Six programs whose verdict is known: what each reads, and what it computes."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

PHOTOS = Path(__file__).parents[2].parent / "shared" / "data" / "hymenoptera_data" / "train"


class Program(NamedTuple):
    """A program; ``kind`` is the only verdict that is right, beside "cannot tell"."""

    loader: DataLoader[Any]
    step: Any
    kind: str
    epochs: int | None = None


def trained(model: nn.Module, target: int) -> Any:
    """Return a training step of a model."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(batch: Any) -> None:
        x, y = batch
        loss = nn.functional.cross_entropy(model(x).reshape(-1, target), y.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _photos() -> Dataset[Any]:
    steps = [transforms.RandomResizedCrop(128), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    return ImageFolder(PHOTOS, transforms.Compose(steps))


def photographs(folder: Path) -> Program:
    """Decoding takes the time; random crops of photographs, and a small model."""
    model = nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(192, 2))
    return Program(DataLoader(_photos(), 16, shuffle=True), trained(model, 2), "helps")


def read_once(folder: Path) -> Program:
    """The same photographs, in one epoch."""
    return photographs(folder)._replace(kind="does not help", epochs=1)


class Vectors(Dataset[Any]):
    """Vectors in memory, which cost nothing."""

    def __init__(self, count: int, size: int) -> None:
        self.x = torch.rand(count, size)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], i % 10


def computing(folder: Path) -> Program:
    """The step takes the time: matrices of some million values."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    return Program(DataLoader(Vectors(4000, 512), 32, shuffle=True), trained(model, 10), "does not help")


def tiny_tensors(folder: Path) -> Program:
    """Tensors in memory, so small that collecting a batch takes longer than the step."""
    data = TensorDataset(torch.rand(40_000, 8), torch.arange(40_000) % 10)
    return Program(DataLoader(data, 64, shuffle=True), trained(nn.Linear(8, 10), 10), "helps")


class SlowDisk(Dataset[Any]):
    """Files of a disk that gives so many bytes a second to all processes together."""

    def __init__(self, folder: Path, count: int, rate: float) -> None:
        self.folder, self.rate, self.clock = folder, rate, folder / "clock"
        self.clock.write_bytes(np.float64(0).tobytes())
        self.count = count
        for i in range(count):
            (folder / f"{i}.bin").write_bytes(np.random.default_rng(i).bytes(30_000))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        data = self.read(self.folder / f"{i}.bin")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)[:27_648].view(3, 96, 96), i % 10

    def read(self, path: Path) -> bytes:
        data = path.read_bytes()
        with open(self.clock, "r+b") as file:  # the moment at which the disk is free again, for all processes
            fcntl.flock(file, fcntl.LOCK_EX)
            now = time.time()
            free = max(now, float(np.frombuffer(file.read(8), np.float64)[0])) + len(data) / self.rate
            file.seek(0)
            file.write(np.float64(free).tobytes())
            file.flush()
            fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(max(0.0, free - now))
        return data


def slow_disk(folder: Path) -> Program:
    """A disk of 5 MB/s, which more workers make no faster."""
    model = nn.Sequential(nn.AvgPool2d(12), nn.Flatten(), nn.Linear(192, 10))
    step = trained(model, 10)
    data = SlowDisk(folder, 400, 5e6)
    return Program(DataLoader(data, 16, shuffle=True), lambda batch: step((batch[0].float(), batch[1])), "helps")


class Tokens(Dataset[Any]):
    """Windows of tokens, in one array."""

    def __init__(self, length: int) -> None:
        self.tokens = np.random.default_rng(0).integers(0, 1000, 65 * length).astype(np.int64)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        window = torch.from_numpy(self.tokens[65 * i : 65 * i + 65].copy())
        return window[:-1], window[1:]


class Language(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read, self.head = (
            nn.Embedding(1000, 128),
            nn.GRU(128, 128, batch_first=True),
            nn.Linear(128, 1000),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.read(self.embed(tokens))[0])


def tokens(folder: Path) -> Program:
    """A language model over windows of tokens: it computes."""
    return Program(DataLoader(Tokens(3000), 16, shuffle=True), trained(Language(), 1000), "does not help")


PROGRAMS = (photographs, computing, read_once, tiny_tensors, slow_disk, tokens)
