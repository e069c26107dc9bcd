"""The global random generators on the CPU: torch's, numpy's and Python's. Save, restore and seed all three together."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch


class RandomState(NamedTuple):
    """The states of the three generators. The memory is a copy; two states can be compared field by field."""

    torch: bytes
    numpy: tuple[Any, ...]
    random: tuple[Any, ...]


def save() -> RandomState:
    """Return the states of the three generators."""
    kind, keys, *rest = np.random.get_state()
    return RandomState(
        torch.get_rng_state().numpy().tobytes(), (kind, np.asarray(keys).tobytes(), *rest), random.getstate()
    )


def restore(state: RandomState) -> None:
    """Set the three generators to `state`."""
    kind, keys, *rest = state.numpy
    torch.set_rng_state(torch.frombuffer(bytearray(state.torch), dtype=torch.uint8))
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))
    random.setstate(state.random)


def seed(value: int) -> None:
    """Seed the three generators with `value`, 0 <= value < 2**32: each with a hash of its own.

    With the same seed, the generators of torch and NumPy draw the same numbers.
    """
    for_torch, for_random, *for_numpy = np.random.SeedSequence(value).generate_state(6).tolist()
    torch.default_generator.manual_seed(for_torch)  # torch.manual_seed would also seed every device
    np.random.seed(for_numpy)
    random.seed(for_random)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the three generators when the block ends."""
    state = save()
    try:
        yield
    finally:
        restore(state)


@contextmanager
def seeded(value: int) -> Iterator[None]:
    """Seed the three generators for the block, and restore them when it ends."""
    with preserved():
        seed(value)
        yield


def encode(state: RandomState) -> dict[str, Any]:
    """Return `state` as values that JSON can hold."""
    kind, keys, *rest = state.numpy
    return {"torch": _text(state.torch), "numpy": [kind, _text(keys), *rest], "python": state.random}


def decode(encoded: Mapping[str, Any]) -> RandomState:
    """Return the state that `encode` gave. Raises ValueError, KeyError or TypeError for anything else."""
    kind, keys, *rest = encoded["numpy"]
    version, numbers, gauss = encoded["python"]
    return RandomState(
        base64.b64decode(encoded["torch"]), (kind, base64.b64decode(keys), *rest), (version, tuple(numbers), gauss)
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
