"""What memfeed promises to survive, done to it at random moments for as long as one likes.

A scenario is a function of (seconds, rng) that returns counts. Those named in ``LOSSES`` have to be 0; some raise
AssertionError instead, which says what was lost and how to have it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import hostile
from torture.builders import builders
from torture.failed_syncs import failed_syncs
from torture.faults import faults
from torture.kill_build import kill_build
from torture.kill_train import kill_train
from torture.powerloss import powerloss
from torture.soak import soak

LOSSES = ("lost", "wrong", "repeated", "hung", "left", "grown", "failed")


def mutations(seconds: float, rng: random.Random) -> dict[str, int]:
    """Hostile stores; what is left of less than a second runs no case of them."""
    return hostile.mutations(max(seconds, 2.0), rng)


SCENARIOS: dict[str, Callable[[float, random.Random], dict[str, int]]] = {
    "kill_build": kill_build,
    "kill_train": kill_train,
    "builders": builders,
    "soak": soak,
    "faults": faults,
    "failed_syncs": failed_syncs,
    "powerloss": powerloss,
    "mutations": mutations,
}


def losses(counts: dict[str, int]) -> dict[str, int]:
    """The counts that should have been 0."""
    return {name: count for name, count in counts.items() if name in LOSSES and count}
