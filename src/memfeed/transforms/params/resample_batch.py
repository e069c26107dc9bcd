"""Boxes of a whole batch, resized to one size in a number of calls that does not depend on the number of images.

Bilinear and bicubic are two matrix products: each image has a matrix of weights for its rows and one for its columns.
Nearest picks rows, then columns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.transfer.packing import upload
from memfeed.transforms.params.geometry import take_lines

RADIUS = {"bilinear": 1, "bicubic": 2}  # of the filter, in pixels of the image
# The coefficient of the bicubic filter. Torch has two: Pillow's with antialiasing, OpenCV's without.
CUBIC_ANTIALIAS, CUBIC = -0.5, -0.75


class Axis(NamedTuple):
    """The rows, or the columns, of boxes that are resized.

    Args:
        first: row or column of each box, int64 [n].
        box: how many rows or columns each box has, int64 [n].
        size: how many come out.
    """

    first: NDArray[np.int64]
    box: NDArray[np.int64]
    size: int

    @property
    def scale(self) -> NDArray[np.float32]:
        """Return how many rows of each box become one, float32 [n], as torch rounds it."""
        return (self.box / self.size).astype(np.float32)

    def nearest(self, mode: str) -> NDArray[np.int64]:
        """Return the rows of the images that the outputs show, int64 [n, size], computed in float32 as in torch."""
        at = np.arange(self.size, dtype=np.float32) + np.float32(0.5 if mode == "nearest-exact" else 0)
        lines = (at * self.scale[:, None]).astype(np.int64)
        rows: NDArray[np.int64] = self.first[:, None] + np.minimum(lines, self.box[:, None] - 1)
        return rows


def resample(image: torch.Tensor, rows: Axis, columns: Axis, mode: str, *, antialias: bool) -> torch.Tensor:
    """Resize boxes of images [n, c, h, w], on any device, with gradients. The CPU does not wait for a device.

    Integers are rounded. float64 is computed in float64, all others in float32 (a GPU uses TF32 if you allow it).
    """
    if mode.startswith("nearest"):
        return take_lines(image, rows.nearest(mode), columns.nearest(mode))
    dtype = torch.float64 if image.dtype is torch.float64 else torch.float32
    boxes = np.stack([rows.first, rows.box, columns.first, columns.box])
    first_row, box_rows, first_column, box_columns = upload(torch.from_numpy(boxes).to(dtype), image.device)
    down = _weights(first_row, box_rows, rows.size, image.shape[2], mode, antialias=antialias)
    across = _weights(first_column, box_columns, columns.size, image.shape[3], mode, antialias=antialias)
    resized = torch.einsum("nih,nchw->nciw", down, image.to(dtype))
    resized = torch.einsum("njw,nciw->ncij", across, resized)
    if not image.dtype.is_floating_point:
        limits = torch.iinfo(image.dtype)
        resized = resized.round().clamp(limits.min, limits.max)
    return resized.to(image.dtype)


def _weights(
    first: torch.Tensor, box: torch.Tensor, size: int, image_size: int, mode: str, *, antialias: bool
) -> torch.Tensor:
    """Return how much of each row of the images is in each row of the outputs, [n, size, image_size]."""
    scale = (box / size)[:, None, None]
    to = torch.arange(size, dtype=first.dtype, device=first.device)[:, None]
    line = torch.arange(image_size, dtype=first.dtype, device=first.device) - first[:, None, None]  # in the box
    center = (to + 0.5) * scale - 0.5
    last = box[:, None, None] - 1
    if antialias:
        distance = (line - center).abs() / scale.clamp(min=1)
        weights = torch.where((line >= 0) & (line <= last), _filter(distance, mode, CUBIC_ANTIALIAS), 0)
        return weights / weights.sum(2, keepdim=True)
    below = center.floor()
    weights = torch.zeros((), dtype=first.dtype, device=first.device)
    for step in range(1 - RADIUS[mode], RADIUS[mode] + 1):
        tap = below + step
        shown = torch.minimum(tap.clamp(min=0), last)  # beyond the edge of the box, the edge again
        weights = weights + torch.where(line == shown, _filter((tap - center).abs(), mode, CUBIC), 0)
    return weights


def _filter(distance: torch.Tensor, mode: str, a: float) -> torch.Tensor:
    """Return the weight of a pixel at this distance, in pixels, from the point that is shown."""
    if mode == "bilinear":
        return (1 - distance).clamp(min=0)
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = a * (((distance - 5) * distance + 8) * distance - 4)
    return torch.where(distance <= 1, near, torch.where(distance < 2, far, 0))
