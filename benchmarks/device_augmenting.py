"""A part of ``device.py``: augmentation on the device, beside other ways to make the same and a plain copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import memfeed.transforms as T
from device_peers import augmenters
from device_run import RECIPE, Run, finish
from measure import Seconds, medians
from memfeed.random import Keys
from transforms import MEAN, STD, tutorial

AUGMENT = T.Compose(
    [T.RandomCrop(224), T.RandomHorizontalFlip(), T.ToDtype(torch.bfloat16, scale=True), T.Normalize(MEAN, STD)],
    memory_format=torch.channels_last,
)


def queued(device: torch.device, work: Callable[[], Any], calls: int, host: list[float], own_streams: bool) -> float:
    """Return the seconds of one of ``calls`` calls that are queued together; append the caller's seconds to ``host``.

    On a GPU, events before and after say how long the device took. The caller's time ends when the last is queued. For
    work on ``own_streams`` it is the time until the device is done.
    """
    finish(device)
    by_events = device.type == "cuda" and not own_streams
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if by_events else (None, None)
    if begin is not None:
        begin.record()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    host.append((time.perf_counter() - start) / calls)
    if end is not None:
        end.record()
    finish(device)
    if begin is None:
        return (time.perf_counter() - start) / calls
    return float(begin.elapsed_time(end)) / 1e3 / calls


def augmenting(run: Run) -> None:
    """Time uint8 [n, 3, 256, 256] to bfloat16 channels last, other ways to make it, and a plain copy.

    The seconds that the device takes for a call, and those that the caller takes to queue it.
    """
    device, (n, calls) = run.device, run.sizes.augmented
    images = torch.randint(0, 256, (n, 3, 256, 256), dtype=torch.uint8, device=device)
    keys, few = (Keys(seed=0, epoch=0, rows=torch.arange(count)) for count in (n, min(n, 16)))
    made = AUGMENT.apply(images[:16], few)
    want = tutorial(images[:16].cpu(), few)  # in float32
    assert made.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(made.cpu().float(), want, rtol=2**-6, atol=2**-5)  # without Triton each step rounds
    source = torch.empty(moved_bytes(n) // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    roads: dict[str, Callable[[], Any]] = {
        "memfeed": lambda: AUGMENT.apply(images, keys),
        "memfeed, RandomResizedCrop": lambda: RECIPE.apply(images, keys),
        "copy of as many bytes": lambda: target.copy_(source),
    }
    ours = set(roads)
    others, skipped, own_streams = augmenters(device, images)
    run.skipped.update(skipped)
    roads["tutorial"] = lambda: tutorial(images, keys).to(torch.bfloat16, memory_format=torch.channels_last)
    roads |= {name: lambda road=road: road(images) for name, road in others.items()}
    host: Seconds = {name: [] for name in roads}

    def work(name: str) -> float:
        count = calls if name in ours else run.sizes.peer_calls
        return queued(device, roads[name], count, host[name], name in own_streams)

    for name in ours:
        roads[name]()  # compiles
    seconds = run.turns({name: lambda name=name: work(name) for name in roads})
    run.median_seconds["augmentation"] = medians(seconds)
    run.median_seconds["the caller's time to queue it"] = medians({name: host[name] for name in seconds})
    copy = "copy of as many bytes"
    run.check("augmentation, of copy bandwidth", seconds, copy, "memfeed", 0.6)
    run.check("RandomResizedCrop, of copy bandwidth", seconds, copy, "memfeed, RandomResizedCrop", 0.4)
    run.check("augmentation: the tutorial takes", seconds, "tutorial", "memfeed", 10)


def moved_bytes(n: int) -> int:
    """Return the bytes that the augmentation reads and writes: each pixel of the crops as uint8 and as bfloat16."""
    return n * 3 * 224 * 224 * (1 + 2)
