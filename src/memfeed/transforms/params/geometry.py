"""Changes that treat each image by itself, and those among them that only move pixels.

Rotation, translation, scale and shear are one description: an affine map per image.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import grid_sample

from memfeed.errors import TransformError
from memfeed.transfer.packing import upload

Fill: TypeAlias = "float | Sequence[float]"


class Imagewise(abc.ABC):
    """A change of n images, each by itself, whose random numbers are drawn already."""

    def output_shape(self, shape: torch.Size) -> torch.Size:
        """Return the shape [n, c, height, width] that images of `shape` [n, c, h, w] get. By default the same."""
        return shape

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that images of `dtype` get. By default the same."""
        return dtype

    @abc.abstractmethod
    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """Change one image [c, h, w], at index `sample` of the batch. The result may be a view of it."""

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """Change all images [n, c, h, w], on any device, with gradients: the plain form, which tests compare with."""
        if not len(image):
            return image.new_empty(self.output_shape(image.shape), dtype=self.output_dtype(image.dtype))
        return torch.stack([self.one(one, sample) for sample, one in enumerate(image)])


class Geometry(Imagewise):
    """A change that moves pixels, whatever their values. Other fields of the batch can follow it."""

    @abc.abstractmethod
    def nearest(self) -> Geometry:
        """Return this change for masks: by nearest neighbour, because values must not be mixed, with 0 outside."""

    @abc.abstractmethod
    def points(self, xy: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Map points `xy` of the images `sample` to where this change moves them.

        Args:
            xy: (x, y) in pixels, float64 [m, 2], on any device; (0, 0) is the upper left corner of an image.
            sample: the index in the batch of each point's image, int64 [m], on that device.
        """


def filled(fill: Fill, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return a tensor [c, ...] of one number, or one per channel, with the dtype and device of `like`.

    Raises TransformError for another number of values: some images of a field may have other channels than its first.
    """
    given = torch.as_tensor(fill, device="cpu")
    if given.numel() not in (1, shape[0]):
        raise TransformError(
            f"found fill={fill!r} for an image with {shape[0]} channels; expected one number, or one per channel"
        )
    values = upload(given, like.device).to(like.dtype).reshape(-1, *[1] * (len(shape) - 1))
    return values.expand(*shape).clone()


def take_lines(image: torch.Tensor, *lines: NDArray[np.int64], fill: Fill = 0) -> torch.Tensor:
    """Pick lines [n, size] along each spatial dim of images [n, c, h, w] or volumes [n, c, d, h, w], on any device.

    Pixels of lines that an image does not have are `fill`.
    """
    channels, *sizes = image.shape[1:]
    is_there = [(picked >= 0) & (picked < size) for picked, size in zip(lines, sizes, strict=True)]
    inside = [picked.clip(0, size - 1) for picked, size in zip(lines, sizes, strict=True)]
    index = upload(torch.from_numpy(np.concatenate(inside, 1)), image.device)
    for dim, picked in enumerate(torch.split(index, [one.shape[1] for one in lines], 1), 2):
        ones = [1] * image.ndim
        ones[0], ones[dim] = picked.shape
        shape = [*image.shape]
        shape[dim] = picked.shape[1]
        image = image.gather(dim, picked.view(ones).expand(shape))
    if all(one.all() for one in is_there):
        return image
    shown = np.ones((len(image), *[1] * len(sizes)), np.bool_)
    for dim, one in enumerate(is_there):
        shown = shown & np.expand_dims(one, [1 + other for other in range(len(sizes)) if other != dim])
    is_shown = upload(torch.from_numpy(shown)[:, None], image.device)
    return torch.where(is_shown, image, filled(fill, (channels, *[1] * len(sizes)), image))


def of_points(sample: torch.Tensor, *values: NDArray[Any]) -> torch.Tensor:
    """Return numbers [n] of each image for the points that belong to `sample`, float64 [number of values, m]."""
    return upload(torch.from_numpy(np.stack([one.astype(np.float64) for one in values])), sample.device)[:, sample]


def line_indices(first: NDArray[np.int64], size: int, mirrored: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the lines of every window along one dim, int64 [n, size]."""
    offsets = np.arange(size)
    indices: NDArray[np.int64] = first[:, None] + np.where(mirrored[:, None], offsets[::-1], offsets)
    return indices


MODES = ("nearest", "bilinear")


@dataclass(frozen=True, eq=False)
class Warped(Geometry):
    """An affine map of each of n images, which keep their size.

    Args:
        matrix: float64 [n, 2, 3]; maps (x, y, 1) of an output pixel to the point of the image that it shows, both in
            pixels from the middle.
        height: pixel rows of the images.
        width: pixel columns of the images.
        mode: "nearest" or "bilinear".
        fill: value of pixels outside the images, one number or one per channel.
    """

    matrix: NDArray[np.float64]
    height: int
    width: int
    mode: str = "nearest"
    fill: Fill = 0

    def then(self, after: Warped) -> Warped | None:
        """Join this map and `after` into one, which samples once. Return None if they sample in different ways."""
        if (self.mode, self.fill) != (after.mode, after.fill):
            return None
        linear = self.matrix[:, :, :2]
        matrix = linear @ after.matrix
        matrix[:, :, 2] += self.matrix[:, :, 2]
        return replace(self, matrix=matrix)

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """Sample one image [c, h, w]."""
        return self._sample(image[None], self.matrix[sample : sample + 1])[0]

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """Sample all images [n, c, h, w], on any device."""
        return self._sample(image, self.matrix)

    def nearest(self) -> Warped:
        """Return this map for masks: by nearest neighbour, with 0 outside."""
        return replace(self, mode="nearest", fill=0)

    def points(self, xy: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Map points; see `Geometry`."""
        # inverted here: to solve on a device, the CPU waits for it
        inverse, moves = np.linalg.inv(self.matrix[:, :, :2]), self.matrix[:, :, 2]
        values = of_points(sample, *inverse.reshape(-1, 4).T, *moves.T)
        x, y = xy[:, 0] - self.width / 2 - values[4], xy[:, 1] - self.height / 2 - values[5]
        shown_x, shown_y = values[0] * x + values[1] * y, values[2] * x + values[3] * y
        return torch.stack([shown_x + self.width / 2, shown_y + self.height / 2], 1)

    def _sample(self, image: torch.Tensor, matrix: NDArray[np.float64]) -> torch.Tensor:
        n, c, h, w = image.shape
        if not image.numel():
            return image.clone()
        dtype = image.dtype if image.dtype in (torch.float32, torch.float64) else torch.float32
        device = image.device
        x = torch.arange(w, dtype=dtype, device=device) - (w - 1) / 2
        y = torch.arange(h, dtype=dtype, device=device) - (h - 1) / 2
        m = upload(torch.from_numpy(matrix).to(dtype), device)[:, :, :, None, None]
        points = m[:, :, 0] * x + m[:, :, 1] * y[:, None] + m[:, :, 2]  # [n, 2, h, w]: x, y
        if self.mode == "nearest":  # by index, so that values of any dtype stay exact
            column, row = ((points[:, i] + (size - 1) / 2).round().long() for i, size in ((0, w), (1, h)))
            is_inside = (column >= 0) & (column < w) & (row >= 0) & (row < h)
            index = (row.clamp(0, h - 1) * w + column.clamp(0, w - 1)).view(n, 1, h * w).expand(n, c, h * w)
            picked = image.reshape(n, c, h * w).gather(2, index).view(n, c, h, w)
            return torch.where(is_inside[:, None], picked, filled(self.fill, (c, 1, 1), image))
        grid = torch.stack([points[:, 0] * (2 / w), points[:, 1] * (2 / h)], 3)
        source = image.to(dtype)
        if np.any(self.fill):
            source = torch.cat([source, source.new_ones(n, 1, h, w)], 1)
        sampled = grid_sample(source, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        if np.any(self.fill):
            sampled, share = sampled[:, :c], sampled[:, c:]
            sampled = sampled + (1 - share) * filled(self.fill, (c, 1, 1), sampled)
        return (sampled if image.dtype.is_floating_point else sampled.round()).to(image.dtype)
