"""Boxes to paint over, one per image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.transforms.params.geometry import Fill, Imagewise


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
        image = image.clone()
        image[:, top : top + height, left : left + width] = self._paint(image, sample, height, width)
        return image

    def _paint(self, image: torch.Tensor, sample: int, height: int, width: int) -> torch.Tensor:
        if self.fill is not None:
            return torch.as_tensor(self.fill, device=image.device).to(image.dtype).reshape(-1, 1, 1)
        generator = torch.Generator().manual_seed(int(self.seeds[sample]))
        return torch.randn(len(image), height, width, generator=generator).to(image.device, image.dtype)
