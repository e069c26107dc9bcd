"""Crops and flips of volumes: a box of each volume, and which axes to mirror."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.errors import TransformError
from memfeed.transforms.params.geometry import Fill, Geometry, filled, line_indices, take_lines


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
