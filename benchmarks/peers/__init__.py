"""Other data loading libraries, each used as its own documentation says for local, warm raw arrays.

    for name, version in available().items():
        epochs = PEERS[name](rows, batch_size, directory)  # writes the peer's format, once
        for images, labels in epochs:  # one shuffled epoch: uint8 [k, c, h, w], int64 [k], on the CPU
            ...

Each file says what was chosen and why, and whether the peer's shuffle is exact: over all rows, so that
any row can come at any place, not within a buffer, a block or a chunk.
Finish one epoch before the next. Use one peer per process: FFCV sets the number of torch's threads, TensorFlow starts
its own threads, and the workers of others are forked from that process. To end a peer, delete the object: its threads
and workers end with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from peers.rows import Rows, check

__all__ = ["EXACT", "PEERS", "Rows", "available", "check", "missing"]

Make = Callable[[Rows, int, Path], Iterable[Any]]

# name -> module of this package, distributions that bring the library, whether its shuffle is exact
_PEERS: dict[str, tuple[str, list[str], bool]] = {
    "FFCV": ("ffcv", ["ffcv"], True),
    "TensorStore": ("tensorstore", ["tensorstore"], True),
    "Lance": ("lance", ["pylance"], True),
    "SPDL": ("spdl", ["spdl"], True),
    "Grain": ("grain", ["grain"], True),
    "LitData": ("litdata", ["litdata"], False),
    "MosaicML Streaming": ("mosaicml", ["mosaicml-streaming"], True),
    "Hugging Face datasets": ("huggingface", ["datasets"], True),
    "WebDataset": ("webdataset", ["webdataset"], False),
    "tf.data": ("tfdata", ["tensorflow-cpu", "tensorflow"], True),
    "TorchRL": ("torchrl", ["torchrl"], True),
}


def _make(module: str) -> Make:
    def make(rows: Rows, batch_size: int, directory: Path) -> Iterable[Any]:
        # imported here: some of the libraries take seconds to import and start threads
        return import_module(f"peers.{module}").make(rows, batch_size, directory)

    return make


PEERS: dict[str, Make] = {name: _make(module) for name, (module, _, _) in _PEERS.items()}
EXACT: dict[str, bool] = {name: exact for name, (_, _, exact) in _PEERS.items()}


def available() -> dict[str, str]:
    """Return the version of every peer that is installed. Imports none of them."""
    found = {name: _version(distributions) for name, (_, distributions, _) in _PEERS.items()}
    return {name: found_version for name, found_version in found.items() if found_version is not None}


def missing() -> list[str]:
    """Return the peers that are not installed. The extra ``peers`` of pyproject.toml installs them."""
    return [name for name in PEERS if name not in available()]


def _version(distributions: list[str]) -> str | None:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
