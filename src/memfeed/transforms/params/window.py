"""Crops and flips as one description: a window of each image, or a box of each volume, and what to mirror."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.errors import TransformError
from memfeed.transforms.params.geometry import Fill, Geometry, filled, line_indices, of_points, take_lines


@dataclass(frozen=True, eq=False)
class Window(Geometry):
    """A window of one size on each of n images, then flips. Pixels are moved, never computed.

    Args:
        top: first row of each window, int64 [n], in pixels; negative if the window begins above the image.
        left: first column, likewise.
        height: pixel rows of every window.
        width: pixel columns of every window.
        hflip: mirror left and right, bool [n].
        vflip: mirror top and bottom, bool [n].
        fill: value of pixels outside the images, one number or one per channel.
    """

    top: NDArray[np.int64]
    left: NDArray[np.int64]
    height: int
    width: int
    hflip: NDArray[np.bool_]
    vflip: NDArray[np.bool_]
    fill: Fill = 0

    @classmethod
    def whole(cls, shape: torch.Size, **changes: Any) -> Window:
        """Return windows that show all of images [n, c, h, w], not mirrored, except for the fields in `changes`."""
        n, _, height, width = shape
        zeros, unflipped = np.zeros(n, np.int64), np.zeros(n, np.bool_)
        fields = {"top": zeros, "left": zeros, "height": height, "width": width, "hflip": unflipped, "vflip": unflipped}
        return cls(**{**fields, **changes})

    def then(self, after: Window) -> Window | None:
        """Join this window and `after`, which applies to its output, into one.

        Return None if `after` reaches beyond that output: the pixels there are its fill, and not those of the image.
        """
        if not after.lies_within(self.height, self.width):
            return None
        # A window of a mirrored image is at the same distance from the other side of the image itself.
        top = np.where(self.vflip, self.height - after.height - after.top, after.top)
        left = np.where(self.hflip, self.width - after.width - after.left, after.left)
        hflip, vflip = self.hflip ^ after.hflip, self.vflip ^ after.vflip
        return replace(after, top=self.top + top, left=self.left + left, hflip=hflip, vflip=vflip, fill=self.fill)

    def lies_within(self, height: int, width: int) -> bool:
        """Return True if no window reaches beyond images of this size."""
        rooms = (self.top, height - self.height), (self.left, width - self.width)
        return all(room >= 0 and (not len(begin) or 0 <= begin.min() <= begin.max() <= room) for begin, room in rooms)

    def output_shape(self, shape: torch.Size) -> torch.Size:
        """Return [n, c, height, width] for images of `shape` [n, c, h, w]."""
        return torch.Size((*shape[:2], self.height, self.width))

    @cached_property
    def _corners(self) -> list[tuple[int, int, list[int]]]:
        """Return top, left and the dims to mirror of each sample, as Python ints, which slice faster."""
        mirrored = zip(self.hflip.tolist(), self.vflip.tolist(), strict=True)
        dims = [[-1] * hflip + [-2] * vflip for hflip, vflip in mirrored]
        return list(zip(self.top.tolist(), self.left.tolist(), dims, strict=True))

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """Cut the window out of one image [c, h, w]. Return a view if it is neither padded nor mirrored."""
        top, left, dims = self._corners[sample]
        _, h, w = image.shape
        bottom, right = top + self.height, left + self.width
        if top < 0 or left < 0 or bottom > h or right > w:
            padded = filled(self.fill, (image.size(0), self.height, self.width), image)
            piece = image[:, max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)]
            down, across = max(-top, 0), max(-left, 0)
            padded[:, down : down + piece.shape[1], across : across + piece.shape[2]] = piece
            piece = padded
        else:
            piece = image[:, top:bottom, left:right]
        return piece.flip(dims) if dims else piece  # torch has no negative strides

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """Cut the windows out of images [n, c, h, w], on any device: pick rows, then columns."""
        rows = line_indices(self.top, self.height, self.vflip)
        columns = line_indices(self.left, self.width, self.hflip)
        return take_lines(image, rows, columns, fill=self.fill)

    def nearest(self) -> Window:
        """Return this change for masks: filled with 0."""
        return replace(self, fill=0)

    def points(self, xy: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Map points; see `Geometry`."""
        left, top, hflip, vflip = of_points(sample, self.left, self.top, self.hflip, self.vflip)
        x, y = xy[:, 0] - left, xy[:, 1] - top
        return torch.stack([torch.where(hflip > 0, self.width - x, x), torch.where(vflip > 0, self.height - y, y)], 1)


@dataclass(frozen=True, eq=False)
class VolumeWindow(Geometry):
    """A box of one size in each of n volumes, then flips. Voxels are moved, never computed.

    Args:
        begin: first plane, row and column of each box, int64 [n, 3]; negative if the box begins outside.
        size: planes, rows and columns of every box.
        flips: mirror along depth, height, width, bool [n, 3].
        fill: value of voxels outside the volumes, one number or one per channel.
    """

    begin: NDArray[np.int64]
    size: tuple[int, int, int]
    flips: NDArray[np.bool_]
    fill: Fill = 0

    @classmethod
    def whole(cls, shape: torch.Size, **changes: Any) -> VolumeWindow:
        """Return boxes that show all of volumes [n, c, d, h, w], except for the fields in `changes`."""
        fields = {
            "begin": np.zeros((shape[0], 3), np.int64),
            "size": tuple(shape[2:]),
            "flips": np.zeros((shape[0], 3), np.bool_),
        }
        return cls(**{**fields, **changes})

    def output_shape(self, shape: torch.Size) -> torch.Size:
        """Return [n, c, *size] for volumes of `shape` [n, c, d, h, w]."""
        return torch.Size((*shape[:2], *self.size))

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """Cut the box out of one volume [c, d, h, w]. Return a view if it is neither padded nor mirrored."""
        begin, piece = self.begin[sample].tolist(), image
        for dim, (first, size) in enumerate(zip(begin, self.size, strict=True), 1):
            piece = piece.narrow(dim, max(first, 0), min(first + size, image.shape[dim]) - max(first, 0))
        if piece.shape[1:] != self.size:
            padded = inside = filled(self.fill, (len(image), *self.size), image)
            for dim, first in enumerate(begin, 1):
                inside = inside.narrow(dim, max(-first, 0), piece.shape[dim])
            inside.copy_(piece)
            piece = padded
        dims = (np.flatnonzero(self.flips[sample]) - 3).tolist()
        return piece.flip(dims) if dims else piece

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """Cut the boxes out of volumes [n, c, d, h, w], on any device: pick planes, then rows, then columns."""
        lines = [line_indices(self.begin[:, dim], self.size[dim], self.flips[:, dim]) for dim in range(3)]
        return take_lines(image, *lines, fill=self.fill)

    def nearest(self) -> VolumeWindow:
        """Return this change for masks: filled with 0."""
        return replace(self, fill=0)

    def points(self, xy: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Raise TransformError: boxes and keypoints have no depth."""
        raise TransformError("found boxes or keypoints beside volumes; expected masks, which follow them")
