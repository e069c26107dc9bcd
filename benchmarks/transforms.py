"""Crop, flip and normalise of uint8 [64, 3, 256, 256] to float32 [64, 3, 224, 224] on the CPU: who takes how long.

Every contender is shown to give the same images before it is timed. Rounds visit the contenders in turn, so that all of
them meet the same disturbances; the figures are medians, the ratios come from one run.

    python benchmarks/transforms.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from measure import Seconds, in_turns, medians, parser, ratio, seconds_of, write
from memfeed.keyed import Keys, uniform
from memfeed.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip
from memfeed.transforms.memory import empty

N, SIDE, CROP = 64, 256, 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
AUGMENT = Compose([RandomCrop(CROP), RandomHorizontalFlip(), Normalize(MEAN, STD)])


def drawn(keys: Keys) -> tuple[list[int], list[int], list[bool]]:
    corners = (uniform(keys, "RandomCrop.0", 2) * (SIDE - CROP + 1)).astype(np.int64)
    flips = uniform(keys, "RandomHorizontalFlip.0")[:, 0] < 0.5
    return corners[:, 0].tolist(), corners[:, 1].tolist(), flips.tolist()


def slice_and_cast(images: torch.Tensor, keys: Keys, allocate: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The floor: each crop is sliced and cast, neither flipped nor normalised."""
    tops, lefts, _ = drawn(keys)
    output = allocate((N, 3, CROP, CROP), torch.float32)
    for i, (top, left) in enumerate(zip(tops, lefts, strict=True)):
        output[i].copy_(images[i, :, top : top + CROP, left : left + CROP])
    return output


def memfeed_into(images: torch.Tensor, keys: Keys, allocate: Callable[..., torch.Tensor]) -> torch.Tensor:
    return AUGMENT.apply(images, keys, empty=allocate)


def tutorial(images: torch.Tensor, keys: Keys) -> torch.Tensor:
    """As the tensorclass tutorial does it: normalise all pixels, crop with two gathers, flip with two masks."""
    tops, lefts, flips = (torch.tensor(values) for values in drawn(keys))
    mean, std = (255 * torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    images = (images - mean) / std
    rows = (tops[:, None] + torch.arange(CROP))[:, None, :, None].expand(N, 3, CROP, SIDE)
    columns = (lefts[:, None] + torch.arange(CROP))[:, None, None, :].expand(N, 3, CROP, CROP)
    images = images.gather(-2, rows).gather(-1, columns)
    flipped = flips.view(N, 1, 1, 1).expand_as(images)
    return images.masked_fill(flipped, 0.0) + images.masked_fill(~flipped, 0.0).flip(-1)


def torchvision_per_sample(images: torch.Tensor, keys: Keys) -> torch.Tensor:
    from torchvision.transforms.v2 import functional

    samples = []
    for image, top, left, flip in zip(images, *drawn(keys), strict=True):
        sample = functional.crop(image, top, left, CROP, CROP)
        sample = functional.horizontal_flip(sample) if flip else sample
        samples.append(functional.normalize(functional.to_dtype(sample, torch.float32, scale=True), MEAN, STD))
    return torch.stack(samples)


def torch_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def contenders() -> dict[str, Callable[[torch.Tensor, Keys], torch.Tensor]]:
    buffer = empty((N, 3, CROP, CROP), torch.float32)

    def lend(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return buffer

    roads: dict[str, Callable[[torch.Tensor, Keys], torch.Tensor]] = {
        "slice and cast": partial(slice_and_cast, allocate=empty),
        "slice and cast, torch.empty": partial(slice_and_cast, allocate=torch_empty),
        "slice and cast, lent buffer": partial(slice_and_cast, allocate=lend),
        "memfeed": AUGMENT.apply,
        "memfeed, torch.empty": partial(memfeed_into, allocate=torch_empty),
        "memfeed, lent buffer": partial(memfeed_into, allocate=lend),
        "memfeed, reference": AUGMENT.reference,
        "tutorial": tutorial,
    }
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return roads
    return {**roads, "torchvision v2 per sample": torchvision_per_sample}


def check(images: torch.Tensor, keys: Keys) -> None:
    expected = tutorial(images, keys)
    for name, road in contenders().items():
        if not name.startswith("slice"):
            torch.testing.assert_close(road(images, keys), expected, rtol=0, atol=2e-6)


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
    write(
        options,
        {"dtype": "uint8", "shape": [N, 3, SIDE, SIDE], "crop": CROP, "rounds": rounds},
        {
            "median_seconds": median,
            "images_per_second": {name: N / time_s for name, time_s in median.items()},
            "throughput_ratios": ratios,
            "seconds": seconds,
        },
        [],
    )


if __name__ == "__main__":
    main()
