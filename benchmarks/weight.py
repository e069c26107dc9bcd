"""Transforms of uint8 [64, 3, 224, 224] on the CPU: memfeed, and torchvision v2 and kornia called per sample.

Every contender gets the same parameters, drawn before it is timed, and writes its images into one fresh batch. kornia
takes floats only, so its time includes the casts from uint8 and back. "memfeed, whole batch" is the plain form that
tests compare with. The last part compares `Pointwise`, which runs inside the fused pass, with a call of the same
function on the whole batch between two fused passes.

Each contender is compared with memfeed's images before it is timed. Contenders take turns in each round. The results
are medians of all rounds, the median of the ratios within a round, and the range of these ratios. All of it is CPU time
of one thread: it does not depend on what else the machine does.

    python benchmarks/weight.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import kornia
import numpy as np
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

import memfeed.transforms as T
from measure import cpu_seconds, in_turns, medians, parser, ratio, write
from memfeed.random import Keys
from memfeed.system.buffers import Fresh
from memfeed.transforms.backends.passes import fused

SIDE, LARGER = 224, 256
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OURS, PLAIN, VISION, KORNIA = "memfeed", "memfeed, whole batch", "torchvision v2 per sample", "kornia per sample"
FUSED, SEPARATE = "Pointwise in the fused pass", "function of the whole batch"

LAST_ROW = np.array([[[0.0, 0.0, 1.0]]])  # that makes a matrix [2, 3] invertible

Contender = Callable[[], torch.Tensor]
PerSample = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Race:
    """Contenders that give the same images.

    `most` is how far two values may lie apart, in units of the images, in all but a share `differing` of the values.
    """

    contenders: dict[str, Contender]
    most: float
    differing: float = 0.0


def photos(count: int, side: int) -> torch.Tensor:
    """Images uint8 [n, 3, side, side], smooth with some noise, as photographs are."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 8, 8, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic", align_corners=False)
    return ((smooth + 0.02 * torch.randn(smooth.shape, generator=generator)) * 255).clamp(0, 255).to(torch.uint8)


def on_each(function: PerSample, images: torch.Tensor) -> torch.Tensor:
    """Write what `function` makes of each image into one batch, as the fused pass does."""
    output = Fresh().allocate(images.shape, images.dtype)
    for sample, image in enumerate(images):
        output[sample].copy_(function(image, sample))
    return output


def in_floats(function: PerSample) -> PerSample:
    """Call a function of float images [1, 3, h, w] in [0, 1] with uint8 images [3, h, w]."""

    def call(image: torch.Tensor, sample: int) -> torch.Tensor:
        return (function(image[None].float() / 255, sample)[0] * 255).round().clamp(0, 255).to(torch.uint8)

    return call


def race(
    transform: T.Transform,
    vision: Callable[[Any], PerSample],
    kornia_s: Callable[[Any], PerSample],
    count: int,
    most: float,
    differing: float = 0.0,
) -> Race:
    images = photos(count, SIDE)
    params = transform.params(range(count), shape=images.shape[1:], dtype=images.dtype)[f"{type(transform).__name__}.0"]
    contenders: dict[str, Contender] = {
        OURS: lambda: fused(images, [params], None),
        PLAIN: lambda: params.all(images),
        VISION: lambda: on_each(vision(params), images),
        KORNIA: lambda: on_each(in_floats(kornia_s(params)), images),
    }
    return Race(contenders, most, differing)


# --- ColorJitter


def jitter_by_torchvision(params: T.Jitter) -> PerSample:
    names = list(params.factors)
    changes = {name: getattr(functional, f"adjust_{name}") for name in names}

    def change(image: torch.Tensor, sample: int) -> torch.Tensor:
        for index in params.order[sample].tolist():
            image = changes[names[index]](image, float(params.factors[names[index]][sample]))
        return image

    return change


def jitter_by_kornia(params: T.Jitter) -> PerSample:
    enhance, names = kornia.enhance, list(params.factors)
    changes = {
        "brightness": enhance.adjust_brightness_accumulative,
        "contrast": enhance.adjust_contrast_with_mean_subtraction,
        "saturation": enhance.adjust_saturation_with_gray_subtraction,
        "hue": lambda image, share: enhance.adjust_hue(image, share * 2 * np.pi),
    }

    def change(image: torch.Tensor, sample: int) -> torch.Tensor:
        for index in params.order[sample].tolist():
            image = changes[names[index]](image, float(params.factors[names[index]][sample]))
        return image

    return change


# --- RandomErasing


def erase_by_torchvision(params: T.Erased) -> PerSample:
    value = torch.zeros(3, 1, 1, dtype=torch.uint8)

    def change(image: torch.Tensor, sample: int) -> torch.Tensor:
        boxes = params.top, params.left, params.box_height, params.box_width
        top, left, height, width = (int(values[sample]) for values in boxes)
        return functional.erase(image, top, left, height, width, value) if height and width else image

    return change


def erase_by_kornia(params: T.Erased) -> PerSample:
    erase = kornia.augmentation.RandomErasing(p=1.0)

    def change(image: torch.Tensor, sample: int) -> torch.Tensor:
        if not params.box_height[sample] or not params.box_width[sample]:
            return image
        boxes = {"xs": params.left, "ys": params.top, "widths": params.box_width, "heights": params.box_height}
        given = {name: torch.tensor([float(values[sample])]) for name, values in boxes.items()}
        return erase.apply_transform(image, {**given, "values": torch.zeros(1)}, {})

    return change


# --- RandomRotation and RandomAffine


def affine_by_torchvision(params: T.Warped) -> PerSample:
    """Angle, scale and moves are given back to torchvision, which makes a matrix of them."""
    mode = InterpolationMode(params.mode)
    forward = np.linalg.inv(np.concatenate([params.matrix, LAST_ROW.repeat(len(params.matrix), 0)], 1))
    scale = np.sqrt(np.linalg.det(forward[:, :2, :2]))
    angle = np.degrees(np.arctan2(forward[:, 1, 0], forward[:, 0, 0]))

    def change(image: torch.Tensor, sample: int) -> torch.Tensor:
        moves = [float(value) for value in forward[sample, :2, 2]]
        return functional.affine(image, float(angle[sample]), moves, float(scale[sample]), [0.0, 0.0], mode)

    return change


def rotation_by_torchvision(params: T.Warped) -> PerSample:
    mode = InterpolationMode(params.mode)
    angle = np.degrees(np.arctan2(params.matrix[:, 1, 0], params.matrix[:, 0, 0]))

    def change(image: torch.Tensor, sample: int) -> torch.Tensor:
        return functional.rotate(image, float(angle[sample]), mode)

    return change


def affine_by_kornia(params: T.Warped) -> PerSample:
    """kornia takes matrices in pixels from the middle of the first pixel."""
    middle = np.array([[[1, 0, (SIDE - 1) / 2], [0, 1, (SIDE - 1) / 2], [0, 0, 1]]])
    inverse = np.concatenate([params.matrix, LAST_ROW.repeat(len(params.matrix), 0)], 1)
    matrices = torch.from_numpy((middle @ np.linalg.inv(inverse) @ np.linalg.inv(middle))[:, :2]).float()

    def change(image: torch.Tensor, sample: int) -> torch.Tensor:
        matrix = matrices[sample : sample + 1]
        return kornia.geometry.transform.warp_affine(image, matrix, (SIDE, SIDE), params.mode, align_corners=True)

    return change


def races(count: int) -> dict[str, Race]:
    """One race per transform and way of sampling."""
    jitter = partial(race, vision=jitter_by_torchvision, kornia_s=jitter_by_kornia, count=count)
    found = {
        "ColorJitter": jitter(T.ColorJitter(0.4, 0.4, 0.4, 0.1), most=8, differing=0.01),
        "ColorJitter without hue": jitter(T.ColorJitter(0.4, 0.4, 0.4), most=4, differing=0.001),
        "RandomErasing": race(T.RandomErasing(), erase_by_torchvision, erase_by_kornia, count, most=0),
    }
    for mode in ("nearest", "bilinear"):  # a place between two pixels may round to either
        limits = {"count": count, "most": 1, "differing": 0.02}
        rotation = T.RandomRotation(30, mode)
        affine = T.RandomAffine(30, (0.1, 0.1), (0.9, 1.1), interpolation=mode)
        found[f"RandomRotation, {mode}"] = race(rotation, rotation_by_torchvision, affine_by_kornia, **limits)
        found[f"RandomAffine, {mode}"] = race(affine, affine_by_torchvision, affine_by_kornia, **limits)
    return {**found, **pointwise_races(count)}


# --- Pointwise


class WholeBatch(T.Transform):
    """Call a function on the whole batch, which ends one fused pass and begins another."""

    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: Any) -> None:
        """Draw nothing."""

    def transform(self, image: torch.Tensor, params: None) -> torch.Tensor:
        """Call the function."""
        return self.fn(image)


def gamma(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(0, 1) ** 2.2


def invert(x: torch.Tensor) -> torch.Tensor:
    return 255 - x


def seven(x: torch.Tensor) -> torch.Tensor:
    return ((x * 1.2 - 0.1).clamp(0, 1) * 2 - 1).abs().sqrt() + 0.5


def pointwise_races(count: int) -> dict[str, Race]:
    images, keys = photos(count, LARGER), Keys(0, 0, torch.arange(count))
    crop, floats, normalize = T.RandomCrop(SIDE), T.ToDtype(torch.float32, scale=True), T.Normalize(MEAN, STD)

    def recipe(fn: Callable[[torch.Tensor], torch.Tensor], kind: type[T.Transform]) -> Sequence[T.Transform]:
        if fn is invert:  # of integers, before the cast
            return [crop, kind(fn), T.RandomHorizontalFlip(), normalize]
        return [crop, floats, kind(fn), T.RandomHorizontalFlip(), normalize]

    found = {}
    for fn in (gamma, invert, seven):
        contenders: dict[str, Contender] = {}
        for name, kind in ((FUSED, T.Pointwise), (SEPARATE, WholeBatch)):
            contenders[name] = partial(T.Compose(recipe(fn, kind)).apply, images, keys)
        found[f"Pointwise, {fn.__name__}"] = Race(contenders, 1e-5)
    return found


def check(name: str, race: Race) -> None:
    first, *others = race.contenders.items()
    expected = first[1]()
    for other, contender in others:
        apart = (contender().double() - expected.double()).abs() > race.most
        share = float(apart.double().mean())
        if share > race.differing:
            raise AssertionError(
                f"{name}: found {share:.3%} of the values of {other} more than {race.most} from those of {first[0]}; "
                f"expected at most {race.differing:.1%}"
            )


def cpu_seconds_of(contender: Contender) -> float:
    """Return the CPU seconds that one call takes."""
    start = cpu_seconds()
    contender()
    return cpu_seconds() - start


def compare(name: str, race: Race, rounds: int) -> dict[str, Any]:
    """Check that the contenders agree, and race them."""
    check(name, race)
    times = in_turns({who: lambda run=run: cpu_seconds_of(run) for who, run in race.contenders.items()}, rounds)
    ours, *others = race.contenders
    ratios = {other: ratio(times, other, ours) for other in others}
    ranges = {other: sorted(b / a for a, b in zip(times[ours], times[other], strict=True)) for other in others}
    median = medians(times)
    print(f"{name}: {ours} {median[ours] * 1e3:.1f} ms")
    for other, found in ratios.items():
        low, high = ranges[other][0], ranges[other][-1]
        print(f"    {other:28} {median[other] * 1e3:8.1f} ms  {found:6.2f} times ({low:.2f} to {high:.2f})")
    return {
        "median_cpu_seconds": median,
        "ratios_to_ours": ratios,
        "ranges_of_ratios": {other: [found[0], found[-1]] for other, found in ranges.items()},
        "cpu_seconds": times,
    }


def main() -> None:
    made = parser("weight", __doc__)
    made.add_argument("--rounds", type=int, default=7)
    options = made.parse_args()
    count, rounds = (4, 2) if options.quick else (64, options.rounds)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        works = {name: compare(name, race, rounds) for name, race in races(count).items()}
    finally:
        torch.set_num_threads(threads)
    about = {"dtype": "uint8", "shape": [count, 3, SIDE, SIDE], "rounds": rounds, "kornia": kornia.__version__}
    write(options, about, {"works": works}, [])


if __name__ == "__main__":
    main()
