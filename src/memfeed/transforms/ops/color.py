"""Random changes of values: ColorJitter and RandomGrayscale, and RandomErasing, which paints over a box."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.errors import TransformError
from memfeed.transforms.batch_fields import On
from memfeed.transforms.operation import DrawUniform
from memfeed.transforms.ops.resize import TRIES
from memfeed.transforms.params.geometry import Fill
from memfeed.transforms.params.value_changes import Erased, Gray, Jitter
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


class RandomErasing(ImageTransform):
    """Paint over a random box with probability `p`, drawn per sample (Zhong et al., arXiv:1708.04896).

    Args:
        p: from 0 (never) to 1 (always).
        scale: least and largest share of the area of the image.
        ratio: least and largest height / width.
        value: to paint: one number, one per channel, or "random" for normal noise, drawn for each pixel, which needs
            float images. In units of the images at that step: after Normalize, 0 is the mean.
        on: the field, see `Transform`.

    Raises:
        TransformError: p is not a probability; scales or ratios that are not in order; later, integer images with
            value="random".
    """

    def __init__(
        self,
        p: float = 0.5,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: Fill | str = 0,
        *,
        on: On = None,
    ) -> None:
        super().__init__(on=on)
        self.p = check_probability(p)
        self.scale, self.ratio = (float(scale[0]), float(scale[1])), (float(ratio[0]), float(ratio[1]))
        self.value = value
        if not 0 <= self.scale[0] <= self.scale[1] <= 1:
            raise TransformError(f"scale={scale!r}; expected two shares from 0 to 1, the smaller one first")
        if not 0 < self.ratio[0] <= self.ratio[1] < math.inf:
            raise TransformError(f"ratio={ratio!r}; expected two positive numbers, the smaller one first")
        if isinstance(value, str) and value != "random":
            raise TransformError(f'value={value!r}; expected a number, one per channel, or "random"')

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Erased:
        """Draw the samples to change, then area, ratio and position. Draw a too large box again, up to ten times."""
        _, _, h, w = shape
        is_noise = isinstance(self.value, str)
        if is_noise and not dtype.is_floating_point:
            raise TransformError(f'images are {dtype}; expected floats for value="random"; put ToDtype before it')
        drawn = uniform(6)
        seeds = (drawn[:, 3] * 2**53).astype(np.int64)
        chosen = drawn[:, 0] < self.p
        box, fits = self._boxes(h, w, drawn[:, 4:])
        (again,) = np.nonzero(chosen & ~fits)
        box[~chosen] = 0
        if len(again):
            boxes, fits = self._boxes(h, w, uniform(4 + 2 * TRIES, again)[:, 6:].reshape(-1, TRIES - 1, 2))
            box[again] = np.where(np.any(fits, axis=1)[:, None], boxes[np.arange(len(again)), fits.argmax(1)], 0)
        corner = (drawn[:, 1:3] * ((h, w) - box + 1)).astype(np.int64)
        return Erased(
            corner[:, 0], corner[:, 1], box[:, 0], box[:, 1], None if is_noise else self.value, seeds  # type: ignore[arg-type]
        )  # fmt: skip

    def _boxes(self, h: int, w: int, drawn: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return height and width for a drawn area and ratio, int64 [..., 2], and True for each box that fits."""
        area = (h * w) * (self.scale[0] + drawn[..., 0] * (self.scale[1] - self.scale[0]))
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        ratio = np.exp(low + drawn[..., 1] * (high - low))
        boxes = np.rint(np.sqrt(np.stack([area * ratio, area / ratio], -1))).astype(np.int64)
        return boxes, np.all(boxes < (h, w), axis=-1)

    def extra_repr(self) -> str:
        """Return the parameters, for repr."""
        return f"p={self.p}, scale={self.scale}, ratio={self.ratio}, value={self.value!r}"


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
