"""Transforms of colour: ColorJitter and RandomGrayscale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import torch

from memfeed.errors import TransformError
from memfeed.transforms.batch_fields import On
from memfeed.transforms.operation import DrawUniform
from memfeed.transforms.params.value_changes import Gray, Jitter
from memfeed.transforms.transform import ImageTransform, check_probability

Range = float | Sequence[float]
OF_GRAY = ("brightness", "contrast")  # changes that images of one channel can have


class ColorJitter(ImageTransform):
    """Change brightness, contrast, saturation and hue by random factors in random order, drawn per sample.

    Args:
        brightness: the factor is drawn from [max(0, 1 - brightness), 1 + brightness], or from (least, largest).
        contrast: likewise.
        saturation: likewise; images of one channel do not change.
        hue: the shift is drawn from [-hue, hue], or from (least, largest), within [-0.5, 0.5] of the colour circle;
            images of one channel do not change.
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

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Jitter:
        """Draw the order, then the factors. Leave out changes whose factor is always neutral."""
        _check_channels(shape, "ColorJitter")
        drawn = uniform(5)
        factors = {
            name: (low + drawn[:, 1 + index] * (high - low)).astype(np.float32)
            for index, (name, (low, high)) in enumerate(self.ranges.items())
            if not low == high == (0.0 if name == "hue" else 1.0) and (shape[1] == 3 or name in OF_GRAY)
        }
        orders = np.array(list(permutations(range(len(factors)))), np.int64)
        return Jitter(factors, orders[(drawn[:, 0] * len(orders)).astype(np.int64)])

    def extra_repr(self) -> str:
        """Return the ranges, for repr."""
        return ", ".join(f"{name}={value}" for name, value in self.ranges.items())


class RandomGrayscale(ImageTransform):
    """Turn images gray with probability `p`, drawn per sample. They keep their number of channels.

    Args:
        p: from 0 (never) to 1 (always).
        on: the field, see `Transform`.

    Raises:
        TransformError: p is not a probability; later, images of neither 1 nor 3 channels.
    """

    _shown = ("p",)

    def __init__(self, p: float = 0.1, *, on: On = None) -> None:
        super().__init__(on=on)
        self.p = check_probability(p)

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Gray:
        """Draw the samples to turn gray."""
        _check_channels(shape, "RandomGrayscale")
        return Gray(uniform(1)[:, 0] < self.p)


def _check_channels(shape: torch.Size, name: str) -> None:
    if shape[1] not in (1, 3):
        raise TransformError(
            f"images have {shape[1]} channels; expected 1 or 3 for {name}; name another field with on="
        )


def _range(name: str, given: Range, center: float, least: float, largest: float) -> tuple[float, float]:
    """Return (least, largest) of a factor, checked."""
    if isinstance(given, int | float):
        low, high = (max(center - given, least), center + given) if given >= 0 else (math.nan, math.nan)
    else:
        low, high = (float(value) for value in given) if len(given) == 2 else (math.nan, math.nan)
    if not least <= low <= high <= largest or high == math.inf:
        raise TransformError(
            f"{name}={given!r}; expected a number that is not negative, or (least, largest) within [{least}, {largest}]"
        )
    return float(low), float(high)
