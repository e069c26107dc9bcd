"""Transforms that resize: Resize and RandomResizedCrop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.errors import TransformError
from memfeed.transforms.batch_fields import On
from memfeed.transforms.operation import DrawFromStream, DrawUniform, StreamDraws
from memfeed.transforms.ops.crop import check_size
from memfeed.transforms.params.resample import Resampled, check_mode
from memfeed.transforms.params.sizes import Sizes
from memfeed.transforms.transform import ImageTransform

MOST_PIXELS = 1 << 30  # of one image
TRIES = 10  # of boxes per image, as in torchvision


class Resize(ImageTransform):
    """Resize the images. Images of several sizes, in a list, become one batch with (height, width), else a list again.

    Args:
        size: (height, width) in pixels, or one int for the shorter side, the other keeping the proportions.
        interpolation: "bilinear", "bicubic", "nearest" or "nearest-exact", or torchvision's InterpolationMode.
        max_size: largest longer side in pixels; only with an int as `size`.
        antialias: average all pixels that shrink to one; for bilinear and bicubic.
        on: the field, see `Transform`.

    Raises:
        TransformError: sizes that are not positive, an unknown interpolation, `max_size` with two sizes or not larger
            than `size`.
    """

    _shown = ("size", "interpolation", "antialias")

    def __init__(
        self,
        size: int | Sequence[int],
        interpolation: Any = "bilinear",
        max_size: int | None = None,
        antialias: bool = True,
        *,
        on: On = None,
    ) -> None:
        super().__init__(on=on)
        self.size = check_size(size)[: 1 if isinstance(size, int) or len(size) == 1 else 2]
        self.makes_one_size = len(self.size) == 2
        self.interpolation, self.antialias, self.max_size = check_mode(interpolation), antialias, max_size
        if max_size is not None and (len(self.size) == 2 or max_size <= self.size[0]):
            raise TransformError(
                f"max_size={max_size} with size={size!r}; expected it with one int, and larger than that"
            )

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Resampled:
        """Draw nothing."""
        n, _, h, w = shape
        _require_pixels(h, w)
        if len(self.size) == 2:
            height, width = self.size
        else:
            short, long = self.size[0], int(self.size[0] * max(h, w) / min(h, w))
            if self.max_size is not None and long > self.max_size:
                short, long = int(self.max_size * short / long), self.max_size
            height, width = (short, long) if h <= w else (long, short)
            if height * width > MOST_PIXELS:
                raise TransformError(
                    f"images of {h} x {w} pixels become {height:,} x {width:,}; expected at most {MOST_PIXELS:,} "
                    "pixels: give (height, width), or max_size"
                )
        zero = np.zeros(n, np.int64)
        return Resampled(zero, zero, zero + h, zero + w, height, width, self.interpolation, self.antialias)


class RandomResizedCrop(ImageTransform):
    """Cut a box of random area and aspect ratio at a random position, drawn per sample, and resize it.

    Images of several sizes, in a list, become one batch.

    Args:
        size: (height, width) in pixels, or one int for both.
        scale: least and largest share of the area of the image.
        ratio: least and largest width / height.
        interpolation: "bilinear", "bicubic", "nearest" or "nearest-exact", or torchvision's InterpolationMode.
        antialias: average all pixels that shrink to one; for bilinear and bicubic.
        on: the field, see `Transform`.

    Raises:
        TransformError: sizes, scales or ratios that are not positive or not in order, an unknown interpolation.
    """

    _shown = ("size", "scale", "ratio", "interpolation", "antialias")
    makes_one_size = True

    def __init__(
        self,
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: Any = "bilinear",
        antialias: bool = True,
        *,
        on: On = None,
    ) -> None:
        super().__init__(on=on)
        self.size: tuple[int, ...] = check_size(size)
        self.scale, self.ratio = _interval("scale", scale), _interval("ratio", ratio)
        self.interpolation, self.antialias = check_mode(interpolation), antialias

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Resampled:
        """Draw area, ratio and position. Draw area and ratio again, up to ten times, if the box is too large.

        After that take the largest box with an allowed ratio, from the middle, as torchvision does.
        """
        h, w = shape[2:]
        _require_pixels(h, w)
        return self._resampled(np.full((shape[0], 2), (h, w), np.int64), uniform)

    def make_params_by_size(
        self, sizes: Sizes, dtype: torch.dtype, stream: str, uniform: DrawFromStream
    ) -> list[Resampled]:
        """Return what `make_params` returns for each group, computed for all images together."""
        sides = np.empty((len(sizes), 2), np.int64)
        for shape, samples in zip(sizes.shapes, sizes.samples, strict=True):
            h, w = shape[2:]
            _require_pixels(h, w)
            sides[samples] = h, w
        made = self._resampled(sides, StreamDraws(stream, uniform))
        return [made.of(samples) for samples in sizes.samples]

    def _resampled(self, sides: NDArray[np.int64], uniform: DrawUniform) -> Resampled:
        """Return the boxes of images with these heights and widths, int64 [n, 2]."""
        drawn = uniform(4)
        box, fits = self._boxes(sides, drawn[:, 2:])
        (too_large,) = np.nonzero(~fits)
        middle = too_large[:0]
        if len(too_large):
            tries = uniform(2 + 2 * TRIES, too_large)[:, 4:].reshape(-1, TRIES - 1, 2)
            boxes, fits = self._boxes(sides[too_large, None], tries)
            first = boxes[np.arange(len(too_large)), fits.argmax(1)]
            is_found = np.any(fits, axis=1)
            middle = too_large[~is_found]
            box[too_large] = first
            for sample in middle.tolist():
                box[sample] = self._largest(*sides[sample].tolist())
        room = sides - box
        corner = (drawn[:, :2] * (room + 1)).astype(np.int64)
        corner[middle] = room[middle] // 2
        height, width = self.size
        return Resampled(
            corner[:, 0], corner[:, 1], box[:, 0], box[:, 1], height, width, self.interpolation, self.antialias
        )

    def _boxes(
        self, sides: NDArray[np.int64], drawn: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return height and width for a drawn area and ratio, int64 [..., 2], and True for each box that fits.

        ``sides`` are the heights and widths of the images, int64 [..., 2].
        """
        area = sides.prod(-1) * (self.scale[0] + drawn[..., 0] * (self.scale[1] - self.scale[0]))
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        root = np.exp((0.5 * low) + drawn[..., 1] * (0.5 * (high - low)))
        side = np.sqrt(area)
        boxes = np.empty((*side.shape, 2), np.int64)
        boxes[..., 0], boxes[..., 1] = np.rint(side / root), np.rint(side * root)
        return boxes, np.all((boxes > 0) & (boxes <= sides), axis=-1)

    def _largest(self, h: int, w: int) -> tuple[int, int]:
        """Return height and width of the largest box with an allowed ratio."""
        if w / h < self.ratio[0]:
            return max(1, min(h, round(w / self.ratio[0]))), w
        if w / h > self.ratio[1]:
            return h, max(1, min(w, round(h * self.ratio[1])))
        return h, w


def _require_pixels(h: int, w: int) -> None:
    if not h or not w:
        raise TransformError(f"images are {h} x {w} pixels (height x width); expected at least one; filter the store")


def _interval(name: str, values: Sequence[float]) -> tuple[float, float]:
    low, high = (float(value) for value in values)
    if not 0 < low <= high < math.inf:
        raise TransformError(f"{name}={tuple(values)}; expected two positive numbers, the smaller one first")
    return low, high
