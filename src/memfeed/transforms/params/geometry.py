"""What can be done image by image, and what of that only moves pixels, and takes masks and boxes along."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TypeAlias

import torch

Fill: TypeAlias = "float | Sequence[float]"


class Imagewise(abc.ABC):
    """What is done to each of n images by itself. Its randomness is drawn already."""

    @abc.abstractmethod
    def output_shape(self, shape: torch.Size) -> torch.Size:
        """What images of `shape` [n, c, h, w] become."""

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What images of `dtype` become: of the same, unless a subclass says so."""
        return dtype

    @abc.abstractmethod
    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """One image [c, h, w] of the batch, its number `sample`; may be a view of it. For the CPU."""

    @abc.abstractmethod
    def all(self, image: torch.Tensor) -> torch.Tensor:
        """All images [n, c, h, w], on any device, with gradients: the plain form, which `one` is compared with."""


class Geometry(Imagewise):
    """Where the pixels of n images go, whatever their values; it says the same to every field."""

    @abc.abstractmethod
    def nearest(self) -> Geometry:
        """The same for masks, whose values must not be mixed: by nearest neighbour, with 0 outside."""

    @abc.abstractmethod
    def points(self, xy: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Where points [m, 2] of samples [m] go: (x, y), float64, the upper left corner of an image at (0, 0)."""


def filled(fill: Fill, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """A tensor [c, ...] of one number, or one per channel, of the dtype and on the device of `like`."""
    values = torch.as_tensor(fill, device=like.device).to(like.dtype).reshape(-1, *[1] * (len(shape) - 1))
    return values.expand(*shape).clone()
