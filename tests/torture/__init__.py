"""What memfeed promises to survive, done to it at random moments for as long as one likes.

A scenario is a function of (seconds, rng) that returns counts. Those named in ``LOSSES`` have to be 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from torture.builders import builders
from torture.kill_build import kill_build
from torture.kill_train import kill_train
from torture.soak import soak

LOSSES = ("lost", "wrong", "repeated", "hung", "left", "grown")

SCENARIOS: dict[str, Callable[[float, random.Random], dict[str, int]]] = {
    "kill_build": kill_build,
    "kill_train": kill_train,
    "builders": builders,
    "soak": soak,
}


def losses(counts: dict[str, int]) -> dict[str, int]:
    """The counts that should have been 0."""
    return {name: count for name, count in counts.items() if name in LOSSES and count}
