"""Rotation, translation, scale and shear as one description: an affine map for each image."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import grid_sample

from memfeed.transforms.params.geometry import Fill, Geometry, filled

MODES = ("nearest", "bilinear")


@dataclass(frozen=True, eq=False)
class Warped(Geometry):
    """An affine map of each of n images, which keep their size.

    Args:
        matrix: float64 [n, 2, 3]; gives for (x, y, 1) of an output pixel the place in the image that it shows, both in
            pixels from the middle.
        height: rows of the images.
        width: columns of the images.
        mode: "nearest" or "bilinear".
        fill: what lies outside the images, one number or one per channel.
    """

    matrix: NDArray[np.float64]
    height: int
    width: int
    mode: str = "nearest"
    fill: Fill = 0

    def output_shape(self, shape: torch.Size) -> torch.Size:
        """What images of `shape` [n, c, h, w] become: of the same shape."""
        return shape

    def then(self, after: Warped) -> Warped | None:
        """The one map that does this and then `after`, sampling once; None where they sample in different ways."""
        if (self.mode, self.fill) != (after.mode, after.fill):
            return None
        linear = self.matrix[:, :, :2]
        matrix = linear @ after.matrix
        matrix[:, :, 2] += self.matrix[:, :, 2]
        return replace(self, matrix=matrix)

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """One image [c, h, w]."""
        return self._sample(image[None], self.matrix[sample : sample + 1])[0]

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """All images [n, c, h, w], on any device."""
        return self._sample(image, self.matrix)

    def nearest(self) -> Warped:
        """The same for masks."""
        return replace(self, mode="nearest", fill=0)

    def points(self, xy: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Where points [m, 2] of samples [m] go; see `Geometry`."""
        matrix = torch.from_numpy(self.matrix)
        middle = torch.tensor([self.width / 2, self.height / 2], dtype=torch.float64)
        moved = (xy - middle - matrix[sample, :, 2])[:, :, None]
        shown: torch.Tensor = torch.linalg.solve(matrix[sample, :, :2], moved)[:, :, 0]
        return shown + middle

    def _sample(self, image: torch.Tensor, matrix: NDArray[np.float64]) -> torch.Tensor:
        n, c, h, w = image.shape
        if not image.numel():
            return image.clone()
        dtype = image.dtype if image.dtype in (torch.float32, torch.float64) else torch.float32
        device = image.device
        x = torch.arange(w, dtype=dtype, device=device) - (w - 1) / 2
        y = torch.arange(h, dtype=dtype, device=device) - (h - 1) / 2
        m = torch.from_numpy(matrix).to(device, dtype)[:, :, :, None, None]
        places = m[:, :, 0] * x + m[:, :, 1] * y[:, None] + m[:, :, 2]  # [n, 2, h, w]: x, y
        if self.mode == "nearest":  # by index, so that any dtype keeps its values
            column, row = ((places[:, i] + (most - 1) / 2).round().long() for i, most in ((0, w), (1, h)))
            inside = (column >= 0) & (column < w) & (row >= 0) & (row < h)
            index = (row.clamp(0, h - 1) * w + column.clamp(0, w - 1)).view(n, 1, h * w).expand(n, c, h * w)
            picked = image.reshape(n, c, h * w).gather(2, index).view(n, c, h, w)
            return torch.where(inside[:, None], picked, filled(self.fill, (c, 1, 1), image))
        grid = torch.stack([places[:, 0] * (2 / w), places[:, 1] * (2 / h)], 3)
        source = image.to(dtype)
        if np.any(self.fill):
            source = torch.cat([source, source.new_ones(n, 1, h, w)], 1)
        made = grid_sample(source, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        if np.any(self.fill):
            made, share = made[:, :c], made[:, c:]
            made = made + (1 - share) * filled(self.fill, (c, 1, 1), made)
        return made if image.dtype.is_floating_point and dtype is image.dtype else _cast(made, image.dtype)


def _cast(made: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return made.to(dtype) if dtype.is_floating_point else made.round().to(dtype)
