"""Rotation, translation, scale and shear as one description: an affine map per image."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import grid_sample

from memfeed.transfer.packing import upload
from memfeed.transforms.params.geometry import Fill, Geometry, filled, of_points

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
