"""What the parts of ``device.py`` share: a run with its sizes and figures, the clock, the recipe of photographs."""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

import memfeed.transforms as T
from measure import Check, Seconds, in_turns, ratio, write
from transforms import MEAN, STD

SHAPES = {"images 256": ((3, 256, 256), 64), "images 32": ((3, 32, 32), 512)}
RECIPE = T.Compose(
    [T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.Normalize(MEAN, STD), T.ToDtype(torch.bfloat16)],
    memory_format=torch.channels_last,
)


class Sizes(NamedTuple):
    """How much of everything is measured.

    Args:
        rows: of the shapes that are fed.
        resident: rows of 12 KB that lie on the device, and the epochs over them, one after the other.
        augmented: images of a call, and calls that are queued together.
        peer_calls: the same of other libraries, whose calls take longer.
        host_rows: of which the caller's time a step is taken.
        photographs: that are decoded.
        copies: of each photograph, in epochs from files.
        trained: images, and those of a batch.
        rounds: turns of each contender, if there is time.
        seconds: that the turns of one part take at most. A turn that has begun is finished.
        workers: processes of DataLoader.
    """

    rows: tuple[int, int]
    resident: tuple[int, int]
    augmented: tuple[int, int]
    peer_calls: int
    host_rows: int
    photographs: int
    copies: int
    trained: tuple[int, int]
    rounds: int
    seconds: float
    workers: int


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], Any]) -> float:
    finish(device)
    start = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - start


class Run:
    """One run: its device, how much it measures, and what it has found so far."""

    def __init__(self, options: argparse.Namespace, device: torch.device, sizes: Sizes) -> None:
        self.options, self.device, self.sizes = options, device, sizes
        self.checks: list[Check] = []
        self.skipped: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.rates: dict[str, dict[str, float]] = {}
        self.median_seconds: dict[str, dict[str, float]] = {}
        self.shares: dict[str, list[float]] = {}

    def turns(self, contenders: Mapping[str, Callable[[], float]]) -> Seconds:
        """Time contenders in turns, as long as there is time; at least once. One that fails is left out by name."""
        end, left = time.perf_counter() + self.sizes.seconds, dict(contenders)
        found: Seconds = {}
        for number in range(self.sizes.rounds if left else 0):
            names = [*left][number % len(left) :] + [*left][: number % len(left)]
            for name in names:
                try:
                    found.setdefault(name, []).extend(in_turns({name: left[name]}, 1)[name])
                except Exception as error:
                    self.note_failure(name, error)
                    del left[name], found[name]
            if time.perf_counter() > end or not left:
                break
        return found

    def check(self, what: str, seconds: Seconds, one: str, other: str, least: float) -> None:
        """Note that ``one`` must take at least so many times as long as ``other``, if both were timed."""
        if one in seconds and other in seconds:
            self.checks.append(Check(what, ratio(seconds, one, other), least, True))

    def note_failure(self, name: str, error: BaseException) -> None:
        """Write down what failed, and print where."""
        traceback.print_exception(error)
        self.failed[name] = f"{type(error).__name__}: {str(error)[:300]}"

    def write(self) -> None:
        """Write what was found so far."""
        cuda = self.device.type == "cuda"
        about = {
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
            "images": self.sizes.augmented[0],
            "shapes": list(SHAPES),
            "sizes": self.sizes._asdict(),
        }
        figures: dict[str, Any] = {
            "gigabytes_per_second": self.rates, "median_seconds": self.median_seconds, **self.shares,
            "skipped": self.skipped, "failed": self.failed,
        }  # fmt: skip
        if not cuda:
            figures["without_targets"] = {check.what: check.found for check in self.checks}
        write(self.options, about, figures, self.checks if cuda else [])
