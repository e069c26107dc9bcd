"""Resizing: a box of each image, scaled to one size.

Boxes of a whole batch are resized in a number of calls that does not depend on the number of images.
Bilinear and bicubic are two matrix products: each image has a matrix of weights for its rows and one for its columns.
Nearest picks rows, then columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from memfeed.errors import TransformError
from memfeed.transfer.packing import upload
from memfeed.transforms.params.geometry import Geometry, of_points, take_lines
from memfeed.transforms.params.pixels import borrow, box_pixels

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


MODES = ("nearest", "nearest-exact", "bilinear", "bicubic")
FEW = 12  # images: resized one by one they take no more calls on a device than as a batch; a list has many sizes
_TORCH_DTYPES = {torch.uint8, torch.float32, torch.float64}  # not 16-bit floats: no antialiasing on the CPU
# what `interpolate` calls, which takes no `out`; torch.ops.aten calls the same, and takes 4 us longer
_PIXEL_KERNELS: dict[str, Any] = {
    "bilinear": torch._C._nn._upsample_bilinear2d_aa,
    "bicubic": torch._C._nn._upsample_bicubic2d_aa,
}


@dataclass(frozen=True, eq=False)
class Resampled(Geometry):
    """A box of each of n images, resized to one size.

    Args:
        top: first row of each box, int64 [n], in pixels.
        left: first column, likewise.
        box_height: pixel rows of each box, int64 [n].
        box_width: pixel columns, likewise.
        height: pixel rows of every output.
        width: pixel columns of every output.
        mode: "nearest", "nearest-exact", "bilinear" or "bicubic", as in `torch.nn.functional.interpolate`.
        antialias: average all pixels that shrink to one; for bilinear and bicubic.
    """

    top: NDArray[np.int64]
    left: NDArray[np.int64]
    box_height: NDArray[np.int64]
    box_width: NDArray[np.int64]
    height: int
    width: int
    mode: str = "bilinear"
    antialias: bool = True

    def of(self, samples: NDArray[np.int64]) -> Resampled:
        """Return the boxes of some of the images, int64 [m]."""
        boxes = self.top[samples], self.left[samples], self.box_height[samples], self.box_width[samples]
        return Resampled(*boxes, self.height, self.width, self.mode, self.antialias)

    def output_shape(self, shape: torch.Size) -> torch.Size:
        """Return [n, c, height, width] for images of `shape` [n, c, h, w]."""
        return torch.Size((*shape[:2], self.height, self.width))

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """Resize the box of one image [c, h, w], with the function that torchvision uses.

        The channels of bytes lie together in the result where that is faster; see `pixels`.
        """
        top, left, h, w = self._boxes[sample]
        takes_pixels = image.dtype is torch.uint8 and image.is_cpu and image.ndim == 3 and 3 <= image.size(0) <= 4
        if not takes_pixels or not self.antialias or self.mode not in _PIXEL_KERNELS:
            return self._resized(self._piece(image, sample))
        # torch tells layouts by strides, which a dim of 1 leaves open
        if 1 in (h, w, self.height, self.width) or (h, w) == (self.height, self.width):
            return self._resized(self._piece(image, sample))
        pixels, out = box_pixels(image, top, left, h, w), (self.height, self.width)
        channels, size = pixels.size(1), pixels.size(1) * self.height * self.width
        strides = (1, self.width * channels, channels)
        resized = borrow(size)
        _PIXEL_KERNELS[self.mode](pixels, out, False, out=resized.as_strided((1, channels, *out), (size, *strides)))
        return resized.as_strided((image.size(0), *out), strides)

    @cached_property
    def _boxes(self) -> list[tuple[int, int, int, int]]:
        """Return top, left, height and width of each box, as Python ints, which slice faster."""
        boxes = zip(
            self.top.tolist(), self.left.tolist(), self.box_height.tolist(), self.box_width.tolist(), strict=True
        )
        return list(boxes)

    def _piece(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        top, left, h, w = self._boxes[sample]
        return image[:, top : top + h, left : left + w]

    def _resized(self, piece: torch.Tensor) -> torch.Tensor:
        if piece.shape[1:] == (self.height, self.width):
            return piece
        if self.mode == "nearest":
            rows, columns = _nearest_sources(piece.shape[1], self.height), _nearest_sources(piece.shape[2], self.width)
            return piece[:, rows[:, None], columns]
        # Torch (2.6 to 2.15) mistakes the layout of an output one pixel wide: wrong pixels, or an error for uint8.
        is_narrow = self.width == 1
        # Torch resizes uint8 on the CPU only.
        supported = _TORCH_DTYPES if piece.is_cpu and not is_narrow else _TORCH_DTYPES - {torch.uint8}
        dtype = piece.dtype if piece.dtype in supported else torch.float32
        resized = interpolate(
            (piece.mT if is_narrow else piece)[None].to(dtype),
            (1, self.height) if is_narrow else (self.height, self.width),
            mode=self.mode,
            align_corners=None if self.mode == "nearest-exact" else False,
            antialias=self.antialias and self.mode in ("bilinear", "bicubic"),
        )[0]
        resized = resized.mT if is_narrow else resized
        if self.mode == "bicubic" and not piece.dtype.is_floating_point and dtype.is_floating_point:
            limits = torch.iinfo(piece.dtype)
            resized = resized.clamp(limits.min, limits.max)
        if dtype is piece.dtype or piece.dtype.is_floating_point:
            return resized.to(piece.dtype)
        return resized.round().to(piece.dtype)

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """Resize the boxes of all images [n, c, h, w]; on a device in a bounded number of calls, whatever n is."""
        is_few = len(image) <= FEW and not self.mode.startswith("nearest")
        if not image.numel() or (is_few and not image.is_cpu):
            return super().all(image)
        if image.is_cpu:
            return torch.stack([self._resized(self._piece(one, sample)) for sample, one in enumerate(image)])
        return resample(image, *self.axes, self.mode, antialias=self.antialias)

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """Return the rows and the columns of the boxes."""
        return Axis(self.top, self.box_height, self.height), Axis(self.left, self.box_width, self.width)

    def nearest(self) -> Resampled:
        """Return this change for masks: by nearest neighbour."""
        return self if self.mode.startswith("nearest") else replace(self, mode="nearest")

    def points(self, xy: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Map points; see `Geometry`."""
        left, top, w, h = of_points(sample, self.left, self.top, self.box_width, self.box_height)
        return torch.stack([(xy[:, 0] - left) * (self.width / w), (xy[:, 1] - top) * (self.height / h)], 1)


def check_mode(interpolation: Any, known: tuple[str, ...] = MODES) -> str:
    """Return the name of an interpolation, or of torchvision's InterpolationMode. Raise TransformError for others."""
    mode = getattr(interpolation, "value", interpolation)
    if mode not in known:
        raise TransformError(f"interpolation={interpolation!r}; expected one of {', '.join(known)}")
    return str(mode)


def _nearest_sources(size: int, output_size: int) -> torch.Tensor:
    """Return the pixel that each of `output_size` pixels shows, as torch's "nearest": rounded down, in float32."""
    scale = torch.tensor(size / output_size, dtype=torch.float32, device="cpu")
    return (torch.arange(output_size, dtype=torch.float32, device="cpu") * scale).long().clamp_(max=size - 1)
