"""Random changes of colour."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.errors import TransformError
from memfeed.transforms.batch_fields import On
from memfeed.transforms.params.geometry import Imagewise
from memfeed.transforms.planning import Uniform
from memfeed.transforms.transform import ImageTransform, check_probability

Range = float | Sequence[float]
Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Images [k, c, h, w] and a factor for each, [k, 1, 1, 1]."""


@dataclass(frozen=True, eq=False)
class Jitter(Imagewise):
    """Changes of colour of n images, each with a factor and in an order of its own.

    Args:
        factors: by the name of the change ("brightness", "contrast", "saturation", "hue"), float32 [n].
        order: which of them comes first, second, ..., int64 [n, number of changes].
    """

    factors: dict[str, NDArray[np.float32]]
    order: NDArray[np.int64]

    def output_shape(self, shape: torch.Size) -> torch.Size:
        """What images of `shape` become: of the same shape."""
        return shape

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """One image [c, h, w]."""
        batch, changes = image[None], list(self.factors.items())
        for number in self.order[sample].tolist():
            name, factors = changes[number]
            batch = CHANGES[name](batch, torch.from_numpy(factors[sample : sample + 1]).view(1, 1, 1, 1))
        return batch[0]

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """All images [n, c, h, w]: those together whose turn it is with the same change."""
        for turn in self.order.T:
            changed = image.clone()
            for number, (name, factors) in enumerate(self.factors.items()):
                (rows,) = np.nonzero(turn == number)
                if len(rows):
                    at = torch.from_numpy(rows).to(image.device)
                    factor = torch.from_numpy(factors[rows]).to(image.device).view(-1, 1, 1, 1)
                    changed = changed.index_copy(0, at, CHANGES[name](image[at], factor))
            image = changed
        return image


@dataclass(frozen=True, eq=False)
class Gray(Imagewise):
    """Which of n images become gray, bool [n]."""

    chosen: NDArray[np.bool_]

    def output_shape(self, shape: torch.Size) -> torch.Size:
        """What images of `shape` become: of the same shape."""
        return shape

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """One image [c, h, w]."""
        return _like(_gray(image), image).expand_as(image) if self.chosen[sample] else image

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """All images [n, c, h, w]."""
        chosen = torch.from_numpy(self.chosen).to(image.device)[:, None, None, None]
        return torch.where(chosen, _like(_gray(image), image), image)


class ColorJitter(ImageTransform):
    """Change brightness, contrast, saturation and hue by random factors, in random order, drawn per sample.

    Args:
        brightness: the factor is drawn from [max(0, 1 - brightness), 1 + brightness], or from (least, largest).
        contrast: likewise.
        saturation: likewise; images of one channel stay as they are.
        hue: the shift is drawn from [-hue, hue], or from (least, largest), within [-0.5, 0.5] of the colour circle;
            images of one channel stay as they are.
        on: the field, see `Transform`.

    Raises:
        TransformError: factors that are negative or not in order; later, images of neither 1 nor 3 channels.
    """

    def __init__(
        self, brightness: Range = 0, contrast: Range = 0, saturation: Range = 0, hue: Range = 0, *, on: On = None
    ) -> None:
        super().__init__(on=on)
        given = {"brightness": brightness, "contrast": contrast, "saturation": saturation}
        self.ranges = {name: _range(name, value, 1.0, 0.0, math.inf) for name, value in given.items()}
        self.ranges["hue"] = _range("hue", hue, 0.0, -0.5, 0.5)

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: Uniform) -> Jitter:
        """Draw the order, then the factors; those that can only be neutral are left out."""
        _check_channels(shape, "ColorJitter")
        drawn = uniform(5)
        factors = {
            name: (low + drawn[:, 1 + number] * (high - low)).astype(np.float32)
            for number, (name, (low, high)) in enumerate(self.ranges.items())
            if not low == high == (0.0 if name == "hue" else 1.0) and (shape[1] == 3 or name in GRAY_TOO)
        }
        orders = np.array(list(permutations(range(len(factors)))), np.int64)
        return Jitter(factors, orders[(drawn[:, 0] * len(orders)).astype(np.int64)])

    def extra_repr(self) -> str:
        """The ranges, for repr."""
        return ", ".join(f"{name}={value}" for name, value in self.ranges.items())


class RandomGrayscale(ImageTransform):
    """Turn gray with probability `p`, drawn per sample; the number of channels stays.

    Args:
        p: from 0 (never) to 1 (always).
        on: the field, see `Transform`.

    Raises:
        TransformError: p is no probability; later, images of neither 1 nor 3 channels.
    """

    def __init__(self, p: float = 0.1, *, on: On = None) -> None:
        super().__init__(on=on)
        self.p = check_probability(p)

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: Uniform) -> Gray:
        """Draw which samples."""
        _check_channels(shape, "RandomGrayscale")
        return Gray(uniform(1)[:, 0] < self.p)

    def extra_repr(self) -> str:
        """The probability, for repr."""
        return f"p={self.p}"


def _brightness(image: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return _like(image * factor, image)


def _contrast(image: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    gray = _gray(image).mean(dim=(-3, -2, -1), keepdim=True)
    return _like(image * factor + gray * (1 - factor), image)


def _saturation(image: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return _like(image * factor + _gray(image) * (1 - factor), image)


def _hue(image: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """By way of hue, saturation and value (https://en.wikipedia.org/wiki/HSL_and_HSV#HSV_to_RGB_alternative)."""
    largest = 1.0 if image.dtype.is_floating_point else torch.iinfo(image.dtype).max
    rgb = image.to(torch.float32) / largest
    value, least = rgb.amax(-3, keepdim=True), rgb.amin(-3, keepdim=True)
    chroma = value - least
    safe = torch.where(chroma == 0, 1.0, chroma)
    r, g, b = _channels(rgb)
    hue = torch.where(
        value == r, ((g - b) / safe) % 6, torch.where(value == g, (b - r) / safe + 2, (r - g) / safe + 4)
    )  # in sixths of the circle
    steps = torch.tensor([5.0, 3.0, 1.0], device=image.device).view(3, 1, 1)
    k = (steps + hue + 6 * factor) % 6
    turned = value - chroma * torch.minimum(k, 4 - k).clamp(0, 1)
    if image.dtype.is_floating_point:
        return turned.to(image.dtype)
    return (turned * (largest + 1 - 1e-3)).to(image.dtype)  # as torchvision goes back to integers


CHANGES: dict[str, Change] = {
    "brightness": _brightness,
    "contrast": _contrast,
    "saturation": _saturation,
    "hue": _hue,
}
GRAY_TOO = ("brightness", "contrast")


def _channels(image: torch.Tensor) -> list[torch.Tensor]:
    return [image[..., number : number + 1, :, :] for number in range(3)]


def _gray(image: torch.Tensor) -> torch.Tensor:
    """The luma of ITU-R BT.601, [..., 1, h, w], in float; whole numbers for integer images."""
    if image.shape[-3] == 1:
        return image if image.dtype.is_floating_point else image.to(torch.float32)
    r, g, b = _channels(image)
    gray: torch.Tensor = r * 0.2989 + g * 0.587 + b * 0.114
    return gray if image.dtype.is_floating_point else gray.floor()


def _like(made: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """Within the range of the image's dtype, and of that dtype."""
    largest = 1.0 if image.dtype.is_floating_point else torch.iinfo(image.dtype).max
    return made.clamp(0, largest).to(image.dtype)


def _check_channels(shape: torch.Size, name: str) -> None:
    if shape[1] not in (1, 3):
        raise TransformError(
            f"images have {shape[1]} channels; expected 1 or 3 for {name}; name another field with on="
        )


def _range(name: str, given: Range, center: float, least: float, largest: float) -> tuple[float, float]:
    if isinstance(given, int | float):
        low, high = (max(center - given, least), center + given) if given >= 0 else (math.nan, math.nan)
    else:
        low, high = (float(value) for value in given) if len(given) == 2 else (math.nan, math.nan)
    if not least <= low <= high <= largest or high == math.inf:
        raise TransformError(
            f"{name}={given!r}; expected a number that is not negative, or (least, largest) within [{least}, {largest}]"
        )
    return float(low), float(high)
