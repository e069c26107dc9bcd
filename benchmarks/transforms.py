"""Augmentation of uint8 [64, 3, 256, 256] to float32 [64, 3, 224, 224] on the CPU: who takes how long.

Crop, flip and normalise, with a fixed and with a resized crop; the resized crop alone, on one thread and on two; epochs
of a loader; and what it takes to draw the parameters of 256 images. Where numba is installed, memfeed runs compiled
loops; then the same without it is measured too.

Every contender is shown to give the same images before it is timed. Rounds visit the contenders in turn, so that all of
them meet the same disturbances; the figures are medians, the ratios come from one run.

    python benchmarks/transforms.py
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

import memfeed
import memfeed.transforms as T
from measure import Check, Seconds, in_turns, medians, parser, ratio, seconds_of, show, write
from memfeed import Loader
from memfeed.random import Keys, uniform
from memfeed.system.buffers import Allocator, Fresh, Pool
from memfeed.system.compiled import Loops
from memfeed.system.share import Threads
from memfeed.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip, RandomResizedCrop
from memfeed.transforms.backends import compiled_passes

N, SIDE, CROP = 64, 256, 224
EPOCH = 1024  # images of an epoch
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


IS_COMPILED = compiled_passes.LOOPS.wait() is not None
WITHOUT = "without numba"


def without_numba(road: Callable[..., object]) -> Callable[..., object]:
    """Return a function that runs torch's way, where compiled loops would run."""
    never = Loops("", after=sys.maxsize)

    def run(*arguments: object) -> object:
        before, compiled_passes.LOOPS = compiled_passes.LOOPS, never
        try:
            return road(*arguments)
        finally:
            compiled_passes.LOOPS = before

    return run


def both_ways(roads: dict[str, Callable[..., object]], *names: str) -> dict[str, Callable[..., object]]:
    """Return the roads, and those of these names without numba too, where it is installed."""
    more = {f"{name}, {WITHOUT}": without_numba(roads[name]) for name in names if IS_COMPILED}
    return roads | more


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


def contenders() -> dict[str, Callable[..., object]]:
    lend = OneBuffer()
    roads: dict[str, Callable[..., object]] = {
        "slice and cast": partial(slice_and_cast, allocator=Fresh()),
        "slice and cast, torch.empty": partial(slice_and_cast, allocator=TorchEmpty()),
        "slice and cast, lent buffer": partial(slice_and_cast, allocator=lend),
        "memfeed": AUGMENT.apply,
        "memfeed, torch.empty": partial(memfeed_into, allocator=TorchEmpty()),
        "memfeed, lent buffer": partial(memfeed_into, allocator=lend),
        "memfeed, reference": AUGMENT.reference,
        "tutorial": tutorial,
    }
    roads = both_ways(roads, "memfeed", "memfeed, lent buffer")
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
    roads = both_ways({"memfeed": RESIZED.apply, VISION: resized_by_torchvision}, "memfeed")
    return in_turns(
        {name: lambda road=road: seconds_of(lambda: road(images, keys)) for name, road in roads.items()}, rounds
    )


def race_alone(images: torch.Tensor, keys: Keys, rounds: int) -> Seconds:
    """RandomResizedCrop of uint8 alone: on one thread and on two, and torch's kernel in a bare loop.

    The kernel gets each crop with its channels together and writes into memory used before: the least that any road
    through torch takes.
    """
    crop = RandomResizedCrop(CROP)
    made = crop.params(keys.rows, shape=images.shape[1:], dtype=images.dtype)["RandomResizedCrop.0"]
    boxes = list(zip(images, made.top, made.left, made.box_height, made.box_width, strict=True))
    crops = [
        image[None, :, top : top + h, left : left + w].contiguous(memory_format=torch.channels_last)
        for image, top, left, h, w in boxes
    ]
    output = torch.empty(N, 3, CROP, CROP, dtype=torch.uint8, memory_format=torch.channels_last)
    lend = Pool()

    def bare_kernel() -> torch.Tensor:
        for one, target in zip(crops, output, strict=True):
            torch.ops.aten._upsample_bilinear2d_aa.out(one, [CROP, CROP], False, out=target[None])
        return output

    def by_torchvision() -> torch.Tensor:
        from torchvision.transforms.v2 import functional

        return torch.stack(
            [functional.resized_crop(i, *map(int, box), [CROP, CROP], antialias=True) for i, *box in boxes]
        )

    def on_threads(count: int, memory_format: torch.memory_format) -> torch.Tensor:
        with Threads(count).in_use():
            return Compose([crop], memory_format=memory_format).apply(images, keys, allocator=lend)

    planes, together = torch.contiguous_format, torch.channels_last
    roads: dict[str, Callable[..., object]] = {
        "torch's kernel, bare loop": bare_kernel,
        "memfeed, 1 thread": partial(on_threads, 1, planes),
        "memfeed, 2 threads": partial(on_threads, 2, planes),
        "memfeed, 1 thread, channels last": partial(on_threads, 1, together),
        "memfeed, 2 threads, channels last": partial(on_threads, 2, together),
    }
    roads = both_ways(roads, "memfeed, 1 thread", "memfeed, 2 threads")
    try:
        import torchvision  # noqa: F401

        roads[VISION] = by_torchvision
    except ImportError:
        pass
    as_bytes = not torch.__version__.startswith("2.6") or "AVX2" in torch.backends.cpu.get_cpu_capability()
    for name, road in roads.items():
        if as_bytes:
            assert torch.equal(road(), bare_kernel()), name
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # of the roads that are not ours
    try:
        return in_turns({name: lambda road=road: seconds_of(road) for name, road in roads.items()}, rounds)
    finally:
        torch.set_num_threads(before)


def race_epochs(rounds: int) -> Seconds:
    """Warm shuffled epochs of a loader over EPOCH images, and torchvision v2 on the same batches of plain ones."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (EPOCH, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        store = memfeed.cache({"image": images}, Path(folder) / "images.mf", progress=False)
        loaders = {
            "Loader": Loader(store, N, shuffle=True, seed=0),
            "Loader, crop": Loader(store, N, shuffle=True, seed=0, transform=AUGMENT),
            "Loader, resized crop": Loader(store, N, shuffle=True, seed=0, transform=RESIZED),
        }
        if IS_COMPILED:  # of their own, because a loader begins the next epoch ahead
            for name, transform in (("crop", AUGMENT), ("resized crop", RESIZED)):
                loaders[f"Loader, {name}, {WITHOUT}"] = Loader(store, N, shuffle=True, seed=0, transform=transform)

        def epoch(loader: Loader) -> None:
            for _ in loader:
                pass

        roads: dict[str, Callable[..., object]] = {
            name: without_numba(partial(epoch, loader)) if name.endswith(WITHOUT) else partial(epoch, loader)
            for name, loader in loaders.items()
        }
        try:
            import torchvision  # noqa: F401

            def by_torchvision() -> None:
                for at, batch in enumerate(loaders["Loader"]):
                    resized_by_torchvision(
                        batch["image"], Keys(0, 0, torch.arange(at * N, at * N + len(batch["image"])))
                    )

            roads["Loader, resized by torchvision v2"] = by_torchvision
        except ImportError:
            pass
        for road in roads.values():
            road()  # the plan is made, threads are counted
        return in_turns({name: lambda road=road: seconds_of(road) for name, road in roads.items()}, rounds)


def draw(transform: T.Transform) -> float:
    """Seconds to draw for a batch of 256, the keys of whose rows were mixed before: once, for all transforms."""
    keys = Keys(seed=0, epoch=0, rows=torch.arange(256))
    assert len(keys.states) == 256
    shape = torch.Size((256, 3, SIDE, SIDE))

    def of(draws: int, samples: np.ndarray | None = None) -> np.ndarray:
        return uniform(keys, "stream", draws, samples)

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
    alone, epochs = race_alone(images, keys, rounds), race_epochs(min(rounds, 8))
    rates = {name: N / time_s for name, time_s in medians(alone).items()}
    rates |= {name: EPOCH / time_s for name, time_s in medians(epochs).items()}
    for name, rate in rates.items():
        print(f"{name:36} {rate:9,.0f} images/s")
    draws = in_turns({name: lambda t=t: draw(t) for name, t in DRAWN.items()}, rounds, 0.005)
    checks = [
        Check("crop, flip, normalise: the tutorial takes", ratios["memfeed / tutorial"], 7, at_least=True),
        Check("crop, flip, normalise: slice and cast takes", ratios["memfeed / slice and cast"], 0.6, at_least=True),
    ]
    if resized:
        times = ratio(resized, VISION, "memfeed")
        checks.append(Check("resized crop, flip, normalise: torchvision v2 takes", times, 1.8, at_least=True))
    bare = "torch's kernel, bare loop"
    for name, least, share in (("1 thread", 10_000, 0.78), ("2 threads", 17_000, 1.32)):
        checks.append(Check(f"resized crop of bytes, {name}", rates[f"memfeed, {name}"], least, True, "images/s"))
        times = ratio(alone, bare, f"memfeed, {name}")
        checks.append(Check(f"resized crop of bytes, {name}: torch's bare kernel takes", times, share, at_least=True))
    for name, least in {"crop": 16_000, "resized crop": 10_000}.items():
        checks.append(Check(f"Loader: {name}, flip, normalise", rates[f"Loader, {name}"], least, True, "images/s"))
    if resized:
        times = ratio(epochs, "Loader, resized by torchvision v2", "Loader, resized crop")
        checks.append(Check("Loader: resized crop, flip, normalise: torchvision v2 takes", times, 5, at_least=True))
    if IS_COMPILED:
        for what, seconds_, name in (
            ("resized crop of bytes, 1 thread", alone, "memfeed, 1 thread"),
            ("Loader: crop, flip, normalise", epochs, "Loader, crop"),
            ("Loader: resized crop, flip, normalise", epochs, "Loader, resized crop"),
        ):
            times = ratio(seconds_, f"{name}, {WITHOUT}", name)
            checks.append(Check(f"{what}: {WITHOUT} it takes", times, 1.3, at_least=True))
    for name, time_s in medians(draws).items():
        checks.append(Check(f"to draw 256 of {name}", time_s * 1e6, 20, False, "us"))
    show("transforms", checks)
    write(
        options,
        {"dtype": "uint8", "shape": [N, 3, SIDE, SIDE], "crop": CROP, "rounds": rounds, "compiled": IS_COMPILED},
        {
            "median_seconds": median,
            "images_per_second": {name: N / time_s for name, time_s in median.items()},
            "throughput_ratios": ratios,
            "resized_median_seconds": medians(resized),
            "alone_median_seconds": medians(alone),
            "epoch_images": EPOCH,
            "epoch_median_seconds": medians(epochs),
            "draw_seconds": medians(draws),
            "seconds": seconds,
        },
        checks,
    )


if __name__ == "__main__":
    main()
