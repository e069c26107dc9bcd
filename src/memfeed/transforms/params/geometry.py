"""Changes that treat each image by itself, and those among them that only move pixels."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

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
    """Return a tensor [c, ...] of one number, or one per channel, with the dtype and device of `like`."""
    values = (
        upload(torch.as_tensor(fill, device="cpu"), like.device).to(like.dtype).reshape(-1, *[1] * (len(shape) - 1))
    )
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
