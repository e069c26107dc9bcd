"""Augmentation of uint8 [64, 3, 256, 256] to float32 [64, 3, 224, 224] on the CPU: who takes how long.

Crop, flip and normalise, with a fixed and with a resized crop; and what it takes to draw the parameters of 256 images.

Every contender is shown to give the same images before it is timed. Rounds visit the contenders in turn, so that all of
them meet the same disturbances; the figures are medians, the ratios come from one run.

    python benchmarks/transforms.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

import memfeed.transforms as T
from measure import Check, Seconds, in_turns, medians, parser, ratio, seconds_of, show, write
from memfeed.random import Keys, uniform
from memfeed.system.buffers import Allocator, Fresh
from memfeed.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip, RandomResizedCrop

N, SIDE, CROP = 64, 256, 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
AUGMENT = Compose([RandomCrop(CROP), RandomHorizontalFlip(), Normalize(MEAN, STD)])
RESIZED = Compose([RandomResizedCrop(CROP), RandomHorizontalFlip(), Normalize(MEAN, STD)])
VISION = "torchvision v2 per sample"
DRAWN = {
    "RandomCrop": T.RandomCrop(CROP),
    "RandomHorizontalFlip": T.RandomHorizontalFlip(),
    "RandomResizedCrop": T.RandomResizedCrop(CROP),
    "RandomRotation": T.RandomRotation(30),
    "RandomAffine": T.RandomAffine(30, (0.1, 0.1), (0.9, 1.1), 10),
    "ColorJitter": T.ColorJitter(0.4, 0.4, 0.4, 0.1),
    "RandomGrayscale": T.RandomGrayscale(),
    "RandomErasing": T.RandomErasing(),
}


def drawn(keys: Keys) -> tuple[list[int], list[int], list[bool]]:
    corners = (uniform(keys, "RandomCrop.0", 2) * (SIDE - CROP + 1)).astype(np.int64)
    flips = uniform(keys, "RandomHorizontalFlip.0")[:, 0] < 0.5
    return corners[:, 0].tolist(), corners[:, 1].tolist(), flips.tolist()


def slice_and_cast(images: torch.Tensor, keys: Keys, allocator: Allocator) -> torch.Tensor:
    """Slice and cast each crop, without a flip or a normalisation: the least that any contender must do."""
    tops, lefts, _ = drawn(keys)
    output = allocator.allocate((N, 3, CROP, CROP), torch.float32)
    for i, (top, left) in enumerate(zip(tops, lefts, strict=True)):
        output[i].copy_(images[i, :, top : top + CROP, left : left + CROP])
    return output


def memfeed_into(images: torch.Tensor, keys: Keys, allocator: Allocator) -> torch.Tensor:
    return AUGMENT.apply(images, keys, allocator=allocator)


def tutorial(images: torch.Tensor, keys: Keys) -> torch.Tensor:
    """As the tensorclass tutorial does it: normalise all pixels, crop with two gathers, flip with two masks."""
    n, there = len(images), images.device
    tops, lefts, flips = (torch.tensor(values, device=there) for values in drawn(keys))
    mean, std = (255 * torch.tensor(values, device=there).view(3, 1, 1) for values in (MEAN, STD))
    images = (images - mean) / std
    steps = torch.arange(CROP, device=there)
    rows = (tops[:, None] + steps)[:, None, :, None].expand(n, 3, CROP, SIDE)
    columns = (lefts[:, None] + steps)[:, None, None, :].expand(n, 3, CROP, CROP)
    images = images.gather(-2, rows).gather(-1, columns)
    flipped = flips.view(n, 1, 1, 1).expand_as(images)
    return images.masked_fill(flipped, 0.0) + images.masked_fill(~flipped, 0.0).flip(-1)


def torchvision_per_sample(images: torch.Tensor, keys: Keys) -> torch.Tensor:
    from torchvision.transforms.v2 import functional

    samples = []
    for image, top, left, flip in zip(images, *drawn(keys), strict=True):
        sample = functional.crop(image, top, left, CROP, CROP)
        sample = functional.horizontal_flip(sample) if flip else sample
        samples.append(functional.normalize(functional.to_dtype(sample, torch.float32, scale=True), MEAN, STD))
    return torch.stack(samples)


def resized_by_torchvision(images: torch.Tensor, keys: Keys) -> torch.Tensor:
    """Resize the same crops sample by sample. The time to draw them is not included."""
    from torchvision.transforms.v2 import functional

    made = RESIZED.params(keys.rows, shape=images.shape[1:], dtype=images.dtype)
    boxes, flips = made["RandomResizedCrop.0"], made["RandomHorizontalFlip.0"].hflip
    places = zip(boxes.top, boxes.left, boxes.box_height, boxes.box_width, strict=True)
    samples = []
    for image, place, flip in zip(images, places, flips, strict=True):
        sample = functional.resized_crop(image, *map(int, place), [CROP, CROP], antialias=True)
        sample = functional.horizontal_flip(sample) if flip else sample
        samples.append(functional.normalize(functional.to_dtype(sample, torch.float32, scale=True), MEAN, STD))
    return torch.stack(samples)


class TorchEmpty:
    """An allocator of fresh memory, in pages of the usual size."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialised tensor."""
        return torch.empty(tuple(shape), dtype=dtype)


class OneBuffer:
    """An allocator that always gives the same memory."""

    def __init__(self) -> None:
        self.buffer = Fresh().allocate((N, 3, CROP, CROP), torch.float32)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer."""
        return self.buffer


def contenders() -> dict[str, Callable[[torch.Tensor, Keys], torch.Tensor]]:
    lend = OneBuffer()
    roads: dict[str, Callable[[torch.Tensor, Keys], torch.Tensor]] = {
        "slice and cast": partial(slice_and_cast, allocator=Fresh()),
        "slice and cast, torch.empty": partial(slice_and_cast, allocator=TorchEmpty()),
        "slice and cast, lent buffer": partial(slice_and_cast, allocator=lend),
        "memfeed": AUGMENT.apply,
        "memfeed, torch.empty": partial(memfeed_into, allocator=TorchEmpty()),
        "memfeed, lent buffer": partial(memfeed_into, allocator=lend),
        "memfeed, reference": AUGMENT.reference,
        "tutorial": tutorial,
    }
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return roads
    return {**roads, VISION: torchvision_per_sample}


def check(images: torch.Tensor, keys: Keys) -> None:
    expected = tutorial(images, keys)
    for name, road in contenders().items():
        if not name.startswith("slice"):
            torch.testing.assert_close(road(images, keys), expected, rtol=0, atol=2e-6)


def race_resized(images: torch.Tensor, keys: Keys, rounds: int) -> Seconds:
    """RandomResizedCrop, flip and normalise; empty without torchvision."""
    try:
        expected = resized_by_torchvision(images, keys)
    except ImportError:
        return {}
    # torchvision 0.21, for torch 2.6, resizes uint8 as such only where the CPU is called AVX2; else it rounds floats,
    # which can differ by one grey level
    as_bytes = not torch.__version__.startswith("2.6") or "AVX2" in torch.backends.cpu.get_cpu_capability()
    tolerance = 2e-6 if as_bytes else 1.01 / 255 / min(STD)
    torch.testing.assert_close(RESIZED.apply(images, keys), expected, rtol=0, atol=tolerance)
    roads = {"memfeed": RESIZED.apply, VISION: resized_by_torchvision}
    return in_turns(
        {name: lambda road=road: seconds_of(lambda: road(images, keys)) for name, road in roads.items()}, rounds
    )


def draw(transform: T.Transform) -> float:
    """Seconds to draw for a batch of 256, the keys of whose rows were mixed before: once, for all transforms."""
    keys = Keys(seed=0, epoch=0, rows=torch.arange(256))
    assert len(keys.states) == 256
    shape = torch.Size((256, 3, SIDE, SIDE))

    def of(draws: int, samples: np.ndarray | None = None) -> np.ndarray:
        return uniform(keys if samples is None else keys.part(samples), "stream", draws)

    return seconds_of(lambda: transform.make_params(shape, torch.float32, of))


def measure(images: torch.Tensor, keys: Keys, rounds: int) -> Seconds:
    roads = contenders()
    return in_turns(
        {name: lambda road=road: seconds_of(lambda: road(images, keys)) for name, road in roads.items()}, rounds
    )


def main() -> None:
    made = parser("transforms", __doc__)
    made.add_argument("--rounds", type=int, default=30)
    options = made.parse_args()
    rounds = 2 if options.quick else options.rounds
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (N, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    keys = Keys(seed=0, epoch=0, rows=torch.arange(N))
    check(images, keys)
    seconds = measure(images, keys, rounds)
    median = medians(seconds)
    for name, time_s in median.items():
        print(f"{name:30} {time_s * 1e3:8.2f} ms  {N / time_s:9,.0f} images/s")
    pairs = [
        ("memfeed", "tutorial"),
        ("memfeed", "slice and cast"),
        ("memfeed", "slice and cast, torch.empty"),
        ("memfeed, torch.empty", "slice and cast, torch.empty"),
        ("memfeed, lent buffer", "slice and cast, lent buffer"),
        ("memfeed, lent buffer", "tutorial"),
    ]
    if "torchvision v2 per sample" in median:
        pairs.append(("memfeed", "torchvision v2 per sample"))
    ratios = {f"{one} / {other}": ratio(seconds, other, one) for one, other in pairs}
    for name, times in ratios.items():
        print(f"{name:50} {times:6.2f}")
    resized = race_resized(images, keys, rounds)
    draws = in_turns({name: lambda t=t: draw(t) for name, t in DRAWN.items()}, rounds, 0.005)
    checks = [
        Check("crop, flip, normalise: the tutorial takes", ratios["memfeed / tutorial"], 7, at_least=True),
        Check("crop, flip, normalise: slice and cast takes", ratios["memfeed / slice and cast"], 0.6, at_least=True),
    ]
    if resized:
        times = ratio(resized, VISION, "memfeed")
        checks.append(Check("resized crop, flip, normalise: torchvision v2 takes", times, 1.8, at_least=True))
    for name, time_s in medians(draws).items():
        checks.append(Check(f"to draw 256 of {name}", time_s * 1e6, 20, False, "us"))
    show("transforms", checks)
    write(
        options,
        {"dtype": "uint8", "shape": [N, 3, SIDE, SIDE], "crop": CROP, "rounds": rounds},
        {
            "median_seconds": median,
            "images_per_second": {name: N / time_s for name, time_s in median.items()},
            "throughput_ratios": ratios,
            "resized_median_seconds": medians(resized),
            "draw_seconds": medians(draws),
            "seconds": seconds,
        },
        checks,
    )


if __name__ == "__main__":
    main()
