"""Boxes to paint over, one per image."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.random import DRAW_STEP_SIGNED, mix_signed
from memfeed.transfer.packing import upload
from memfeed.transforms.params.geometry import Fill, Imagewise, filled


@dataclass(frozen=True, eq=False)
class Erased(Imagewise):
    """A box in each of n images, painted over.

    Args:
        top: first row of each box, int64 [n], in pixels.
        left: first column, likewise.
        box_height: pixel rows of each box, int64 [n]; 0 if nothing is painted.
        box_width: pixel columns, likewise.
        fill: one number, or one per channel; None for noise.
        seeds: of the noise, int64 [n].
    """

    top: NDArray[np.int64]
    left: NDArray[np.int64]
    box_height: NDArray[np.int64]
    box_width: NDArray[np.int64]
    fill: Fill | None
    seeds: NDArray[np.int64]

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """Paint over the box of one image [c, h, w]. Return the image itself if its box is empty."""
        height, width = int(self.box_height[sample]), int(self.box_width[sample])
        if not height or not width:
            return image
        top, left = int(self.top[sample]), int(self.left[sample])
        painted = image.clone()
        painted[:, top : top + height, left : left + width] = self._paint(image, sample, top, left, height, width)
        return painted

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """Paint over the boxes of all images [n, c, h, w], on any device."""
        _, c, h, w = image.shape
        boxes = np.stack([self.top, self.left, self.top + self.box_height, self.left + self.box_width, self.seeds])
        top, left, bottom, right, seeds = upload(torch.from_numpy(boxes), image.device)[..., None, None, None]
        row = torch.arange(h, device=image.device)[:, None]
        column = torch.arange(w, device=image.device)
        is_inside = (row >= top) & (row < bottom) & (column >= left) & (column < right)
        if self.fill is not None:
            return torch.where(is_inside, filled(self.fill, (c, 1, 1), image), image)
        position = torch.arange(c * h * w, device=image.device).view(c, h, w)
        return torch.where(is_inside, normal(seeds, position).to(image.dtype), image)

    def _paint(self, image: torch.Tensor, sample: int, top: int, left: int, height: int, width: int) -> torch.Tensor:
        if self.fill is not None:
            return filled(self.fill, (len(image), 1, 1), image)
        c, h, w = image.shape
        position = torch.arange(c * h * w, device=image.device).view(c, h, w)
        seeds = torch.tensor(int(self.seeds[sample]), device="cpu")
        return normal(seeds, position[:, top : top + height, left : left + width]).to(image.dtype)


def normal(seeds: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return numbers of the standard normal distribution, float32, each a function of a seed and a position alone.

    The seed plus a step for each position, hashed as in `memfeed.random`, gives two numbers of 24 bits; these give one
    of the normal distribution (Box and Muller, https://doi.org/10.1214/aoms/1177706645). The GPU kernel does the same.

    Args:
        seeds: int64 of any shape.
        position: of the value in its image, int64 of a shape that broadcasts with it.
    """
    bits = mix_signed(position * DRAW_STEP_SIGNED + seeds)
    first, second = (bits >> 40) & 0xFFFFFF, (bits >> 16) & 0xFFFFFF
    radius = ((first + 1).to(torch.float32) * 2.0**-24).log().mul_(-2).sqrt_()
    return (second.to(torch.float32) * (2 * math.pi * 2.0**-24)).cos_().mul_(radius)
