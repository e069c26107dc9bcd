"""A store of several chunks, and copies of it at addresses, for tests."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

import memfeed
from memfeed.remote.objects import Objects

ROWS = 150


def sample(i: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(i)
    return {
        "image": torch.randint(0, 256, (96 << 10,), generator=g, dtype=torch.uint8),
        "label": i,
        "sound": torch.rand(8000 + 100 * (i % 7), generator=g),
        "text": f"row {i}" * (i % 5),
        "boxes": torch.rand(i % 4, 4, generator=g),
    }


def make(path: Path) -> memfeed.Store:
    """Return a store of 20 MB."""
    return memfeed.cache([sample(i) for i in range(ROWS)], path, workers=0, progress=False)


def upload(store: memfeed.Store, address: str) -> str:
    """Copy the files of a store to an address, and return the address."""
    objects = Objects(address)
    for path in sorted(store.path.rglob("*")):
        if path.is_file():
            objects.put_file(str(path.relative_to(store.path)), path, path.stat().st_size)
    return address


def disk_bytes(root: Path) -> int:
    """Return the bytes that a directory takes on the disk; files may come and go meanwhile."""
    total = 0
    for path, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total
