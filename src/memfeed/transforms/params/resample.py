"""Resizing: a box of each image, in another number of pixels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from memfeed.errors import TransformError
from memfeed.transforms.params.geometry import Geometry

MODES = ("nearest", "nearest-exact", "bilinear", "bicubic")
_BY_TORCH = {torch.uint8, torch.float32, torch.float64, torch.float16, torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Resampled(Geometry):
    """A box of each of n images, resized to one size.

    Args:
        top: first row of each box, int64 [n], in pixels.
        left: first column, likewise.
        box_height: rows of each box, int64 [n].
        box_width: columns, likewise.
        height: rows of every output.
        width: columns of every output.
        mode: "nearest", "nearest-exact", "bilinear" or "bicubic", as `torch.nn.functional.interpolate` knows them.
        antialias: average over what shrinks to one pixel; for bilinear and bicubic.
    """

    top: NDArray[np.int64]
    left: NDArray[np.int64]
    box_height: NDArray[np.int64]
    box_width: NDArray[np.int64]
    height: int
    width: int
    mode: str = "bilinear"
    antialias: bool = True

    def output_shape(self, shape: torch.Size) -> torch.Size:
        """What images of `shape` [n, c, h, w] become: [n, c, height, width]."""
        return torch.Size((*shape[:2], self.height, self.width))

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """One image [c, h, w], by the code that torchvision resizes with."""
        top, left = int(self.top[sample]), int(self.left[sample])
        piece = image[:, top : top + int(self.box_height[sample]), left : left + int(self.box_width[sample])]
        if piece.shape[1:] == (self.height, self.width):
            return piece
        if self.mode == "nearest":
            return piece[:, _nearest(piece.shape[1], self.height)[:, None], _nearest(piece.shape[2], self.width)]
        # Torch (2.6 to 2.15) mistakes the layout of what comes out one pixel wide: wrong pixels, or an error for uint8.
        narrow = self.width == 1
        known = _BY_TORCH if piece.is_cpu and not narrow else _BY_TORCH - {torch.uint8}  # no GPU knows uint8
        dtype = piece.dtype if piece.dtype in known else torch.float32
        made = interpolate(
            (piece.mT if narrow else piece)[None].to(dtype),
            (1, self.height) if narrow else (self.height, self.width),
            mode=self.mode,
            align_corners=None if self.mode == "nearest-exact" else False,
            antialias=self.antialias and self.mode in ("bilinear", "bicubic"),
        )[0]
        made = made.mT if narrow else made
        if self.mode == "bicubic" and not piece.dtype.is_floating_point and dtype.is_floating_point:
            limits = torch.iinfo(piece.dtype)
            made = made.clamp(limits.min, limits.max)
        return made if dtype is piece.dtype else made.round().to(piece.dtype)

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """All images [n, c, h, w], one after another, on any device."""
        if not len(image):
            return image.new_empty(self.output_shape(image.shape))
        return torch.stack([self.one(one, sample) for sample, one in enumerate(image)])

    def nearest(self) -> Resampled:
        """The same for masks."""
        return self if self.mode.startswith("nearest") else replace(self, mode="nearest")

    def points(self, xy: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Where points [m, 2] of samples [m] go; see `Geometry`."""
        left, top, w, h = (
            torch.from_numpy(a)[sample] for a in (self.left, self.top, self.box_width, self.box_height)
        )  # fmt: skip
        return torch.stack([(xy[:, 0] - left) * (self.width / w), (xy[:, 1] - top) * (self.height / h)], 1)


def check_mode(interpolation: Any, known: tuple[str, ...] = MODES) -> str:
    """The name of an interpolation, given as such or as torchvision's InterpolationMode."""
    mode = getattr(interpolation, "value", interpolation)
    if mode not in known:
        raise TransformError(f"interpolation={interpolation!r}; expected one of {', '.join(known)}")
    return str(mode)


def _nearest(size: int, wanted: int) -> torch.Tensor:
    """Which of `size` pixels each of `wanted` is, as torch's "nearest" has it: rounded down, in float32."""
    scale = torch.tensor(size / wanted, dtype=torch.float32)
    return (torch.arange(wanted, dtype=torch.float32) * scale).long().clamp_(max=size - 1)
