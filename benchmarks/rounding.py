"""How far resized photographs lie apart: of Pillow, of torch in bytes, of torch in floats, and of memfeed.

The same RandomResizedCrops to 224 of the same pixels. No times are measured.

    python benchmarks/rounding.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from measure import PHOTOS, Check, parser, table, write
from memfeed.random import Keys
from memfeed.splitting.stored_layout import ShortSide
from memfeed.transforms import RandomResizedCrop

SIDE, FULL, SHORT = 224, "full size", "short side of 256"
WAYS = ("torchvision, tensor of bytes", "torchvision, tensor of floats, rounded", "memfeed")


def photos(count: int, shrunk: bool) -> Iterator[Any]:
    """Yield photographs, from the first again after the last; shrunk as ``forms=256`` stores them."""
    files = sorted(PHOTOS.rglob("*.jpg"))
    for number in range(count):
        with Image.open(files[number % len(files)]) as image:
            yield ShortSide(256)(image.convert("RGB")) if shrunk else image.convert("RGB")


def resized(image: Any, row: int, mode: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a crop as each way resizes it, and its values before any rounding, [3, height, width]."""
    pixels, crop = functional.pil_to_tensor(image), RandomResizedCrop(SIDE, interpolation=mode)
    drawn = crop.params([row], shape=pixels.shape)["RandomResizedCrop.0"]
    box = [int(one[0]) for one in (drawn.top, drawn.left, drawn.box_height, drawn.box_width)]

    def by_torchvision(of: Any) -> Any:
        return functional.resized_crop(of, *box, [SIDE, SIDE], InterpolationMode(mode), antialias=True)

    values = (
        by_torchvision(pixels),
        by_torchvision(pixels.float()).clamp(0, 255).round(),
        crop.apply(pixels[None], Keys(0, 0, torch.tensor([row])))[0],
    )
    found = {
        "Pillow": torch.from_numpy(np.array(by_torchvision(image))).permute(2, 0, 1),
        **dict(zip(WAYS, values, strict=True)),
    }
    return found, by_torchvision(pixels.double()).clamp(0, 255)


def distances(mode: str, shrunk: bool, count: int) -> dict[str, dict[str, float]]:
    """Return for each way how far it lies from Pillow and from the exact values, in levels of 8 bits."""
    levels: dict[str, list[torch.Tensor]] = {}
    for row, image in enumerate(photos(count, shrunk)):
        found, exact = resized(image, row, mode)
        for way, values in found.items():
            apart, off = (values.double() - found["Pillow"]).abs(), (values - exact).abs()
            shares = [(apart == 1).double().mean(), (apart == 2).double().mean(), (apart > 2).double().mean()]
            levels.setdefault(way, []).append(torch.stack([*shares, apart.max(), apart.mean(), off.max(), off.mean()]))
    names = ("one_level", "two_levels", "more_levels", "largest", "mean", "largest_from_exact", "mean_from_exact")
    result = {}
    for way, rows in levels.items():
        all_rows = torch.stack(rows)
        means, largest = all_rows.mean(0).tolist(), all_rows.max(0).values.tolist()
        result[way] = {
            name: largest[at] if name.startswith("largest") else means[at] for at, name in enumerate(names)
        } | {"largest_mean": largest[4], "crops_beyond_one_level": float((all_rows[:, 3] > 1).double().mean())}
    return result


def main() -> None:
    options = parser("rounding", __doc__).parse_args()
    count = 4 if options.quick else 1000
    found = {}
    for mode in ("bilinear", "bicubic"):
        for size in (SHORT, FULL):
            here = found[f"{mode}, {size}"] = distances(mode, size == SHORT, count)
            rows = [
                [way, f"{one['one_level']:.2%}", f"{one['two_levels']:.5%}", f"{one['more_levels']:.5%}",
                 f"{one['largest']:.0f}", f"{one['mean']:.3f}", f"{one['largest_mean']:.3f}",
                 f"{one['crops_beyond_one_level']:.1%}", f"{one['largest_from_exact']:.2f}",
                 f"{one['mean_from_exact']:.3f}"]
                for way, one in here.items()
            ]  # fmt: skip
            columns = ["", "1 level", "2", "more", "largest", "mean", "of a crop", "crops > 1", "from exact", "mean"]
            table(f"{count:,} crops to {SIDE}, {mode}, {size}: pixels apart from Pillow", columns, rows)
    ours = [one["memfeed"] for one in found.values()]
    checks = [
        Check("memfeed and Pillow, mean of any crop", max(one["largest_mean"] for one in ours), 0.5, False, "levels"),
        Check("bilinear, largest", max(one["largest"] for one in ours[:2]), 2, False, "levels"),
    ]
    write(options, {"crops": count, "photographs": "hymenoptera_data"}, {"distances": found}, checks)


if __name__ == "__main__":
    main()
