"""Transforms that rotate: RandomRotation and RandomAffine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.errors import TransformError
from memfeed.transforms.batch_fields import On
from memfeed.transforms.operation import DrawUniform
from memfeed.transforms.params.geometry import MODES, Fill, Warped
from memfeed.transforms.params.resample import check_mode
from memfeed.transforms.transform import ImageTransform

Range = float | Sequence[float]


class RandomAffine(ImageTransform):
    """Rotate, move, scale and shear, drawn per sample. The images keep their size.

    Args:
        degrees: the angle is drawn from [-degrees, degrees], or from (least, largest); clockwise.
        translate: largest moves across and down, as shares of width and height; None for none.
        scale: least and largest factor; None for 1.
        shear: in degrees, along x from [-shear, shear] or (least, largest), with four numbers along y too.
        interpolation: "nearest" or "bilinear", or torchvision's InterpolationMode.
        fill: value of pixels outside the images, one number or one per channel, in units of the images.
        center: (x, y) in pixels from the upper left corner; None for the middle.
        on: the field, see `Transform`.

    Raises:
        TransformError: ranges that are not in order, shares outside [0, 1], scales that are not positive.
    """

    _shown = ("degrees", "translate", "scale", "shear", "interpolation", "fill")

    def __init__(
        self,
        degrees: Range,
        translate: Sequence[float] | None = None,
        scale: Sequence[float] | None = None,
        shear: Range | None = None,
        interpolation: Any = "nearest",
        fill: Fill = 0,
        center: Sequence[float] | None = None,
        *,
        on: On = None,
    ) -> None:
        super().__init__(on=on)
        self.degrees = _range("degrees", degrees)
        self.translate = None if translate is None else (float(translate[0]), float(translate[1]))
        self.scale = None if scale is None else _range("scale", tuple(scale))
        shears = () if shear is None else (shear,) if isinstance(shear, int | float) else tuple(shear)
        self.shear = (
            _range("shear", shears[0] if len(shears) == 1 else shears[:2]) if shears else (0.0, 0.0),
            _range("shear", shears[2:]) if len(shears) == 4 else (0.0, 0.0),
        )
        self.interpolation, self.fill, self.center = check_mode(interpolation, MODES), fill, center
        if self.translate is not None and not all(0 <= share <= 1 for share in self.translate):
            raise TransformError(f"translate={translate!r}; expected two shares from 0 to 1; e.g. (0.1, 0.1)")
        if self.scale is not None and self.scale[0] <= 0:
            raise TransformError(f"scale={scale!r}; expected positive factors; e.g. (0.9, 1.1)")

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Warped:
        """Draw angle, moves (whole pixels), scale and shears."""
        n, _, h, w = shape
        drawn = uniform(6)
        angle = _between(self.degrees, drawn[:, 0])
        share_x, share_y = self.translate or (0.0, 0.0)
        moves = np.stack(
            [np.rint(_between((-a, a), drawn[:, i])) for i, a in ((1, share_x * w), (2, share_y * h))], 1
        )  # fmt: skip
        scale = np.ones(n) if self.scale is None else _between(self.scale, drawn[:, 3])
        shears = _between(self.shear[0], drawn[:, 4]), _between(self.shear[1], drawn[:, 5])
        matrix = inverse_matrix(angle, moves, scale, shears, _middle(self.center, h, w))
        return Warped(matrix, h, w, self.interpolation, self.fill)


class RandomRotation(ImageTransform):
    """Rotate by an angle drawn per sample. The images keep their size.

    Args:
        degrees: the angle is drawn from [-degrees, degrees], or from (least, largest); counter-clockwise.
        interpolation: "nearest" or "bilinear", or torchvision's InterpolationMode.
        center: (x, y) in pixels from the upper left corner; None for the middle.
        fill: value of pixels outside the images, one number or one per channel, in units of the images.
        on: the field, see `Transform`.

    There is no `expand`, as torchvision has: the images of a batch would differ in size.

    Raises:
        TransformError: degrees that are not in order.
    """

    _shown = ("degrees", "interpolation", "fill")

    def __init__(
        self,
        degrees: Range,
        interpolation: Any = "nearest",
        center: Sequence[float] | None = None,
        fill: Fill = 0,
        *,
        on: On = None,
    ) -> None:
        super().__init__(on=on)
        self.degrees = _range("degrees", degrees)
        self.interpolation, self.fill, self.center = check_mode(interpolation, MODES), fill, center

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Warped:
        """Draw the angle."""
        n, _, h, w = shape
        angle, none = -_between(self.degrees, uniform(1)[:, 0]), np.zeros(n)
        matrix = inverse_matrix(angle, np.zeros((n, 2)), np.ones(n), (none, none), _middle(self.center, h, w))
        return Warped(matrix, h, w, self.interpolation, self.fill)


def inverse_matrix(
    angle: NDArray[np.float64],
    moves: NDArray[np.float64],
    scale: NDArray[np.float64],
    shears: tuple[NDArray[np.float64], NDArray[np.float64]],
    center: tuple[float, float],
) -> NDArray[np.float64]:
    """Return maps from a point in the output to that in the image, float64 [n, 2, 3]; angles in degrees, clockwise.

    The map from image to output shears along x, then along y, scales, rotates about `center` and moves, as in
    torchvision.
    """
    turn, along_x, along_y = np.radians(angle), np.radians(shears[0]), np.radians(shears[1])
    cos, sin, bend = np.cos(turn - along_y) / np.cos(along_y), np.sin(turn - along_y) / np.cos(along_y), np.tan(along_x)
    matrix = np.empty((len(angle), 2, 3))
    matrix[:, 0, 0] = np.cos(turn) - sin * bend
    matrix[:, 0, 1] = np.sin(turn) + cos * bend
    matrix[:, 1, 0] = -sin
    matrix[:, 1, 1] = cos
    matrix[:, :, :2] /= scale[:, None, None]
    x, y = center[0] + moves[:, 0], center[1] + moves[:, 1]
    matrix[:, 0, 2] = center[0] - matrix[:, 0, 0] * x - matrix[:, 0, 1] * y
    matrix[:, 1, 2] = center[1] - matrix[:, 1, 0] * x - matrix[:, 1, 1] * y
    return matrix


def _middle(center: Sequence[float] | None, h: int, w: int) -> tuple[float, float]:
    return (0.0, 0.0) if center is None else (center[0] - w / 2, center[1] - h / 2)


def _between(limits: tuple[float, float], drawn: NDArray[np.float64]) -> NDArray[np.float64]:
    return limits[0] + drawn * (limits[1] - limits[0])


def _range(name: str, given: Range) -> tuple[float, float]:
    if isinstance(given, int | float):
        if not 0 <= given < math.inf:
            raise TransformError(f"{name}={given!r}; expected a number that is not negative, or (least, largest)")
        return -float(given), float(given)
    low, high = (float(value) for value in given) if len(given) == 2 else (math.nan, math.nan)
    if not -math.inf < low <= high < math.inf:
        raise TransformError(f"{name}={given!r}; expected a number, or (least, largest) of two")
    return low, high
